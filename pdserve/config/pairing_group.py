"""How a request's prefill half and decode half find each other: a group of `ServerConfig`. Flag names of SGLang."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

MAX_ATTEMPTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairingConfig:
    """Optimistic prefill."""

    optimistic_prefill_attempts: int = flag(
        0,
        help="on prefill: times that a prompt may be computed before its decode server has published its pages; 0: "
        "prefill waits for the pages",
        names=("--optimistic-prefill-retries",),
    )
    optimistic_prefill_memory_fraction: float = flag(
        0.5,
        help="on prefill: share of KV pages that prompts may hold whose decode server has not published its pages",
    )

    def check(self) -> None:
        """Check all values; ConfigError names the flag."""
        if not 0 <= self.optimistic_prefill_attempts <= MAX_ATTEMPTS:
            _refuse("optimistic_prefill_attempts", self.optimistic_prefill_attempts, f"must be 0 to {MAX_ATTEMPTS}")
        share = self.optimistic_prefill_memory_fraction
        if not (math.isfinite(share) and 0 < share <= 1):
            _refuse("optimistic_prefill_memory_fraction", share, "must be above 0, and at most 1")

    def notes(self, mode: str) -> Iterator[str]:
        """Yield a line for each given flag that has no effect in the mode null, prefill or decode."""
        if mode != "prefill":
            for name in ("optimistic_prefill_attempts", "optimistic_prefill_memory_fraction"):
                if getattr(self, name) != getattr(PairingConfig(), name):
                    yield f"--{name.replace('_', '-')} has no effect: --disaggregation-mode is {mode}, not prefill"


def _refuse(field: str, value: object, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} is {value!r}, but {rule}", field=field)
