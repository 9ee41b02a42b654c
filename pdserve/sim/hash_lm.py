"""A model for simulations: its next token is a hash of every KV byte that attention would read.

Any wrong, missing, stale or swapped byte changes the tokens. "The same tokens as the monolith" is therefore an oracle
for all code between the pools. `hash_layers` has the layers, `hash_sampling` the draw of tokens.

A row with drafts computes the KV of all its tokens. What lies beyond the accepted prefix is overwritten with poison
after the step. Such a row leaves the state in its slot as it was: its tokens are *pending*, and the row's next step
first folds those that were accepted.

A layout with a DRAFT group has draft KV, see `hash_draft`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.executor.interface import (
    BatchPlan,
    BatchRow,
    HostPages,
    ImportedPages,
    SampledToken,
    StepHandle,
    StepResult,
)
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, PageSpace
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates, unpack_embeds
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.sim.hash_draft import HashDraftKV
from pdserve.sim.hash_layers import POISON, U64, HashLayer, RowPages, forward, mix
from pdserve.sim.hash_layout import HashStamps, hash_layout
from pdserve.sim.hash_sampling import VOCAB_SIZE, HashDrafting, HashSampler
from pdserve.sim.hash_tier import HashTierCopies, SavedPages
from pdserve.transfer.plan import RankShard

__all__ = ["HashExecutor", "hash_layout"]


@dataclasses.dataclass(slots=True)
class _Row:
    """An open row. `tokens` is its token pool."""

    tokens: list[int]
    sampler: HashSampler
    stamp: int
    """The request's number in stamps."""
    num_known: int
    """Tokens that were known when the row was opened."""
    hidden: HiddenParams | None = None
    pending: list[list[int]] = dataclasses.field(default_factory=list)
    """Tokens that the state does not cover yet, from `pending_start` on: their inputs of the recurrent layers."""
    pending_start: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _RowResult:
    """What one row of a step has sampled, first to last, and proposes for its next step."""

    sampled: tuple[SampledToken, ...] = ()
    drafts: tuple[int, ...] = ()
    prompt: PromptLogprobs | None = None
    hidden: HiddenStates | None = None


