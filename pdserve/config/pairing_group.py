"""How a request's prefill half and decode half find each other: a group of `ServerConfig`. Flag names of SGLang."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

from pdserve.base.hosts import server_url
from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

MAX_ATTEMPTS = 1000
MAX_PREFILL_SERVERS = 1024
PrefillChoice = Literal["least_loaded", "round_robin"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairingConfig:
    """Optimistic prefill, and requests that only a decode server got."""

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

    disaggregation_prefill: str | None = flag(
        None,
        help="on decode: URLs of prefill servers for requests without bootstrap_room. The server chooses one of them "
        "for each such request, and sends it the prefill half",
        many=True,
    )
    disaggregation_prefill_choice: PrefillChoice = flag(
        "least_loaded",
        help="on decode: how a server of --disaggregation-prefill is chosen. least_loaded: the one with the fewest "
        "requests of this server",
    )
    disaggregation_prefill_api_key: str | None = flag(
        None,
        help="on decode: API key for --disaggregation-prefill; the first of --api-key when absent",
        env="PDSERVE_PREFILL_API_KEY",
        secret=True,
    )

    @functools.cached_property
    def prefill_urls(self) -> tuple[str, ...]:
        """The URLs of `--disaggregation-prefill`; ConfigError if one is no URL, or is given twice."""
        field = "disaggregation_prefill"
        text = self.disaggregation_prefill
        words = [] if text is None else text.replace(",", " ").split()
        urls = tuple(server_url(word, field=field) for word in words)
        if text is not None and not 1 <= len(urls) <= MAX_PREFILL_SERVERS:
            _refuse(field, text, f"must be 1 to {MAX_PREFILL_SERVERS} URLs")
        if len(set(urls)) < len(urls):
            _refuse(field, text, "names a URL twice")
        return urls

    def check(self) -> None:
        """Check all values; ConfigError names the flag."""
        if not 0 <= self.optimistic_prefill_attempts <= MAX_ATTEMPTS:
            _refuse("optimistic_prefill_attempts", self.optimistic_prefill_attempts, f"must be 0 to {MAX_ATTEMPTS}")
        share = self.optimistic_prefill_memory_fraction
        if not (math.isfinite(share) and 0 < share <= 1):
            _refuse("optimistic_prefill_memory_fraction", share, "must be above 0, and at most 1")
        key = self.disaggregation_prefill_api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            field = "disaggregation_prefill_api_key"
            raise ConfigError(f"--{field.replace('_', '-')} must be printable ASCII without spaces", field=field)
        assert self.prefill_urls is not None, "raises ConfigError"

    def notes(self, mode: str) -> Iterator[str]:
        """Yield a line for each given flag that has no effect in the mode null, prefill or decode."""
        for role, names in ROLE_FLAGS.items():
            for name in names if mode != role else ():
                if getattr(self, name) != getattr(PairingConfig(), name):
                    yield f"--{name.replace('_', '-')} has no effect: --disaggregation-mode is {mode}, not {role}"


ROLE_FLAGS = {
    "prefill": ("optimistic_prefill_attempts", "optimistic_prefill_memory_fraction"),
    "decode": ("disaggregation_prefill", "disaggregation_prefill_choice", "disaggregation_prefill_api_key"),
}
"""The only role in which a flag has an effect."""


def _refuse(field: str, value: object, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} is {value!r}, but {rule}", field=field)
