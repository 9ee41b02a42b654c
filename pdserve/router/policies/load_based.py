"""Policies that do not use the request: random, round_robin, power_of_two, least_loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, least_loaded


class RandomChoice(Policy):
    """Chooses uniformly at random."""

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return a random index."""
        return rng.randrange(len(candidates))


class RoundRobin(Policy):
    """Chooses the least recently chosen worker, which stays fair while workers are added and removed."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the least recently chosen candidate; new workers come first."""
        return min(range(len(candidates)), key=lambda index: self._turns.get(candidates[index].url, 0))

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:
        """Record the worker as most recently chosen."""
        self._turn += 1
        self._turns[url] = self._turn

    def forget(self, url: str) -> None:
        """Drop the worker's turn; if it is added again, it counts as new."""
        self._turns.pop(url, None)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random candidates.

    The balance is nearly that of least_loaded, and an outdated load report does not attract all requests.
    """

    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the less loaded of two different random candidates, or the only candidate."""
        if len(candidates) == 1:
            return 0
        first, second = rng.sample(range(len(candidates)), 2)
        return first if candidates[first].load <= candidates[second].load else second


class LeastLoaded(Policy):
    """Chooses the candidate with the least load."""

    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the index with the least load; random among ties."""
        return least_loaded(candidates, rng)
