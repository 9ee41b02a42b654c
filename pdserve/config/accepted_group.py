"""Flags of SGLang that have no effect here: a group of `ServerConfig`. SGLang's command lines start with them.

Each flag has its type and range. A malformed value is refused as for any other flag; a given flag is logged with the
reason why it changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pdserve.errors import ConfigError


def _no_effect(
    why: str,
    low: int = 0,
    high: int = (1 << 31) - 1,
    *,
    names: tuple[str, ...] = (),
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declare a flag that changes nothing, because of `why`. A number must be in [`low`, `high`].

    `refused`: values of SGLang that would change something, and why they are not supported.
    """
    metadata = {"help": f"no effect: {why}", "names": names, "env": None, "secret": False, "refused": refused or {}}
    return dataclasses.field(default=None, metadata=metadata | {"why": why, "range": (low, high)})


CHAIN = "drafts are a chain, the continuation of one match"
STORAGE_RETRY = "a prompt is looked up in the store once, when its request is admitted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptedConfig:
    """Flags of SGLang that are accepted and have no effect."""

    disaggregation_decode_polling_interval: int | None = _no_effect(
        "decode does not poll its requests in turns; it handles a transfer when its event arrives", 1
    )
    enable_mixed_chunk: bool | None = _no_effect(
        "a step always takes prompts and running requests together; --mixed-chunk-size limits its prompt tokens"
    )
    enable_dynamic_chunking: bool | None = _no_effect("all chunks have the size of --chunked-prefill-size")
    nccl_port: int | None = _no_effect(
        "ranks of one host choose free ports; ranks of several hosts meet at --dist-init-addr", 1, 65535
    )
    decode_log_interval: int | None = _no_effect("no statistics are logged by the number of decode steps", 1)
    skip_server_warmup: bool | None = _no_effect("a server sends no request to itself when it starts")
    sleep_on_idle: bool | None = _no_effect("the scheduler always sleeps while there is nothing to compute")
    enable_memory_saver: bool | None = _no_effect("/release_memory_occupation needs no flag")
    enable_weights_cpu_backup: bool | None = _no_effect(
        "weights that are released are always copied to a file, and come back unchanged"
    )
    enable_cache_report: bool | None = _no_effect("usage.prompt_tokens_details always has cached_tokens")
    disable_outlines_disk_cache: bool | None = _no_effect("no grammar is cached on disk")
    enable_request_time_stats_logging: bool | None = _no_effect(
        "--log-requests writes the times of each request, and /generate returns them in meta_info.timing"
    )

    hicache_io_backend: Literal["direct", "kernel", "kernel_ascend"] | None = _no_effect(
        "a page is copied to and from host memory as one block, on CUDA in a stream of its own"
    )
    hicache_mem_layout: (
        Literal["layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head"] | None
    ) = _no_effect("a slot of host memory always holds all layers of one page in one block")
    hicache_host_memory_mode: Literal["cache"] | None = _no_effect(
        "host memory always keeps pages",
        refused={"buffer_only": "host memory is always a tier that keeps pages, also above a store"},
    )
    hicache_storage_prefetch_retry_max_attempts: int | None = _no_effect(STORAGE_RETRY)
    hicache_storage_prefetch_retry_poll_interval: int | None = _no_effect(STORAGE_RETRY)

    speculative_ngram_min_bfs_breadth: int | None = _no_effect(CHAIN, 1)
    speculative_ngram_max_bfs_breadth: int | None = _no_effect(CHAIN, 1)
    speculative_ngram_match_type: Literal["BFS", "PROB"] | None = _no_effect(CHAIN)
    speculative_ngram_max_trie_depth: int | None = _no_effect(
        "matches have at most --speculative-ngram-max-match-window-size tokens, and drafts at most "
        "--speculative-num-draft-tokens",
        1,
        names=("--speculative-ngram-branch-length",),
    )

    def check(self) -> None:
        """Check all values; ConfigError names the flag."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low, high = field.metadata["range"]
            if value is not None and not isinstance(value, str) and not low <= int(value) <= high:
                text = f"--{field.name.replace('_', '-')} is {value!r}, but must be {low} to {high}"
                raise ConfigError(text, field=field.name)

    def notes(self) -> Iterator[str]:
        """Yield a line for each given flag: the flag, and why it has no effect."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                prefix = "--no-" if value is False else "--"
                yield f"{prefix}{field.name.replace('_', '-')} has no effect: {field.metadata['why']}"
