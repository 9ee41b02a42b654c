"""The parts of a step: how many prompt tokens it may take, and how a planned step is computed in turn.

`BatchPlanner` owns one object of each class.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from pdserve.executor.interface import BatchRow
from pdserve.scheduler.context import SchedulerContext

StepKind = Literal["extend", "decode", "mixed"]
"""Prompt chunks, decode rows, or both; the names are SGLang's."""

FULL_BUDGET_STEPS = 2
"""Full steps before the mixed budget applies: the requests of one burst seldom all arrive before its first step."""


class PrefillBudget:
    """Prompt tokens that the next step may take.

    The prefill budget is `FULL_BUDGET_STEPS` full steps until a running request waits for its second or a later token.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._left = 0
        self.refill()

    def refill(self) -> None:
        """Restore the full budget: no running request waits for a token after its first."""
        self._left = FULL_BUDGET_STEPS * self._context.limits.step_tokens

    def end(self) -> None:
        """Drop the rest of the full budget: a running request waits for its next token."""
        self._left = 0

    def take(self, num_tokens: int) -> None:
        """Charge the prompt tokens of the next step. A request that ends before they are computed returns none."""
        self._left -= num_tokens

    @property
    def is_over(self) -> bool:
        """True when the next step has the mixed budget: less than `mixed_step_tokens` of the full budget is left."""
        return self._left < self._context.limits.mixed_step_tokens

    @property
    def budget(self) -> int:
        """Prompt tokens that the next step may take."""
        limits = self._context.limits
        return limits.mixed_step_tokens if self.is_over else min(limits.step_tokens, self._left)


TIMES_BESIDE_STREAMS = 2
"""Factor on the size of a part in a step with decode rows."""


class BatchSplitter:
    """Splits a planned step into parts of limited size. It is falsy when it has no rows."""

    def __init__(self, saturation_tokens: int | None) -> None:
        """`saturation_tokens`: see `StepLimits.saturation_tokens`.

        A part has at least half of that many tokens, which is nearly as efficient.
        """
        self._saturation_tokens = saturation_tokens
        self._most: float = math.inf
        self._prompts: deque[BatchRow] = deque()
        self._decode: list[BatchRow] = []
        self.kind: StepKind = "extend"
        """What the rows of the part that was taken last compute."""

    def __bool__(self) -> bool:
        return bool(self._prompts or self._decode)

    def put(self, decode: list[BatchRow], prompts: list[BatchRow], *, beside_streams: bool = False) -> None:
        """Set the rows of the next step; all rows of the last step must be taken."""
        assert not self
        self._decode, self._prompts = decode, deque(prompts)
        if self._saturation_tokens is not None:
            self._most = self._saturation_tokens * (TIMES_BESIDE_STREAMS if beside_streams else 1)

    def take(self) -> list[BatchRow]:
        """Return the next part: prompt chunks in order. The last part also has the decode rows, which come first."""
        part: list[BatchRow] = []
        taken, left = 0, sum(row.num_tokens for row in self._prompts)
        while self._prompts and not self._is_full(taken, left):
            row = self._prompts.popleft()
            part.append(row)
            taken, left = taken + row.num_tokens, left - row.num_tokens
        self.kind = "extend"
        if self._prompts:
            return part
        decode, self._decode = self._decode, []
        if decode:
            self.kind = "mixed" if part else "decode"
        return decode + part

    def drop(self, rid: str) -> None:
        """Remove the rows of a request that has ended or was retracted."""
        self._decode = [row for row in self._decode if row.rid != rid]
        self._prompts = deque(row for row in self._prompts if row.rid != rid)

    def clear(self) -> None:
        """Remove all rows."""
        self._decode, self._prompts = [], deque()

    def _is_full(self, taken: int, left: int) -> bool:
        """True when the next chunk belongs to the next part, because it would exceed the size of this part.

        Both this part, with `taken` prompt tokens, and the rest, with `left`, keep at least half of that size.
        """
        return min(taken, left) >= self._most / 2 and taken + self._prompts[0].num_tokens > self._most
