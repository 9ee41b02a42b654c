"""The consistent_hashing policy: keeps a conversation on its worker, by rendezvous hashing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, least_loaded
from pdserve.router.request_fields import ConversationKey

CROWDED_FACTOR = 2.0
CROWDED_REQUESTS = 8
"""A worker with more requests than both this and `CROWDED_FACTOR` times the mean gets no more by opening alone."""


class ConsistentHashing(Policy):
    """Chooses the same candidate for every turn of a conversation; without a key, the least loaded.

    Rendezvous hashing (Thaler and Ravishankar 1998): a hash of conversation and worker ranks the workers, and the first
    available one is chosen. Removing a worker moves only its conversations, a new worker gets its share, and several
    routers agree without communication. A conversation named by its client stays regardless of load. A conversation
    identified by its opening leaves a crowded worker, because all prompts with one template share an opening.
    """

    uses_key = True
    uses_load = True

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the first worker in the conversation's ranking that is not crowded."""
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
    """Return a hash of worker and conversation, identical in every router. The separator NUL does not occur in URLs."""
    return hashlib.blake2b(candidate.url.encode() + b"\0" + key.value, digest_size=16).digest()
