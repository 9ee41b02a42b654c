"""The interface between scheduler and device: plans and results are values.

The executor owns tokens on the device: `open_row` writes a request's known tokens into row `row`, and each step appends
its sampled tokens. So a plan names only rows and ranges. The page table maps rows to pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pdserve.memory.layer_events import LayerEvents
from pdserve.memory.layout import KVLayout
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams


class BatchRow(msgspec.Struct, frozen=True, gc=False):
    """Compute positions `[start, end)` of the request in page-table row `row`; with `sample`, sample the token at
    `end`.

    With `state_from` the row's state slot gets the state in that slot before the row is computed; with `state_to` that
    slot gets the row's state afterwards. -1: neither.

    With `drafts`, the tokens at `[start + 1, end)` are drafts: a guess of what is sampled there. The row samples the
    tokens at all positions of `[start + 1, end]`. Only rows beyond their prompt have drafts.

    Every step makes thousands of these: a frozen dataclass would take ten times as long.
    """

    rid: str
    row: int
    start: int
    end: int
    sample: bool
    state_from: int = -1
    state_to: int = -1
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that this row adds to the batch."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: rows of any lengths, which the executor flattens into one batch without padding.

    `num_proposals`: most drafts that the executor's drafter proposes for the next step of each row that samples, see
    `StepResult.drafts`. 0: none, and the drafter does no work for them. None: as many as it is configured for.
    """

    step: int
    rows: tuple[BatchRow, ...]
    num_proposals: int | None = None


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token, with natural-log probabilities where the row requested them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    picked: tuple[float, ...] = ()
    """Log probabilities of the `token_ids` that the row requested."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """One entry per row of the plan: the sampled token, or None where the row did not sample.

    `more`: by index of a row with drafts, the tokens sampled behind the first one. A draft is accepted while it equals
    the token sampled at its position; a row with A accepted drafts has A such tokens. KV behind them is undefined.
    `drafts`: by row index, what the executor's drafter proposes for the row's next step.
    `prompts`: by row index, the requested log probabilities of the prompt tokens that follow this step's tokens.
    `hidden`: by row index, the requested hidden states of this step's tokens.
    """

    step: int
    tokens: tuple[SampledToken | None, ...]
    prompts: Mapping[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    failed: tuple[int, ...] = ()
    """Rows of the plan whose grammar cannot be followed any more; their tokens are undefined."""
    more: Mapping[int, tuple[SampledToken, ...]] = dataclasses.field(default_factory=dict)
    drafts: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    hidden: Mapping[int, HiddenStates] = dataclasses.field(default_factory=dict)

    def sampled(self, index: int) -> tuple[SampledToken, ...]:
        """Return all tokens that row `index` of the plan has sampled, in order."""
        first = self.tokens[index]
        return () if first is None else (first, *self.more.get(index, ()))


@dataclasses.dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step, to be passed to `Executor.resolve` once.

    `layer_events` is None where `launch` made none. `finish` waits for the step; only the executor calls it.
    """

    plan: BatchPlan
    layer_events: LayerEvents | None
    finish: Callable[[], StepResult]


class HostPages(Protocol):
    """KV pages that `Executor.offload` has copied to host memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        ...

    def export(self) -> list[bytes] | None:
        """Return the bytes of each layout group, page after page; None: other ranks have a part of them."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ImportedPages:
    """Implements `HostPages` with bytes that `HostPages.export` of another server has returned.

    `data`: whole pages of each layout group. Only an executor of a single rank restores them.
    """

    data: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """See `HostPages.num_bytes`."""
        return sum(map(len, self.data))

    def export(self) -> list[bytes]:
        """See `HostPages.export`."""
        return list(self.data)


class CopyHandle(Protocol):
    """Copies between pages of the pool and slots of the host tier that run beside steps."""

    @property
    def is_done(self) -> bool:
        """True once all bytes are in place, on all ranks. Raises what made the copy fail."""
        ...

    def on_end(self, then: Callable[[], None]) -> None:
        """Call `then` once, on any thread, when this rank's copies have ended or failed; at once if they have."""
        ...


class Executor(Protocol):
    """Runs plans. Called by the scheduler thread only.

    Steps run in the order of their launch. A launched step reads page table, sampling metadata and row tokens as they
    are at the launch. It writes KV and tokens until it is resolved: its pages and rows must not be reused before.
    `offload`, `restore`, `copy_now` and `seal` are called while no step is unresolved.
    """

    @property
    def layout(self) -> KVLayout:
        """Geometry of the KV pool."""
        ...

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """`(address, bytes)` of the KV pool of each layout group, for registration with a transport."""
        ...

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
        """Open `row` for a request; `token_ids` are its prompt and the output tokens known so far.

        `draft_hidden`: what `draft_hidden` of a server with an equal drafter returned for these tokens; empty: nothing.
        `hidden`: hidden states that its steps return; None: none. Such a row has no drafts.
        `input_embeds`: see `GenerateRequest`; such a row has no drafts either.

        The matcher state of its grammar follows from these and later sampled tokens. With a seed, the token at position
        p depends on (seed, p) and its logits only, so decode continues the sampling of prefill.
        """
        ...

    def draft_hidden(self, row: int) -> bytes:
        """Return the hidden state that the drafter keeps for the next step of `row`, in the model's number format.

        Call it before `close_row`, when all steps of the row are resolved. Empty where no model with hidden states
        drafts, or none is kept.
        """
        ...

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """Begin to compute the plan: writes KV pages, samples, and appends sampled tokens to their rows.

        The next plan may use these tokens before `resolve`. With `layer_events` the handle has them.
        """
        ...

    def resolve(self, handle: StepHandle) -> StepResult:
        """Wait for the oldest unresolved step and return its result."""
        ...

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """Copy the KV of `pages`, a list for each layout group, to host memory."""
        ...

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """Copy saved KV into as many `pages` of each group; the host copy may then be dropped."""
        ...

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """Begin to copy pages of the pool into slots of the host tier, beside steps.

        All steps that write the pages are resolved. Until the handle is done, no step writes them, and the slots are
        neither read nor used for other copies. Copies run in the order of their start.
        """
        ...

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """Begin to copy slots of the host tier into pages of the pool, beside steps.

        Until the handle is done, no step reads or writes the pages, and the slots are not overwritten. Steps that are
        launched afterwards read what was copied.
        """
        ...

    def poll_copies(self) -> None:
        """Take the ends of copies on all ranks; called once a turn, before handles are asked."""
        ...

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """Copy pages of the pool into slots of the host tier, or back, on all ranks. No step is unresolved.

        `to_host`: into slots, with the pending tokens of state slots folded first.
        """
        ...

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """Set the KV of `pages`, a list for each group, to zero, before later steps read it.

        No launched step may use them.
        """
        ...

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """Return whether all layers' stamps in state slot `slot`, where a transfer has landed, are `stamp`.

        True also where rank 0 has no layer with a state. All ranks copy from the same lists of slots, so rank 0 answers
        for all.
        """
        ...

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """Complete state slot `slot` of a row that is sent to a peer: fold its pending tokens, and write `stamp`.

        No step may be unresolved. Only models with STATE groups have slots.
        """
        ...

    def close_row(self, row: int) -> None:
        """Close `row`, whose request has left."""
        ...


def run(executor: Executor, plan: BatchPlan) -> StepResult:
    """Launch one plan and wait for its result."""
    return executor.resolve(executor.launch(plan))
