"""A routing policy that fills one worker before it uses the next, so that idle workers can be stopped.

docs/tutorials/new-router-policy.md explains it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies import Candidate, Policy, RoutedRequest

FULL_AT = 8.0
"""Requests at a worker from which on it counts as full."""


class PackingPolicy(Policy):
    """Chooses the most loaded worker that is not full; if all are full, the least loaded one."""

    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the index of the chosen candidate; equal ones are taken in the order of their URLs."""
        places = range(len(candidates))
        open_places = [place for place in places if candidates[place].load < FULL_AT]
        if not open_places:
            return min(places, key=lambda place: (candidates[place].load, candidates[place].url))
        return min(open_places, key=lambda place: (-candidates[place].load, candidates[place].url))


def make_policy(config: PolicyConfig) -> Policy:
    """Return a new policy for the workers of one role; the router calls it once for each."""
    return PackingPolicy()
