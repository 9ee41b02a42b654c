"""How many tokens of prompts a step takes, by who waits for it. Owned by `Generating`.

burst      from when nobody waits for a token: two steps' worth of prompts, before whom a stream may pause
  v        all taken, nothing to take, or a request came back that had streamed already
streams    a smaller budget beside them, until again nobody waits

Counted in tokens: how many of a burst's prompts are there for its first step is chance.
"""

from __future__ import annotations

from pdserve.scheduler.core import Limits

BURST_STEPS = 2
"""Budgets of a burst: those that come together rarely are all there when the first step is planned."""


class Burst:
    """Starts with a whole burst ahead."""

    def __init__(self, limits: Limits) -> None:
        self._whole, self._mixed = limits.step_tokens, limits.mixed_step_tokens
        self._left = 0
        self.refill()

    def refill(self) -> None:
        """Nobody waits for a token: a burst may begin."""
        self._left = BURST_STEPS * self._whole

    def end(self) -> None:
        """Somebody streams."""
        self._left = 0

    def take(self, num_tokens: int) -> None:
        """The next step has so many tokens of prompts."""
        self._left -= num_tokens

    @property
    def is_over(self) -> bool:
        """True when the next step is beside streams: the burst has less left than such a step may take."""
        return self._left < self._mixed

    @property
    def budget(self) -> int:
        """Tokens of prompts that the next step may take."""
        return self._mixed if self.is_over else min(self._whole, self._left)
