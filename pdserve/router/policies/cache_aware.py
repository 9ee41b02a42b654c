"""The policy that sends a prompt where most of it was sent before, unless that worker has too much to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.config import PolicyConfig
from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded
from pdserve.router.policies.tree import PrefixTree

SLACK = 8
"""Between two evictions a worker's texts may outgrow their limit by one part in so many: a cut walks the whole tree."""


class CacheAware(Policy):
    """SGLang's rule, with its parameters.

    The least loaded where loads are imbalanced, or where there is no prompt to go by. Else the worker that was sent
    the longest common beginning, if that is more than `cache_threshold` of the prompt. Else the one that was sent the
    least text, whose cache has most room; equals by load.
    """

    uses_prompt = True
    uses_load = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tree = PrefixTree()
        self._next_eviction: float | None = None

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """See the class."""
        config, prompt = self._config, request.prompt
        if prompt is None or is_imbalanced(candidates, config.balance_abs_threshold, config.balance_rel_threshold):
            return least_loaded(candidates, rng)
        by_url = {candidate.url: index for index, candidate in enumerate(candidates)}
        owner, length = self._tree.match(prompt, by_url)
        if owner is not None and length > config.cache_threshold * len(prompt):
            return by_url[owner]
        least = min(self._tree.size(candidate.url) for candidate in candidates)
        roomy = [index for index, candidate in enumerate(candidates) if self._tree.size(candidate.url) == least]
        return roomy[least_loaded([candidates[index] for index in roomy], rng)]

    def chosen(self, url: str, request: RoutedRequest, now: float) -> None:
        """The worker will have the prompt in its cache. A burst does not wait for `tick`; see `SLACK`."""
        most = self._config.max_tree_size
        if request.prompt is not None:
            self._tree.insert(request.prompt[:most], url)
            if self._tree.is_over(url, most, SLACK):
                self._tree.cut(url, most)

    def size(self, url: str) -> int:
        """Characters that are kept for a worker."""
        return self._tree.size(url)

    def forget(self, url: str) -> None:
        """Its cache is gone with it."""
        self._tree.forget(url)

    def tick(self, now: float) -> None:
        """Evict every `eviction_interval_s`."""
        if self._next_eviction is not None and now < self._next_eviction:
            return
        if self._next_eviction is not None:
            self._tree.evict(self._config.max_tree_size)
        self._next_eviction = now + self._config.eviction_interval_s
