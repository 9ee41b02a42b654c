"""The bucket policy, for prefill: chooses workers by prompt length, so that short prompts do not wait for long ones."""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded

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