class HashExecutor(HashTierCopies, HashStamps):
    """Implements `Executor` over numpy pools of uint64, one for each rank and group: `[page, layer, word]`.

    `layout` is the whole model's. The executor computes for all ranks of a replica; `buffers` are the first rank's.
    `num_pages`: pages of each group's pool; an int: of the token groups, when the model has no others. `echo`: see
    `HashSampler`. `drafting`: a model drafter; None: none. The drafter computes the next tokens in pages behind the
    pool's, so it also works where a row has no memory for them. With `checks_drafts` draft KV that the drafter did not
    write for the same tokens is an AssertionError.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Mapping[PageSpace, int],
        page_table: PageTable,
        shape: ParallelShape = SINGLE.shape,
        *,
        echo: float = 0.0,
        drafting: HashDrafting | None = None,
        checks_drafts: bool = True,
        weights: int = 0,
    ) -> None:
        self._layout, self._table = layout, page_table
        self._sizes = {PageSpace.TOKENS: num_pages} if isinstance(num_pages, int) else num_pages
        self._echo, self._drafting, self._weights = echo, drafting, weights
        self._num_spare = 0 if drafting is None else layout.pages_for(drafting.num_draft_tokens) + 1
        coords = [shape.coord(rank) for rank in range(shape.num_ranks)]
        self.windows = [[RankShard.of(group, coord) for group in layout.groups] for coord in coords]
        self._whole: list[list[U64]] = [
            [
                np.full((self._sizes[it.space] + self._num_spare, it.num_layers, it.layer_bytes // 8), POISON)
                for it in (own.group for own in shards)
            ]
            for shards in self.windows
        ]
        self.pools = [[pool[: len(pool) - self._num_spare] for pool in pools] for pools in self._whole]
        """By rank and group."""
        self._layers = [self._layer(layer) for layer in range(layout.num_layers)]
        self._draft_kv: HashDraftKV | None = None
        if drafting is not None and layout.groups[-1].kind is GroupKind.DRAFT:
            own = self._layer_of(len(layout.groups) - 1, layout.groups[-1].layers[0])
            self._draft_kv = HashDraftKV(own, drafting.weights, checks=checks_drafts)
        self._by_row: dict[int, _Row] = {}
        self._verifying: dict[int, int] = {}
        """By row: the unresolved step in which it has drafts."""
        self.late = False
        self._last_step = 0
        """The newest computed step."""
        self._layer_events: dict[int, CountedLayerEvents] = {}
        """Of steps that are not computed."""

    def change_weights(self, weights: int) -> None:
        """Compute with other weights from now on. No row is open."""
        assert not self._by_row, "the weights change while a request has a row"
        self._weights = weights
        self._layers = [self._layer(layer) for layer in range(self._layout.num_layers)]

    def _layer(self, layer: int) -> HashLayer:
        """Return a layer of the model: the DRAFT group, whose layers have the same numbers, is the last one."""
        return self._layer_of(next(i for i, group in enumerate(self._layout.groups) if layer in group.layers), layer)

    def _layer_of(self, index: int, layer: int) -> HashLayer:
        """Return layer `layer` of the group with this index."""
        group = self._layout.groups[index]
        heads = [plane.num_heads for plane in group.planes]
        planes: list[list[list[U64]]] = [[[] for _ in range(count)] for count in heads]
        attended: list[list[U64]] = [[] for _ in range(heads[0])]
        for shards, pools in zip(self.windows, self._whole, strict=True):
            shard = shards[index]
            if layer not in shard.layers:
                continue
            words = pools[index][:, shard.layers.index(layer)]
            for number, (plane, offset) in enumerate(zip(shard.group.planes, shard.group.plane_offsets, strict=True)):
                size = plane.head_bytes // 8
                for own, head in enumerate(shard.heads[number]):
                    start = offset // 8 + own * size
                    planes[number][head].append(words[:, start : start + size])
            if group.space is not PageSpace.SLOTS:
                tokens = words.reshape(len(words), shard.group.num_planes, shard.group.num_kv_heads, group.page_tokens)
                for own, head in enumerate(shard.heads[0]):
                    attended[head].append(tokens[:, :, own])
        return HashLayer(group, tuple(map(tuple, planes)), tuple(attended), self._weights)

    @property
    def layout(self) -> KVLayout:
        """See `Executor`."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor`."""
        return self.buffers_of(0)

    def buffers_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return `(address, bytes)` of each pool of a rank."""
        return tuple((int(pool.ctypes.data), pool.nbytes) for pool in self.pools[rank])

    def events_of(self, step: int) -> LayerEvents:
        """Return the layer events of `step`: of all layers at once, because rows are computed token by token."""
        if step <= self._last_step:
            return ALL_WRITTEN
        return self._layer_events.setdefault(step, CountedLayerEvents(range(1)))

    def poison(self, pages: list[int], space: PageSpace = PageSpace.TOKENS) -> None:
        """Overwrite freed pages, so that a read after free changes the tokens."""
        for group, pool in self._all_pools():
            if group.space is space:
                pool[pages] = POISON

    def poison_all(self) -> None:
        """Overwrite all pages: their memory was given back."""
        for _, pool in self._all_pools():
            pool[:] = POISON

    def _all_pools(self) -> Iterator[tuple[KVGroup, U64]]:
        for pools in self.pools:
            yield from zip(self._layout.groups, pools, strict=True)

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
        """See `Executor`.

        Raises:
            AssertionError: `draft_hidden` is not of the position before the last of `token_ids`.
        """
        self._by_row[row] = _Row(
            tokens=_with_embeds(token_ids, num_prompt_tokens, input_embeds),
            sampler=HashSampler(sampling, num_prompt_tokens, logprobs, self._echo),
            stamp=SlotStamp.of(token_ids[:num_prompt_tokens], 0).request,
            num_known=len(token_ids),
            hidden=hidden,
        )
        if draft_hidden:
            assert self._draft_kv is not None, "a hidden state from another drafter"
            last = len(token_ids) - 1
            drawn = self._by_row[row].sampler.draw(HashDraftKV.number(draft_hidden), token_ids, last)
            assert drawn == token_ids[last], "a hidden state of another request or position"
            self._draft_kv.resume(row, last, draft_hidden)

    def close_row(self, row: int) -> None:
        """See `Executor`."""
        del self._by_row[row]
        if self._draft_kv is not None:
            self._draft_kv.close(row)

    def draft_hidden(self, row: int) -> bytes:
        """See `Executor`."""
        return b"" if self._draft_kv is None else self._draft_kv.hidden(row)

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`.

        A `late` executor computes in `resolve`, from a copy of the page table made at launch.

        Raises:
            AssertionError: a row whose step with drafts is not resolved is planned again.
        """
        for row in plan.rows:
            assert row.row not in self._verifying, f"{row.rid} is planned again before its drafts are settled"
            if row.drafts:
                self._verifying[row.row] = plan.step
        step = _Step(self, plan, {row.row: self._row_pages(row.row) for row in plan.rows})
        if not self.late:
            step.result()
        return StepHandle(plan, self.events_of(plan.step) if layer_events else None, step.result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`."""
        self._verifying = {row: step for row, step in self._verifying.items() if step != handle.plan.step}
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor`. The accepted tokens that are pending are folded into the slots first."""
        self._settle(pages)
        contents = [pool[list(own)].copy() for pools in self.pools for pool, own in zip(pools, pages, strict=True)]
        return SavedPages(contents, len(self.pools))

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""
        if isinstance(saved, ImportedPages):
            both = zip(*self.pools, saved.data, strict=True)
            saved = SavedPages([np.frombuffer(own, "<u8").reshape(-1, *pool.shape[1:]) for pool, own in both])
        assert isinstance(saved, SavedPages)
        contents = iter(saved.contents)
        for pools in self.pools:
            for pool, own in zip(pools, pages, strict=True):
                pool[list(own)] = next(contents)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""
        for pools in self.pools:
            for pool, own in zip(pools, pages, strict=True):
                pool[list(own)] = 0

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """See `Executor`; completes the slots of all ranks."""
        self._settle([[slot] if group.space is PageSpace.SLOTS else [] for group in self._layout.groups])
        self.put_stamp(slot, stamp)

    # ------------------------------------------------------------------ a step

    def compute(self, plan: BatchPlan, tables: Mapping[int, RowPages]) -> StepResult:
        """Compute a launched step. `tables`: the pages of its rows at launch."""
        found = [self._compute_row(row, tables[row.row], plan.num_proposals) for row in plan.rows]
        self._last_step = plan.step
        events = self._layer_events.pop(plan.step, None)
        if events is not None:
            events.on_layer(0)
        return StepResult(
            plan.step,
            tuple(each.sampled[0] if each.sampled else None for each in found),
            {index: each.prompt for index, each in enumerate(found) if each.prompt is not None},
            more={index: found[index].sampled[1:] for index, row in enumerate(plan.rows) if row.drafts},
            drafts={index: each.drafts for index, each in enumerate(found) if each.drafts},
            hidden={index: each.hidden for index, each in enumerate(found) if each.hidden is not None},
        )

    def _compute_row(self, row: BatchRow, pages: RowPages, most: int | None) -> _RowResult:
        """Compute one row. `most`: drafts to propose, see `BatchPlan.num_proposals`."""
        own = self._by_row[row.row]
        if row.state_from >= 0:
            self._copy_slot(row.state_from, pages.slot)
        self.fold(row.row, pages.slot)
        self._stamp(row, own, pages.slot)
        if row.drafts:
            return self._verify(row, own, pages, most)
        tokens, sampler = own.tokens, own.sampler
        first = None if sampler.logprobs is None else sampler.logprobs.prompt_from
        told: dict[int, int] = {}
        carries: list[int] = []
        for position in range(row.start, row.end):
            carry = forward(self._layers, pages, position, tokens[position])
            carries.append(carry)
            if row.state_to >= 0 and position == row.end - 1:
                self._copy_slot(pages.slot, row.state_to)
            if first is not None and first <= position < sampler.num_prompt - 1:
                told[position + 1] = mix(carry ^ tokens[position + 1])
        part, states = sampler.of_prompt(told), _hidden_of(own.hidden, row.start, carries)
        if not row.sample:
            self._write_draft_kv(row, pages, tokens[: row.end], carries)
            return _RowResult(prompt=part, hidden=states)
        del tokens[row.end :]
        tokens.append(sampler.draw(carry, tokens, row.end))
        self._write_draft_kv(row, pages, tokens, carries)
        return _RowResult((sampler.sampled(tokens[-1]),), self._propose(own, pages, carry, most), part, states)

    def _verify(self, row: BatchRow, own: _Row, pages: RowPages, most: int | None) -> _RowResult:
        """Compute a row with drafts: sample at each position while the draft there was right."""
        tokens, sampler, start = own.tokens, own.sampler, row.start
        assert row.sample and start >= sampler.num_prompt and row.end == start + 1 + len(row.drafts), row
        assert row.state_to < 0 and start < len(tokens), row
        del tokens[start + 1 :]
        drafts = row.drafts[: sampler.allowed(row.drafts, tokens)]
        tokens += drafts
        inputs: list[list[int]] = [[] for _ in tokens[start:]]
        saved = self._read_slot(pages.slot)
        carries = [
            forward(self._layers, pages, start + index, tokens[start + index], inputs[index])
            for index in range(1 + len(drafts))
        ]
        self._write_slot(pages.slot, saved)
        drawn = self.accept(sampler, carries, tokens, start, drafts)
        tokens[start + 1 :] = drawn
        self._forget(pages, range(start + len(drawn), row.end))
        own.pending, own.pending_start = inputs[: len(drawn)], start
        self._write_draft_kv(row, pages, tokens, carries[: len(drawn)])
        return _RowResult(tuple(map(sampler.sampled, drawn)), self._propose(own, pages, carries[len(drawn) - 1], most))

    def _write_draft_kv(self, row: BatchRow, pages: RowPages, tokens: Sequence[int], carries: Sequence[int]) -> None:
        """Write the draft KV of the known tokens that a row has computed, and of the token that it has sampled."""
        if self._draft_kv is not None:
            self._draft_kv.write(row.row, pages, tokens, row.start, carries)

    def accept(
        self, sampler: HashSampler, carries: Sequence[int], tokens: Sequence[int], start: int, drafts: Sequence[int]
    ) -> list[int]:
        """Draw tokens from `start + 1` on, up to and with the first one that differs from the draft at its position.

        `carries`: the number of each computed token. `tokens`: the tokens before them, then `drafts`.
        """
        drawn: list[int] = []
        for index, carry in enumerate(carries):
            drawn.append(sampler.draw(carry, tokens, start + 1 + index))
            if index == len(drafts) or drawn[-1] != drafts[index]:
                break
        return drawn

    def fold(self, row: int, slot: int) -> None:
        """Bring the state of a row, in `slot`, up to its accepted tokens."""
        own = self._by_row[row]
        self._fold(own, slot)
        own.pending = []

    def _fold(self, own: _Row, slot: int) -> None:
        recurrent = [layer for layer in self._layers if layer.is_recurrent]
        for position, inputs in enumerate(own.pending, own.pending_start):
            for layer, carry in zip(recurrent, inputs, strict=True):
                layer.recur(slot, position, carry)

    def _settle(self, pages: Sequence[Sequence[int]]) -> None:
        """Fold the pending tokens of all slots in `pages`, a list for each group."""
        slots = {
            slot
            for group, own in zip(self._layout.groups, pages, strict=True)
            if group.space is PageSpace.SLOTS
            for slot in own
        }
        self.settle_slots(slots)

    def settle_slots(self, slots: set[int]) -> None:
        """Fold the pending tokens of these state slots."""
        for row in self._by_row:
            slot = int(self._table.slots[row])
            if slot in slots:
                self.fold(row, slot)

    def _propose(self, own: _Row, pages: RowPages, carry: int, most: int | None) -> tuple[int, ...]:
        """Return what the drafter proposes behind the row's last token, which was drawn from `carry`: at most `most`.

        The drafter computes the tokens that will come up to the first one that it gets wrong. It leaves no KV and no
        state behind.
        """
        drafting = self._drafting
        count = 0 if drafting is None else drafting.num_draft_tokens
        count = count if most is None else min(count, most)
        if drafting is None or count == 0:
            return ()
        start, tokens = len(own.tokens) - 1, list(own.tokens)
        is_whole = self._draft_kv is None or self._draft_kv.is_whole(pages, tokens[:start])
        pages = self._with_spare(pages, start)
        saved = self._read_slot(pages.slot)
        self._fold(own, pages.slot)
        for index in range(count):
            carry = forward(self._layers, pages, start + index, tokens[-1])
            tokens.append(own.sampler.draw(carry, tokens, start + 1 + index))
            if not drafting.is_right(carry, is_whole=is_whole):
                tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
                tokens += [tokens[-1]] * (count - index - 1)
                break
        self._write_slot(pages.slot, saved)
        self._forget(pages, range(start, start + count))
        return tuple(tokens[start + 1 :])

    def _with_spare(self, pages: RowPages, num_tokens: int) -> RowPages:
        """Return `pages` with spare pages behind those of the first `num_tokens` tokens."""
        count = self._layout.pages_for(num_tokens)

        def spare(space: PageSpace) -> list[int]:
            return list(range(size := self._sizes.get(space, 0), size + self._num_spare))

        return RowPages(
            np.concatenate([pages.pages[:count], spare(PageSpace.TOKENS)]),
            np.concatenate([pages.window[:count], spare(PageSpace.WINDOW)]),
            pages.slot,
        )

    def _forget(self, pages: RowPages, positions: range) -> None:
        for position in positions:
            for layer in self._layers:
                layer.forget(pages, position)

    # ------------------------------------------------------------------ slots

    def _copy_slot(self, source: int, target: int) -> None:
        for pool in self._slot_pools():
            pool[target] = pool[source]

    def _read_slot(self, slot: int) -> list[U64]:
        return [pool[slot].copy() for pool in self._slot_pools()]

    def _write_slot(self, slot: int, saved: Sequence[U64]) -> None:
        for pool, own in zip(self._slot_pools(), saved, strict=True):
            pool[slot] = own

    def _slot_pools(self) -> list[U64]:
        return [pool for group, pool in self._all_pools() if group.space is PageSpace.SLOTS]

    def _stamp(self, row: BatchRow, own: _Row, slot: int) -> None:
        """Write the stamp of a row that computes known tokens."""
        if row.end <= own.num_known:
            self.put_stamp(slot, SlotStamp(own.stamp, row.end))

    def _row_pages(self, row: int) -> RowPages:
        table = self._table
        return RowPages(table.pages[row].copy(), table.window[row].copy(), int(table.slots[row]))


def _with_embeds(token_ids: Sequence[int], num_prompt: int, input_embeds: bytes) -> list[int]:
    """Return the tokens of a row; a hash of its input embedding stands for each prompt token that has one."""
    if not input_embeds:
        return list(token_ids)
    return [*(zlib.crc32(own.tobytes()) for own in unpack_embeds(input_embeds, num_prompt)), *token_ids[num_prompt:]]


def _hidden_of(wanted: HiddenParams | None, start: int, carries: Sequence[int]) -> HiddenStates | None:
    """Return the hidden states of the tokens with these numbers, from position `start` on: 24 bits of each number."""
    if wanted is None or wanted.start >= start + len(carries):
        return None
    first = max(start, wanted.start)
    rows = np.array([[carry & 0xFFFFFF] for carry in carries[first - start :]], dtype=np.float32)
    return HiddenStates.pack(first, len(rows), rows.sum(0, keepdims=True) if wanted.pooled else rows)


class _Step:
    """A launched step."""

    def __init__(self, executor: HashExecutor, plan: BatchPlan, tables: dict[int, RowPages]) -> None:
        self._executor, self._plan, self._tables = executor, plan, tables
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Compute the step once."""
        if self._result is None:
            self._result = self._executor.compute(self._plan, self._tables)
        return self._result
