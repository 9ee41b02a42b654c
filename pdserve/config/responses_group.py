"""Stored responses of `/v1/responses`: a group of `ServerConfig`, and limits of the router."""

from __future__ import annotations

import dataclasses
import math

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError
from pdserve.http.response_store import StoreLimits

MAX_STORED = 1 << 20
SIZE_HELP = "most stored responses of /v1/responses; 0: none are stored. The oldest make room"
MB_HELP = "most memory of stored responses in MiB, with their conversations"
TTL_HELP = "seconds after which a stored response is dropped"

BACKGROUND_HELP = (
    "most responses of /v1/responses that run in the background at a time; more are refused with 503. 0: background is "
    "refused"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseStoreConfig:
    """Stored responses of `/v1/responses`. A server behind pdserve's router stores none: the router does."""

    response_store_size: int = flag(1000, help=SIZE_HELP)
    response_store_mb: int = flag(64, help=MB_HELP)
    response_store_ttl: float = flag(86400.0, help=TTL_HELP)
    max_background_responses: int = flag(256, help=BACKGROUND_HELP)

    @property
    def limits(self) -> StoreLimits:
        """The values as limits of the store."""
        size, num_bytes = self.response_store_size, self.response_store_mb << 20
        return StoreLimits(size, num_bytes, self.response_store_ttl, self.max_background_responses)

    def check(self) -> None:
        """Check the values. Raises ConfigError."""
        if not 0 <= self.response_store_size <= MAX_STORED:
            raise _wrong("response_store_size", self.response_store_size, f"0 to {MAX_STORED}")
        if not 1 <= self.response_store_mb <= MAX_STORED:
            raise _wrong("response_store_mb", self.response_store_mb, f"1 to {MAX_STORED}")
        if not 0 <= self.max_background_responses <= MAX_STORED:
            raise _wrong("max_background_responses", self.max_background_responses, f"0 to {MAX_STORED}")
        if not (math.isfinite(self.response_store_ttl) and self.response_store_ttl > 0):
            raise _wrong("response_store_ttl", self.response_store_ttl, "a number of seconds above 0")


def _wrong(field: str, value: float, range_text: str) -> ConfigError:
    flag_name = field.replace("_", "-")
    return ConfigError(f"--{flag_name} is {value}, but must be {range_text}", field=field)
