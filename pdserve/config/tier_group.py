"""Flags of the host tier: a group of `ServerConfig`. Names are SGLang's."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

HostWritePolicy = Literal["write_back", "write_through", "write_through_selective"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Host memory below the prefix cache."""

    enable_hierarchical_cache: bool = flag(
        False, help="keep cached prefixes that leave the device in host memory", names=("--enable-hicache",)
    )
    hicache_ratio: float = flag(2.0, help="tokens of host memory for each token of the KV pool")
    hicache_size: float = flag(0.0, help="host memory of each rank, in GB; wins over --hicache-ratio when not 0")
    hicache_write_policy: HostWritePolicy = flag(
        "write_through",
        help="when pages are copied to host memory. write_through: when they are computed; write_through_selective: "
        "when they are used again; write_back: before they leave the device",
    )

    def check(self) -> None:
        """Check all values. Raises ConfigError when one is wrong."""
        if not (math.isfinite(self.hicache_ratio) and 0 < self.hicache_ratio <= 1000):
            raise ConfigError(f"--hicache-ratio is {self.hicache_ratio}, must be 0 to 1000", field="hicache_ratio")
        if not (math.isfinite(self.hicache_size) and self.hicache_size >= 0):
            raise ConfigError(f"--hicache-size is {self.hicache_size}, must be at least 0", field="hicache_size")
