"""The policy kv_aware: the worker whose prefix cache has most of the prompt, as its KV events say.

Unlike cache_aware it knows what workers have evicted, what they have cached for other routers and clients, and that
prompts of different texts have the same tokens. It needs workers with `--kv-events-config`; others are chosen by load.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies.basic import Candidate, Policy, RoutedRequest, is_imbalanced, least_loaded
from pdserve.router.policies.kv_index import KVIndex


class KVAware(Policy):
    """Chooses by `index`, which `workers.kv_events` keeps.

    Workers whose load exceeds the smallest one by both balance thresholds are left out. Of the others, those with the
    longest cached prefix are chosen among by load, if the prefix is more than `cache_threshold` of the prompt. Else,
    and for a request without known tokens, the least loaded worker is chosen.
    """

    uses_load = True
    uses_tokens = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self.index = KVIndex()

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> int:
        """Choose by cached prefix, see the class."""
        prompt, config = request.tokens, self._config
        if prompt is None:
            return least_loaded(candidates, rng)
        least = min(candidates, key=lambda candidate: candidate.load)
        lengths = [
            0
            if is_imbalanced([candidate, least], config.balance_abs_threshold, config.balance_rel_threshold)
            else self.index.num_cached(candidate.url, prompt)
            for candidate in candidates
        ]
        longest = max(lengths)
        if longest <= config.cache_threshold * prompt.num_tokens:
            return least_loaded(candidates, rng)
        holders = [index for index, length in enumerate(lengths) if length == longest]
        return holders[least_loaded([candidates[index] for index in holders], rng)]

    def forget(self, url: str) -> None:
        """Forget the worker's blocks."""
        self.index.forget(url)
