"""The policy that sorts prompts by length, so that short ones do not wait behind long ones. For prefill."""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded

REMEMBERED = 2048
"""Lengths that boundaries are drawn from: the latest."""


def boundaries(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """`num_buckets` - 1 lengths that cut `lengths` into buckets of about the same total: equal work, not equal counts.

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
    """Each worker takes a range of prompt lengths, by its URL's place among the candidates.

    The ranges are redrawn every `bucket_adjust_interval_s` from the latest prompts. Where loads are imbalanced, or
    where nothing is known of lengths yet, the least loaded is taken.
    """

    uses_prompt = True
    uses_load = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._sample: list[int] = []
        self._cuts: dict[int, list[int]] = {}  # what `boundaries` says of the sample, by number of candidates
        self._next_adjustment: float | None = None

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """See the class."""
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
        """Remember its length."""
        if request.prompt is not None:
            self._lengths.append(len(request.prompt))

    def tick(self, now: float) -> None:
        """Redraw the ranges."""
        if self._next_adjustment is not None and now < self._next_adjustment:
            return
        self._next_adjustment = now + self._config.bucket_adjust_interval_s
        self._sample = list(self._lengths)
        self._cuts.clear()
