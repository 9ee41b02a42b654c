"""Flags of the storage tier: a group of `ServerConfig`. Names are SGLang's."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdserve.config.access_group import flag

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]


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
        "prefetch_timeout_per_ki_token, and options of the store",
    )
