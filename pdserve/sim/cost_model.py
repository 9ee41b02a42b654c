"""An executor that computes nothing and models step durations.

Used for capacity planning, and to measure the cost of schedulers themselves.

Time is a `ManualClock`, which `resolve` advances to the end of the step. Steps queue as on a device: a step launched
during another begins when the other ends. Overlap therefore hides the same host time as on a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.clock import ManualClock
from pdserve.executor.interface import (
    BatchPlan,
    BatchRow,
    CopyHandle,
    HostPages,
    SampledToken,
    StepHandle,
    StepResult,
)
from pdserve.memory.layer_events import CountedLayerEvents
from pdserve.memory.layout import KVLayout
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams

FIRST_TOKEN = 1000
"""Lower token ids are never sampled, so that one of them can be the end-of-sequence token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Duration of a step in seconds, as a sum. The defaults are round numbers in the range of an 8B model on one H100.

    step_s: per step, such as reading the weights.
    prefill_token_s: per token of a row with more than one token.
    decode_row_s: per row with one token, and per draft.
    kv_token_s: per token of KV that a row's attention reads.
    copy_byte_s: per byte copied between pool and host memory.
    """

    step_s: float = 6e-3
    prefill_token_s: float = 40e-6
    decode_row_s: float = 10e-6
    kv_token_s: float = 40e-9
    copy_byte_s: float = 1 / 25e9

    def row_s(self, row: BatchRow) -> float:
        """Return the seconds that `row` adds to its step."""
        num_tokens = row.end - row.start
        decodes = num_tokens == 1 or row.drafts
        own = (self.decode_row_s if decodes else self.prefill_token_s) * num_tokens
        return own + self.kv_token_s * row.end

    def plan_s(self, plan: BatchPlan) -> float:
        """Return the seconds of the whole step."""
        return self.step_s + sum(map(self.row_s, plan.rows))


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    """Implements `HostPages` with a size only."""

    num_bytes: int
    num_pages: int

    def export(self) -> None:
        """See `HostPages`: there are no bytes."""
        return


class CostModelExecutor:
    """Implements `Executor`. The pool is real memory, so that transports may copy it, but steps write nothing there.

    Tokens depend on row and position only. `vocab_size` must be above `FIRST_TOKEN`. `busy_s` is the device's busy time
    so far, in seconds of `clock`.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, costs: CostModel, clock: ManualClock, *, vocab_size: int = 50_000
    ) -> None:
        assert vocab_size > FIRST_TOKEN, vocab_size
        self._layout = layout
        self._costs = costs
        self._clock = clock
        self._num_tokens = vocab_size - FIRST_TOKEN
        self._pools: list[npt.NDArray[np.uint8]] = [
            np.zeros(group.bytes_of(num_pages), dtype=np.uint8) for group in layout.groups
        ]
        self._rows: set[int] = set()
        self._free_at = self._copied_at = clock.now()
        self.busy_s = 0.0

    @property
    def layout(self) -> KVLayout:
        """See `Executor`."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor`."""
        return tuple((int(pool.ctypes.data), pool.nbytes) for pool in self._pools)

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
        """See `Executor`."""
        assert row not in self._rows, f"row {row} is open"
        self._rows.add(row)

    def draft_hidden(self, row: int) -> bytes:
        """See `Executor`. No model drafts."""
        return b""

    def close_row(self, row: int) -> None:
        """See `Executor`."""
        self._rows.remove(row)

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`. The step begins when the device is free. Layers are written when the step is resolved."""
        ends_at = self._work(self._costs.plan_s(plan))
        step = _Step(self._clock, ends_at, plan, self._num_tokens)
        return StepHandle(plan, step.layer_events if layer_events else None, step.result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`. Advances the clock to the end of the step, unless that is past."""
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor`."""
        saved = _Saved(self._layout.bytes_by_group(pages), sum(map(len, pages)))
        self._copy(saved.num_bytes)
        return saved

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""
        assert isinstance(saved, _Saved) and saved.num_pages == sum(map(len, pages)), saved
        self._copy(saved.num_bytes)

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor`. A copy takes its time beside the steps, and copies wait for each other."""
        return self._start_copy(copies)

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor`; as `start_save`."""
        return self._start_copy(copies)

    def poll_copies(self) -> None:
        """See `Executor`."""

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor`."""
        self._copy(sum(len(one.pages) * self._layout.space_bytes(one.space) for one in copies))

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`. Does nothing: no KV is stored, and the cost of the few pages is not modelled."""

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor`. No state is stored, so none is wrong."""
        return True

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """See `Executor`. No state is stored."""

    def _start_copy(self, copies: Sequence[PageCopies]) -> CopyHandle:
        num_bytes = sum(len(one.pages) * self._layout.space_bytes(one.space) for one in copies)
        self._copied_at = max(self._copied_at, self._clock.now()) + self._costs.copy_byte_s * num_bytes
        return _TimedCopy(self._clock, self._copied_at)

    def _work(self, seconds: float) -> float:
        """Queue `seconds` of device work and return the time at which the device will be free."""
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        self.busy_s += seconds
        return self._free_at

    def _copy(self, num_bytes: int) -> None:
        """Queue a copy and wait for it; no step is in flight."""
        _wait_until(self._clock, self._work(self._costs.copy_byte_s * num_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class _TimedCopy:
    """Implements `CopyHandle`: the copies end at `ends_at`."""

    clock: ManualClock
    ends_at: float

    @property
    def is_done(self) -> bool:
        """See `CopyHandle`."""
        return self.clock.now() >= self.ends_at

    def on_end(self, then: Callable[[], None]) -> None:
        """See `CopyHandle`. Not called: only a loop that polls reads this clock."""


class _Step:
    """A launched step; `layer_events` report all layers at once."""

    def __init__(self, clock: ManualClock, ends_at: float, plan: BatchPlan, num_tokens: int) -> None:
        self._clock, self._ends_at, self._plan, self._num_tokens = clock, ends_at, plan, num_tokens
        self.layer_events = CountedLayerEvents(range(1))

    def result(self) -> StepResult:
        """Advance the clock to the step's end, and make up tokens."""
        _wait_until(self._clock, self._ends_at)
        self.layer_events.on_layer(0)
        rows = self._plan.rows
        found = [self._sampled(row) for row in rows]
        more = {index: found[index][1:] for index, row in enumerate(rows) if row.drafts}
        return StepResult(self._plan.step, tuple(each[0] if each else None for each in found), more=more)

    def _sampled(self, row: BatchRow) -> tuple[SampledToken, ...]:
        """Return the tokens that `row` samples: with drafts, up to the first one that differs from its draft."""
        found: list[SampledToken] = []
        for position in range(row.end - len(row.drafts), row.end + 1) if row.sample else ():
            token_id = FIRST_TOKEN + (row.row * 7919 + position * 104_729) % self._num_tokens
            found.append(SampledToken(token_id))
            if position < row.end and row.drafts[len(found) - 1] != token_id:
                break
        return tuple(found)


def _wait_until(clock: ManualClock, at: float) -> None:
    clock.advance(max(0.0, at - clock.now()))
