"""An executor that computes nothing and says how long it would have taken.

For capacity planning, and for measuring what schedulers themselves cost.

Time is a `ManualClock`, which `resolve` moves to the end of the step. Steps queue up like on a device: one that is
launched while another is under way begins when that one ends, so what overlap hides is hidden here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.base.clock import ManualClock
from pdserve.executor.interface import BatchPlan, BatchRow, HostPages, SampledToken, StepHandle, StepResult
from pdserve.memory.layout import KVLayout
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams

FIRST_TOKEN = 1000
"""Tokens below are never sampled, so that one of them can be the end of sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a step, as a sum. The defaults are round numbers in the range of an 8B model on one H100.

    step_s: of every step, such as reading the weights.
    prefill_token_s: of every token of a row with more than one.
    decode_row_s: of every row with one token.
    kv_token_s: of every token of KV that a row's attention reads.
    copy_byte_s: of every byte between pool and host memory.
    """

    step_s: float = 6e-3
    prefill_token_s: float = 40e-6
    decode_row_s: float = 10e-6
    kv_token_s: float = 40e-9
    copy_byte_s: float = 1 / 25e9

    def row_s(self, row: BatchRow) -> float:
        """What `row` adds to its step."""
        num_tokens = row.end - row.start
        own = self.decode_row_s if num_tokens == 1 else self.prefill_token_s * num_tokens
        return own + self.kv_token_s * row.end

    def plan_s(self, plan: BatchPlan) -> float:
        """Seconds of the whole step."""
        return self.step_s + sum(map(self.row_s, plan.rows))


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    """Implements `HostPages`: nothing but a size."""

    num_bytes: int
    num_pages: int


class CostModelExecutor:
    """Implements `Executor`. Its pool is real memory, so that transports may copy it, but nothing is written there.

    Tokens depend on row and position only; `vocab_size` must be above `FIRST_TOKEN`. `busy_s` is the time that the
    device has worked so far, in seconds of `clock`.
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
            np.zeros(num_pages * group.page_bytes, dtype=np.uint8) for group in layout.groups
        ]
        self._rows: set[int] = set()
        self._free_at = clock.now()
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
    ) -> None:
        """See `Executor`."""
        assert row not in self._rows, f"row {row} is open"
        self._rows.add(row)

    def close_row(self, row: int) -> None:
        """See `Executor`."""
        self._rows.remove(row)

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """See `Executor`. The step begins when the device is free; marks are all open once it has been resolved."""
        ends_at = self._work(self._costs.plan_s(plan))
        step = _Step(self._clock, ends_at, plan, self._num_tokens)
        return StepHandle(plan, step if layer_marks else None, step.result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`. Moves the clock to the end of the step, if that is not past."""
        return handle.finish()

    def offload(self, pages: Sequence[int]) -> HostPages:
        """See `Executor`."""
        saved = _Saved(len(pages) * self._layout.token_bytes * self._layout.page_tokens, len(pages))
        self._copy(saved.num_bytes)
        return saved

    def restore(self, saved: HostPages, pages: Sequence[int]) -> None:
        """See `Executor`."""
        assert isinstance(saved, _Saved) and saved.num_pages == len(pages), (saved, len(pages))
        self._copy(saved.num_bytes)

    def zero(self, pages: Sequence[int]) -> None:
        """See `Executor`. There are no bytes, and a probe's few cost nothing that the model counts."""

    def _work(self, seconds: float) -> float:
        """Occupy the device behind what it does already; when it will be free."""
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        self.busy_s += seconds
        return self._free_at

    def _copy(self, num_bytes: int) -> None:
        """Nothing is under way, so the caller waits for it."""
        _wait_until(self._clock, self._work(self._costs.copy_byte_s * num_bytes))


class _Step:
    """A launched step. Implements `LayerEvents`."""

    def __init__(self, clock: ManualClock, ends_at: float, plan: BatchPlan, num_tokens: int) -> None:
        self._clock, self._ends_at, self._plan, self._num_tokens = clock, ends_at, plan, num_tokens

    def result(self) -> StepResult:
        """Wait, in the clock's time, and make up tokens."""
        _wait_until(self._clock, self._ends_at)
        return StepResult(self._plan.step, tuple(map(self._token, self._plan.rows)))

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerEvents`; never waits, since nothing else could run meanwhile."""
        return self._clock.now() >= self._ends_at

    def _token(self, row: BatchRow) -> SampledToken | None:
        if not row.sample:
            return None
        return SampledToken(FIRST_TOKEN + (row.row * 7919 + row.end * 104_729) % self._num_tokens)


def _wait_until(clock: ManualClock, at: float) -> None:
    clock.advance(max(0.0, at - clock.now()))
