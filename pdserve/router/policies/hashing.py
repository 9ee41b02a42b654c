"""The policy that keeps a conversation on its worker, by rendezvous hashing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, least_loaded
from pdserve.router.request_fields import ConversationKey

CROWDED_FACTOR = 2.0
CROWDED_REQUESTS = 8
"""A worker with more requests than both this and `CROWDED_FACTOR` times the mean takes no more by opening alone."""


class ConsistentHashing(Policy):
    """The same candidate for every turn of a conversation, as long as it is among them; the least loaded without a key.

    Rendezvous hashing (Thaler and Ravishankar 1998): each conversation ranks all workers by a hash of both and takes
    the first that is there. A worker that goes moves its own conversations only, one that comes takes its share, and
    several routers agree without a word. A conversation that its client named stays whatever the load; one that is
    known by its opening only moves on from a crowded worker, since all that begin with one template look the same.
    """

    uses_key = True
    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """The first in the conversation's ranking that is not too crowded for it."""
        key = request.key
        if key is None:
            return least_loaded(candidates, rng)
        ranked = sorted(range(len(candidates)), key=lambda index: _weight(key, candidates[index]), reverse=True)
        if key.named:
            return ranked[0]
        mean = sum(candidate.load for candidate in candidates) / len(candidates)
        limit = max(CROWDED_REQUESTS, CROWDED_FACTOR * mean)
        return next(index for index in ranked if candidates[index].load <= limit)


def _weight(key: ConversationKey, candidate: Candidate) -> bytes:
    """As good as random, and the same in every router; URLs hold no NUL, so that pairs do not run together."""
    return hashlib.blake2b(candidate.url.encode() + b"\0" + key.value, digest_size=16).digest()
