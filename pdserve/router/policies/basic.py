"""The interface of a routing policy, and the policies without a prefix tree.

    choose(candidates, request, rng) -> index      pure: the same state and arguments give the same choice
    chosen(url, request, now)                      the request was sent to this worker
    forget(url)                                    the worker was removed
    tick(now)                                      called periodically by `app`

    random, round_robin, power_of_two, least_loaded      do not use the request
    consistent_hashing      keeps a conversation on its worker, by rendezvous hashing
    bucket      for prefill: by prompt length, so that short prompts do not wait for long ones

Event loop only. Called by `admission` and `app`.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import hashlib
import random
from collections import deque
from collections.abc import Sequence

from pdserve.observe.kv_keys import PromptKeys
from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.routing_keys import ConversationKey


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A worker that can be chosen. `load` is in requests, see `Worker.load`."""

    url: str
    load: float


@dataclasses.dataclass(frozen=True)
class RoutedRequest:
    """Properties of a request that policies use; None if the request has none, or no policy uses the property.

    `prompt` is text, or token ids as characters; see `routing_keys.prompt_of`. `tokens`: see `proxy.prompt_tokens`.
    """

    key: ConversationKey | None = None
    prompt: str | None = None
    tokens: PromptKeys | None = None


class Policy(abc.ABC):
    """The policy of one role. Candidates are a non-empty subset of the role's workers.

    By default only `choose` must be implemented: the notifications do nothing here.
    """

    uses_key = False
    uses_prompt = False
    uses_load = False
    uses_tokens = False

    @abc.abstractmethod
    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Return the index of the candidate that gets the request."""

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:  # noqa: B027
        """A request was sent to the worker."""

    def forget(self, url: str) -> None:  # noqa: B027
        """The worker was removed."""

    def tick(self, now: float) -> None:  # noqa: B027
        """Called periodically; `now` in seconds."""


def least_loaded(candidates: Sequence[Candidate], rng: random.Random) -> int:
    """Return the index with the least load; random among ties, so that several routers do not choose the same one."""
    least = min(candidate.load for candidate in candidates)
    return rng.choice([index for index, candidate in enumerate(candidates) if candidate.load == least])


def is_imbalanced(candidates: Sequence[Candidate], abs_threshold: float, rel_threshold: float) -> bool:
    """Whether the largest load exceeds the smallest by both thresholds, so that policies choose by load alone.

    SGLang's rule: by more than `abs_threshold` requests, and by more than the factor `rel_threshold`.
    """
    loads = [candidate.load for candidate in candidates]
    most, least = max(loads), min(loads)
    return most - least > abs_threshold and most > least * rel_threshold


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


CROWDED_FACTOR = 2.0
CROWDED_REQUESTS = 8
"""A worker is crowded when it has more requests than this, and more than `CROWDED_FACTOR` times the mean."""


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


REMEMBERED = 2048
"""Number of latest prompt lengths from which boundaries are computed."""


def boundaries(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """Return `num_buckets` - 1 lengths that split `lengths` into buckets of about equal total, not of equal count.

    A length belongs to the first bucket whose boundary is not below it.
    """
    ordered = sorted(lengths)
    total, passed = sum(ordered), 0
    cuts: list[int] = []
    for length in ordered:
        passed += length
        while len(cuts) < num_buckets - 1 and passed * num_buckets >= total * (len(cuts) + 1):
            cuts.append(length)
    return cuts + [ordered[-1] if ordered else 0] * (num_buckets - 1 - len(cuts))


class Bucket(Policy):
    """Each worker gets a range of prompt lengths, by the rank of its URL among the candidates.

    The ranges are recomputed every `bucket_adjust_interval_s` from the latest prompts. If loads are imbalanced, or no
    lengths are known yet, the least loaded worker is chosen.
    """

    uses_prompt = True
    uses_load = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._sample: list[int] = []
        self._cuts: dict[int, list[int]] = {}  # `boundaries` of the sample, by number of candidates
        self._next_adjustment: float | None = None

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Choose by prompt length, see the class."""
        config = self._config
        imbalanced = is_imbalanced(candidates, config.balance_abs_threshold, config.balance_rel_threshold)
        if request.prompt is None or not self._sample or imbalanced:
            return least_loaded(candidates, rng)
        ranked = sorted(range(len(candidates)), key=lambda index: candidates[index].url)
        if len(ranked) not in self._cuts:
            self._cuts[len(ranked)] = boundaries(self._sample, len(ranked))
        cuts = self._cuts[len(ranked)]
        return ranked[bisect.bisect_left(cuts, len(request.prompt))]

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:
        """Record the prompt's length in characters, or in tokens plus one for a prompt of token ids."""
        if request.prompt is not None:
            self._lengths.append(len(request.prompt))

    def tick(self, now: float) -> None:
        """Recompute the ranges, at most every `bucket_adjust_interval_s`."""
        if self._next_adjustment is not None and now < self._next_adjustment:
            return
        self._next_adjustment = now + self._config.bucket_adjust_interval_s
        self._sample = list(self._lengths)
        self._cuts.clear()
