"""Flags of the tiers below the device: host memory and a store. Groups of `ServerConfig`; names are SGLang's."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from pdserve.base.plugins import STORE_PLUGINS, check_name
from pdserve.config.access_group import flag
from pdserve.config.storage_options import StorageOptions, parse_storage_options
from pdserve.errors import ConfigError

HostWritePolicy = Literal["write_back", "write_through", "write_through_selective"]
STORES = ("file", "memory", "mooncake")
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Host memory below the prefix cache."""

    enable_hierarchical_cache: bool = flag(
        False, help="keep cached prefixes that leave the device in host memory", names=("--enable-hicache",)
    )
    hicache_ratio: float = flag(2.0, help="tokens of host memory for each token of the KV pool")
    hicache_size: float = flag(0.0, help="host memory of each rank, in GB; wins over --hicache-ratio when not 0")
    hicache_host_memory_fraction: float = flag(
        1.0,
        help="largest share of the host's free memory that the tier may take, in (0, 1]; a server whose "
        "--hicache-ratio or --hicache-size needs more does not start. SGLang lowers the ratio instead",
    )
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
        if not 0 < self.hicache_host_memory_fraction <= 1:
            value, field = self.hicache_host_memory_fraction, "hicache_host_memory_fraction"
            raise ConfigError(f"--hicache-host-memory-fraction is {value}, must be above 0 and at most 1", field=field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """A store of KV pages that servers share."""

    hicache_storage_backend: str | None = flag(
        None,
        help="store below the host tier: file, memory, mooncake, or the name of an entry point of the group "
        "pdserve.kv_storage; none when absent",
    )
    hicache_storage_prefetch_policy: PrefetchPolicy = flag(
        "timeout",
        help="how long a prompt waits for its pages from the store. best_effort: until it could start; wait_complete: "
        "until all are there; timeout: prefetch_timeout_base and prefetch_timeout_per_ki_token seconds",
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None,
        help="JSON, or @ and the path of a file with it: prefetch_threshold, prefetch_timeout_base, "
        "prefetch_timeout_per_ki_token, decode_offload_stride, and options of the store",
    )
    disaggregation_decode_enable_offload_kvcache: bool = flag(
        False,
        help="on decode: store the KV cache that it generates, so that the next turn of a conversation finds it on any "
        "server. Needs --hicache-storage-backend; sets --disaggregation-decode-enable-radix-cache and "
        "--enable-hierarchical-cache",
    )

    @property
    def options(self) -> StorageOptions:
        """The options of the store. Raises ConfigError when the flag's value is not valid."""
        return parse_storage_options(self.hicache_storage_backend_extra_config)

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: a value is wrong, or a flag is of no use without a store.
        """
        if self.hicache_storage_backend is not None:
            check_name("hicache_storage_backend", self.hicache_storage_backend, STORES, STORE_PLUGINS)
            self.options  # noqa: B018
            return
        for field, given in (
            ("hicache_storage_backend_extra_config", self.hicache_storage_backend_extra_config is not None),
            ("disaggregation_decode_enable_offload_kvcache", self.disaggregation_decode_enable_offload_kvcache),
        ):
            if given:
                name = field.replace("_", "-")
                raise ConfigError(f"--{name} needs --hicache-storage-backend", field=field)
