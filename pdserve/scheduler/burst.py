"""How many tokens of prompts a step takes, by who streams. Owned by `Generating`.

burst      from when nobody waits for a second or later token: two full steps' worth, whoever has a first one meanwhile
  v        less left than a step beside streams takes, a step without prompts, or a request came back that had streamed
streams    a smaller budget beside them, until again nobody waits for such a token

Counted in tokens: how many of a burst's prompts are there for its first step is chance.
"""

from __future__ import annotations

from pdserve.scheduler.core import SchedulerContext

BURST_STEPS = 2
"""Full steps of a burst: those that come together rarely are all there when the first is planned."""


class PrefillBudget:
    """Starts with a whole burst ahead."""

    def __init__(self, core: SchedulerContext) -> None:
        self._core = core
        self._left = 0
        self.refill()

    def refill(self) -> None:
        """Nobody streams: a burst may begin."""
        self._left = BURST_STEPS * self._core.limits.step_tokens

    def end(self) -> None:
        """Somebody does, whom no prompt of a burst may hold up."""
        self._left = 0

    def take(self, num_tokens: int) -> None:
        """The next step has so many tokens of prompts; who ends before they are computed gives none back."""
        self._left -= num_tokens

    @property
    def is_over(self) -> bool:
        """True when the next step is beside streams: the burst has less left than such a step may take."""
        return self._left < self._core.limits.mixed_step_tokens

    @property
    def budget(self) -> int:
        """Tokens of prompts that the next step may take."""
        limits = self._core.limits
        return limits.mixed_step_tokens if self.is_over else min(limits.step_tokens, self._left)
