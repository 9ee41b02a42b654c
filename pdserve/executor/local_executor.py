"""The executor of one process and one device: owns the model, the KV pool, and the tokens of every row.

`factory` builds it; only the scheduler thread calls it; its runner may compute on another thread. `launch` copies all
state that the scheduler may change: page table, sampling metadata, and the tokens of rows opened since the last launch.
Steps alone touch the state that steps change (KV and tokens on the device), in the order of their launch.

Where several ranks share the model, each has an executor. All receive the same rows and plans, and get the same
results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np
import torch

from pdserve.executor import kv_pages
from pdserve.executor.deferred_drafter import Backlog
from pdserve.executor.drafter import ModelDrafter, Proposals, but_last
from pdserve.executor.grammar_rows import GrammarRows, StepGrammars
from pdserve.executor.input_batch import (
    MIN_TOKENS,
    HostBatch,
    InputEmbeds,
    SamplingMetadata,
    StepParams,
    TokenPool,
    cut_plan,
    read_plan,
    sampled_rows,
)
from pdserve.executor.interface import BatchPlan, HostPages, StepHandle, StepResult
from pdserve.executor.logit_processors import LogitProcessors
from pdserve.executor.loras import LoraAdapters
from pdserve.executor.model_in_use import ModelInUse, ModelParts
from pdserve.executor.model_runner import Collect, NativeDecode, OnLayer, choose_runner
from pdserve.executor.sampler import Found, TokenSampler, choose_with_torch, d2h_copy, d2h_copy_after, to_host
from pdserve.executor.slot_stamps import SlotCopies, SlotStamps, StampWrites, copy_slots
from pdserve.executor.token_outputs import StepOutputs, read_token_outputs
from pdserve.executor.verify import Fold, PendingRows, StepDrafts, shorten, state_slots, take_apart
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.matcher import OutputMatcher
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import IntArray
from pdserve.model.interface import Model
from pdserve.protocol.hidden_states import HiddenParams, unpack_embeds
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams, Grammar


@dataclasses.dataclass(frozen=True)
class _Step:
    """The inputs of a step, as they were at its launch.

    `writes`: tokens of the rows opened since the launch before; `arrived`: what other servers' drafters have kept of
    them, see `ModelDrafter.resume`. `batches`: the micro-batches, empty when the plan has no rows. `params`: None when
    no row samples. `grammars`: None where no sampled token follows one. `drafts`: None where no row has any.
    `outputs`: what the step returns of its tokens beside the sampled ones. `backlog`: see `DeferredDrafter.begin`.
    """

    plan: BatchPlan
    writes: dict[int, IntArray]
    arrived: dict[int, tuple[int, bytes]]
    batches: tuple[HostBatch, ...]
    params: StepParams | None
    grammars: StepGrammars | None = None
    drafts: StepDrafts | None = None
    outputs: StepOutputs = StepOutputs()
    stamps: StampWrites | None = None
    copies: SlotCopies | None = None
    backlog: Backlog | None = None


class LocalExecutor(ModelInUse):
    """Implements `Executor` for one rank. `context_length`: most tokens of a row, prompt and output together.

    `layout` is the whole model's; `pools` and `attention` belong to this rank's part of it.
    `grammars`: the rows with a grammar, on the rank that samples. Without it every request with a grammar fails.
    With `overlap`, a thread computes the steps on CPU, and `close` ends it. On CUDA `launch` never waits.

    With `returns_results` False this rank returns no tokens; a step is resolved when its part is computed. `choose`
    picks tokens from logits. `decode` computes small decode steps in one call, see `NativeDecodePath`. With
    `returns_prompt_results` False the model computes prompt tokens as it computes decoded ones. `processed_logprobs`:
    see `sample`; log probabilities of prompt tokens are always the model's own. `drafter` proposes tokens for the next
    step of each row that samples; None: no model drafts.

    `fold` folds the pending tokens of state slots, for models with recurrent layers that take drafts. `max_forced`:
    most tokens forced by its grammar that `StepResult.drafts` offers for a row. `loras`: adapters of rows; None: off.
    `processors`: those that rows may name.
    """

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        pools: tuple[GroupPool, ...],
        attention: AttentionBackend,
        table: PageTable,
        *,
        context_length: int,
        device: torch.device,
        overlap: bool = False,
        grammars: GrammarRows | None = None,
        returns_results: bool = True,
        choose: TokenSampler = choose_with_torch,
        decode: NativeDecode | None = None,
        returns_prompt_results: bool = True,
        processed_logprobs: bool = False,
        drafter: ModelDrafter | None = None,
        fold: Fold | None = None,
        max_forced: int = 0,
        loras: LoraAdapters | None = None,
        processors: LogitProcessors | None = None,
    ) -> None:
        coord = model.parallel.coord
        self._layout, self._loras = layout, loras
        self.pools, self._table = pools, table
        self.device = device
        self._processed_logprobs, self._processors = processed_logprobs, processors or LogitProcessors()
        self._native_decode = device.type == "cpu" and not overlap
        self._tokens = TokenPool(table.num_rows + 1, context_length + 1, coord.shape.pp_size, device)
        self._sampling_metadata = SamplingMetadata(table.num_rows, model.spec.eos_token_ids)
        self._grammars = grammars or GrammarRows(None, JsonRules(), ())
        self._constrained: set[int] = set()
        """Open rows with a grammar."""
        self._open: set[int] = set()
        self._input_embeds = InputEmbeds()
        self._unwritten: dict[int, IntArray] = {}
        self._arrived: dict[int, tuple[int, bytes]] = {}
        self._launched: deque[StepHandle] = deque()
        self._runner = choose_runner(device, overlap, layout.layers_of(coord))
        self._pending = PendingRows(table) if layout.has_state else None
        self.max_forced = max_forced
        """Most tokens forced by its grammar that are offered as drafts of a row; 0: none are."""
        self._stamps: SlotStamps | None = None
        if layout.stamp_group is not None:
            self._stamps = SlotStamps(pools[layout.stamp_group], table)
        known = self._sampling_metadata.num_prompt
        self._prompts = known if returns_prompt_results else np.zeros_like(known)
        self._returns_results = returns_results
        self._copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and not coord.is_last_stage:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.use(ModelParts(model, attention, choose, decode, drafter, fold))
        self.balance_experts()

    @property
    def layout(self) -> KVLayout:
        """Geometry of the whole model's KV pages."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """`(address, bytes)` of this rank's KV pool, for each layout group."""
        return tuple(pool.buffer for pool in self.pools)

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
        draft_hidden: bytes = b"",
        hidden: HiddenParams | None = None,
        input_embeds: bytes = b"",
    ) -> None:
        """See `Executor.open_row`. The tokens reach the device with the next step."""
        assert row not in self._open, f"row {row} opened twice"
        assert 0 < len(token_ids) < self._tokens.tensor.shape[1], f"{len(token_ids)} tokens do not fit a row"
        self._open.add(row)
        self._unwritten[row] = np.asarray(token_ids, dtype=np.int64)
        if input_embeds:
            self._input_embeds.open_row(row, unpack_embeds(input_embeds, num_prompt_tokens))
        if logprobs is not None:
            logprobs = msgspec.structs.replace(logprobs, top=min(logprobs.top, self._model.spec.vocab_size))
        self._sampling_metadata.set(row, num_prompt_tokens, sampling, logprobs, hidden)
        if self._drafter is not None and self._deferred is not None:
            self._drafter.open(row)
            self._deferred.open(row)
            if draft_hidden:
                self._arrived[row] = len(token_ids) - 1, draft_hidden
        if self._stamps is not None:
            self._stamps.open(row, token_ids, num_prompt_tokens)
        if sampling.grammar is not None:
            self._constrained.add(row)
            self._grammars.open(row, sampling.grammar, sampling, token_ids[num_prompt_tokens:])

    def prepare_grammar(self, grammar: Grammar) -> Future[OutputMatcher] | None:
        """Begin to compile a grammar before its request takes a row; None where there is nothing to wait for."""
        return self._grammars.prepare(grammar)

    def close_row(self, row: int) -> None:
        """See `Executor.close_row`."""
        assert row in self._open, f"row {row} closed but not open"
        self._open.remove(row)
        self._unwritten.pop(row, None)
        self._arrived.pop(row, None)
        self._sampling_metadata.clear(row)
        self._input_embeds.close_row(row)
        if row in self._constrained:
            self._constrained.remove(row)
            self._grammars.close(row)
        if self._loras is not None:
            self._loras.close_row(row)
        if self._pending is not None:
            self._pending.drop(row)

    def draft_hidden(self, row: int) -> bytes:
        """See `Executor.draft_hidden`."""
        return b"" if self._drafter is None else self._drafter.kept(row)

    def forced_tokens(self, row: int) -> tuple[int, ...]:
        """Return the tokens that the grammar of table row `row` forces next, at most `max_forced`; empty without one.

        They are drafts that the grammar never cuts. Every step of the row is resolved.
        """
        return self._grammars.forced([row], self.max_forced).get(row, ())

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor.launch`. A rank of its own computes no draft behind one that the row's grammar forbids."""
        assert all(row.row in self._open for row in plan.rows), "the plan names a row that is not open"
        compute = None
        if self._native_path is not None and not layer_events and not self._unwritten:
            has_copies = self._stamps is not None and SlotCopies.of(plan, self._table) is not None
            has_pending = self._pending is not None and any(row.row in self._pending for row in plan.rows)
            compute = None if has_copies or has_pending else self._native_path.computation(plan)
            if compute is not None and self._deferred is not None:
                compute = self._deferred.beside(plan, compute, self._native_path.tapped, self._tokens.tensor)
        events, collect = self._runner.begin(compute or partial(self._compute, self._read(plan)), layer_events)
        self._launched.append(handle := StepHandle(plan, events, collect))
        return handle

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`. Raises the exception of the computation."""
        assert self._launched and self._launched[0] is handle, "resolve steps once, in the order of their launch"
        self._launched.popleft()
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor.offload`. Waits for the copy: a peer may write into the pages as soon as they are free."""
        self.settle_slots(state_slots(self._layout, pages))
        with self._runner.behind():
            return kv_pages.save(self.pools, pages)

    def settle_slots(self, slots: Sequence[int]) -> None:
        """Fold the accepted pending tokens of these state slots, before they are copied."""
        assert not self._launched, "a copy to the host while a step is unresolved"
        if self._pending is not None and self._fold is not None:
            with self._runner.behind():
                self._pending.settle(slots, self._fold)

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor.restore`."""
        assert not self._launched, "restore while a step is unresolved"
        with self._runner.behind():
            kv_pages.load(self.pools, kv_pages.offloaded(saved, self.pools), pages)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor.zero`. On CUDA in the order of the steps; on CPU at once, beside a step under way."""
        with self._runner.behind() if self.device.type == "cuda" else contextlib.nullcontext():
            kv_pages.zero(self.pools, pages)

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor.has_stamp`; looks at this rank's slot."""
        return self._stamps is None or self._stamps.has(slot, stamp)

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """See `Executor.seal`; completes this rank's slot."""
        assert not self._launched and self._stamps is not None
        with self._runner.behind(), torch.inference_mode():
            self._stamps.seal(slot, stamp, self._pending, self._fold)

    def close(self) -> None:
        """End the threads once they have finished the steps that began. No `launch` may follow."""
        self._runner.close()
        self.close_host_tier()
        self._grammars.shut_down()
        if self.experts is not None:
            self.experts.close()

    def _read(self, plan: BatchPlan) -> _Step:
        """Copy the inputs of the plan."""
        writes, self._unwritten = self._unwritten, {}
        arrived, self._arrived = self._arrived, {}
        if not plan.rows:
            return _Step(plan, writes, arrived, (), None)
        drafts: StepDrafts | None = None
        if any(row.drafts for row in plan.rows):
            if self.coord.shape.num_ranks == 1:
                plan = shorten(plan, self._grammars.allowed(plan))
            drafts = StepDrafts.of(plan)
        backlog = None if self._deferred is None else self._deferred.begin(plan)
        parts = cut_plan(plan, self.coord.shape.pp_size, MIN_TOKENS[self.device.type])
        batches = tuple(read_plan(part, self._table, self._prompts, self._layout) for part in parts)
        if self._input_embeds:
            batches = tuple(map(self._input_embeds.into, batches))
        if self._loras is not None:
            batches = tuple(map(self._loras.into, batches))
        if self._pending is not None:
            batches = tuple(map(self._pending.fold_into, batches))
            self._pending.launched(plan, has_drafts=drafts is not None)
        params: StepParams | None = None
        grammars: StepGrammars | None = None
        if any(len(batch.sampled) for batch in batches):
            table_rows, ends = sampled_rows(batches)
            params = self._sampling_metadata.pick(table_rows, ends)
            if self._constrained:
                grammars = self._grammars.pick(params, None if drafts is None else plan)
        stamps, copies = None, None
        if self._stamps is not None:
            stamps, copies = self._stamps.plan_writes(plan), SlotCopies.of(plan, self._table)
        outputs = read_token_outputs(plan, batches, self._sampling_metadata)
        return _Step(plan, writes, arrived, batches, params, grammars, drafts, outputs, stamps, copies, backlog)

    @torch.inference_mode()
    def _compute(self, step: _Step, on_layer: OnLayer | None) -> Collect:
        """Run the forward pass and sampling, on the runner's thread."""
        self._tokens.begin((row.row for row in step.plan.rows), step.writes)
        if step.arrived and self._drafter is not None:
            self._drafter.resume(step.arrived)
        if step.drafts is not None:
            self._tokens.put_drafts(step.drafts.table_rows, step.drafts.positions, step.drafts.token_ids)
        if self._deferred is not None:
            self._deferred.catch_up(step.backlog, self._tokens.tensor)
        self._model_runner.begin(step.plan.step, sum(batch.columns.shape[1] for batch in step.batches))
        if not step.batches:
            self._model_runner.idle()
            if on_layer is not None:
                on_layer(self._model.num_layers - 1)
            return partial(StepResult, step.plan.step, ())
        masks = None
        if step.params is not None and step.grammars is not None:
            masks = self._grammars.begin(step.params, step.grammars)
        if step.copies is not None:
            copy_slots(self.pools, step.copies.before)
        if step.stamps is not None and self._stamps is not None:
            self._stamps.write(step.stamps)
        last = self._model.num_layers - 1
        reported = on_layer if self._drafter is None else but_last(on_layer, last)
        logits = self._model_runner.logits(step.batches, self._tokens.tensor, reported, step.outputs.params)
        if step.copies is not None:
            copy_slots(self.pools, step.copies.after)
        chosen = None
        if step.params is not None:
            chosen = self._model_runner.choose(logits, step.params, self._tokens.tensor, masks)
        outputs = self._model_runner.token_outputs(step.outputs.params, self.device)
        arrival = self._model_runner.share(chosen, outputs)
        is_late = not self.coord.is_last_stage and not (chosen is None and outputs is None)
        if not is_late:
            arrival.wait()
        if step.params is not None and chosen is not None:
            if is_late:
                self._tokens.put_later(step.params, chosen.token_ids, arrival)
            elif not (self._model_runner.has_put and step.params.all_greedy):
                self._tokens.put(step.params, chosen.token_ids)
            if masks is not None:
                masks.sampled(chosen.token_ids)
        proposals: Proposals | None = None
        if self._deferred is not None:
            sampled = None if step.drafts is None or chosen is None else chosen.token_ids
            proposals = self._deferred.propose(step.backlog, step.plan, step.batches[0], sampled, self._tokens.tensor)
            if on_layer is not None:
                on_layer(last)
        if not (self._returns_results or (self._pending is not None and step.drafts is not None)):
            fetched = d2h_copy(None, None, self.device)
        elif is_late:
            fetched = d2h_copy_after(chosen, outputs, arrival, self._copy_stream)
        else:
            fetched = d2h_copy(chosen, outputs, self.device)
        return partial(self._collect, step, fetched, proposals)

    def _collect(self, step: _Step, fetched: Callable[[], Found], proposals: Proposals | None) -> StepResult:
        """Wait for the results of a step. Scheduler thread."""
        sampled, of_tokens = fetched()
        prompts, hidden = step.outputs.pack(of_tokens)
        if step.params is None or sampled is None:
            return StepResult(step.plan.step, (None,) * len(step.plan.rows), prompts, hidden=hidden)
        plan, failed = step.plan, sampled.failed_positions(step.params)
        tokens = to_host(sampled, step.params)
        if failed is None and step.drafts is None and len(tokens) == len(plan.rows) and proposals is None:
            return StepResult(plan.step, tuple(tokens), prompts, hidden=hidden)
        found = take_apart(plan, tokens, failed)
        if self._pending is not None:
            self._pending.resolved(plan, found.more)
        drafts = {} if proposals is None or not self._returns_results else proposals.by_row()
        if failed is not None and self.max_forced:
            drafts |= self._grammars.forced_drafts(plan, found.failed, self.max_forced)
        return StepResult(plan.step, found.tokens, prompts, found.failed, found.more, drafts, hidden)
