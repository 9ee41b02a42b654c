"""Which worker gets the next request: pure choices. Called by `workers.WorkerPool.pick`, for each role by itself."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence

from pdserve.router.config import PolicyName
from pdserve.router.conversation import ConversationKey

CROWDED_FACTOR = 2.0
CROWDED_REQUESTS = 8
"""A worker with more requests than both this and `CROWDED_FACTOR` times the mean takes no more by opening alone."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A worker that may be chosen: its URL, and the requests in flight there."""

    url: str
    load: int


Policy = Callable[[Sequence[Candidate], ConversationKey | None, random.Random], int]
"""(candidates, the request's conversation, random source) -> index of the chosen one; never called with none."""


def choose_random(candidates: Sequence[Candidate], key: ConversationKey | None, rng: random.Random) -> int:
    """Any candidate, each as likely."""
    return rng.randrange(len(candidates))


def choose_least_loaded(candidates: Sequence[Candidate], key: ConversationKey | None, rng: random.Random) -> int:
    """The candidate with the fewest requests in flight; ties are broken at random, so that routers do not herd."""
    least = min(candidate.load for candidate in candidates)
    return rng.choice([index for index, candidate in enumerate(candidates) if candidate.load == least])


def choose_by_conversation(candidates: Sequence[Candidate], key: ConversationKey | None, rng: random.Random) -> int:
    """The same candidate for every turn of a conversation, as long as it is among them; the least loaded without a key.

    Rendezvous hashing (Thaler and Ravishankar 1998): each conversation ranks all workers by a hash of both and takes
    the first that is there. A worker that goes moves its own conversations only, one that comes takes its share, and
    several routers agree without a word. A conversation that its client named stays whatever the load; one that is
    known by its opening only moves on from a crowded worker, since all that begin with one template look the same.
    """
    if key is None:
        return choose_least_loaded(candidates, key, rng)
    ranked = sorted(range(len(candidates)), key=lambda index: _weight(key, candidates[index]), reverse=True)
    if key.named:
        return ranked[0]
    mean = sum(candidate.load for candidate in candidates) / len(candidates)
    limit = max(CROWDED_REQUESTS, CROWDED_FACTOR * mean)
    return next(index for index in ranked if candidates[index].load <= limit)


def _weight(key: ConversationKey, candidate: Candidate) -> bytes:
    """As good as random, and the same in every router; URLs hold no NUL, so that pairs do not run together."""
    return hashlib.blake2b(candidate.url.encode() + b"\0" + key.value, digest_size=16).digest()


POLICIES: dict[PolicyName, Policy] = {
    "random": choose_random,
    "least_loaded": choose_least_loaded,
    "consistent_hashing": choose_by_conversation,
}
