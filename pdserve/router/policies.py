"""Which worker gets the next request: pure choices over loads. Called by `workers.WorkerPool.pick`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pdserve.router.config import PolicyName

Policy = Callable[[Sequence[int], random.Random], int]
"""(requests in flight at each candidate, random source) -> index of the chosen one; never called with none."""


def choose_random(loads: Sequence[int], rng: random.Random) -> int:
    """Any candidate, each as likely."""
    return rng.randrange(len(loads))


def choose_least_loaded(loads: Sequence[int], rng: random.Random) -> int:
    """The candidate with the fewest requests in flight; ties are broken at random, so that routers do not herd."""
    least = min(loads)
    return rng.choice([index for index, load in enumerate(loads) if load == least])


POLICIES: dict[PolicyName, Policy] = {"random": choose_random, "least_loaded": choose_least_loaded}
