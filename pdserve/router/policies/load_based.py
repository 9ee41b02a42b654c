"""Policies that look at no request: random, round_robin, power_of_two, least_loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, least_loaded


class RandomChoice(Policy):
    """Any candidate, each as likely."""

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """A random index."""
        return rng.randrange(len(candidates))


class RoundRobin(Policy):
    """Whoever was chosen longest ago, so that turns stay fair while workers come and go."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """The first of those whose turn is longest ago; newcomers have had none."""
        return min(range(len(candidates)), key=lambda index: self._turns.get(candidates[index].url, 0))

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:
        """It goes to the end of the row."""
        self._turn += 1
        self._turns[url] = self._turn

    def forget(self, url: str) -> None:
        """Should it come again, it is a newcomer."""
        self._turns.pop(url, None)


class PowerOfTwo(Policy):
    """The less loaded of two at random: nearly as even as the least loaded, and no herd follows an old report."""

    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """One of two different candidates; the only one where there is one."""
        if len(candidates) == 1:
            return 0
        first, second = rng.sample(range(len(candidates)), 2)
        return first if candidates[first].load <= candidates[second].load else second


class LeastLoaded(Policy):
    """The candidate with the least to do."""

    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Ties are broken at random."""
        return least_loaded(candidates, rng)
