"""Sizes and allocates the pools of a rank, one for each group of the KV layout. `factory` calls it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch

from pdserve.config.groups import KernelConfig, ServerConfig
from pdserve.executor.graphs import DEFAULT_MAX_ROWS, graph_sizes
from pdserve.executor.memory_sizing import (
    CACHED_STATES,
    bytes_behind_pool,
    group_bytes,
    most_requests,
    pool_tokens,
    sizes_of_many,
    sizes_of_one,
)
from pdserve.memory.draft_groups import draft_groups
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, PageSpace
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.attention.state_slots import pending_bytes
from pdserve.model.config import ModelSpec
from pdserve.model.params import torch_dtype

_LOG = logging.getLogger(__name__)
DEFAULT_CHUNK = 2048
"""Tokens of the longest prefill chunk where no flag sets it."""
Agree = Callable[[int], int]
"""Returns the smallest of the numbers that the ranks of a replica pass."""


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Pages of all tokens, window pages and state slots: equal on all ranks of a replica.

    `num_scratch_pages`: pages behind those of all tokens in the pools of DRAFT groups.
    """

    num_pages: int
    groups: GroupPoolSizes
    num_scratch_pages: int = 0

    def pages_of(self, group: KVGroup) -> int:
        """Return the pages of a group's pool."""
        if group.kind is GroupKind.DRAFT:
            return self.num_pages + self.num_scratch_pages
        spaces = {PageSpace.WINDOW: self.groups.num_window_pages, PageSpace.SLOTS: self.groups.num_slots}
        return spaces.get(group.space, self.num_pages)


@dataclasses.dataclass(frozen=True)
class PoolDemand:
    """What the pools are for. `held`: this rank's part of the layout. `num_sharing`: ranks that share this host's RAM.

    `can_split_prompts`: False where a prompt must be one chunk. `tp_size` and `pp_size` are the replica's.
    `num_drafts`: most draft tokens of a row.
    """

    spec: ModelSpec
    held: KVLayout
    dtype: str
    device: torch.device
    max_rows: int
    context_length: int
    num_sharing: int
    can_split_prompts: bool
    tp_size: int
    pp_size: int
    num_drafts: int = 0


def size_pools(config: ServerConfig, demand: PoolDemand, agree: Agree | None) -> PoolSizes:
    """Return the sizes of the pools. `agree` None: the rank is alone.

    Window pages and state slots are for `max_rows` requests, as far as they fit in about half of the memory, and state
    slots also for the prefix cache. `max_mamba_cache_size` sets their number.

    Raises:
        ConfigError: not even one page fits.
    """
    agree = agree or _own
    held, device, max_rows = demand.held, demand.device, demand.max_rows
    chunk = longest_chunk(config, demand.context_length)
    reserved_bytes = 0
    if device.type == "cuda":
        reserved_bytes = bytes_behind_pool(
            demand.spec, torch_dtype(demand.dtype).itemsize, chunk=chunk, row_tokens=max_rows * (1 + demand.num_drafts),
            sizes=captured_sizes(config.kernels, max_rows), max_pages=held.pages_for(demand.context_length),
            tp_size=demand.tp_size,
        )  # fmt: skip
    one = sizes_of_one(
        held, context_length=demand.context_length, step_tokens=chunk if demand.can_split_prompts else None,
        num_steps_ahead=max(1, demand.pp_size - 1), decode_step_tokens=1 + config.speculative.max_drafts,
    )  # fmt: skip
    groups = one
    if held.window or held.has_state:
        caches_states = config.wants_prefix_cache and demand.can_split_prompts and held.has_state
        wanted = max_rows * (1 + CACHED_STATES if caches_states else 1)
        most = most_requests(
            config.memory, held, one, device, num_sharing=demand.num_sharing, reserved_bytes=reserved_bytes
        )
        fitting = agree(min(wanted, most))
        groups = sizes_of_many(one, min(max_rows, fitting), config.memory.max_mamba_cache_size or fitting)
    num_scratch_pages = max_rows * held.pages_for(demand.num_drafts)
    draft_bytes = num_scratch_pages * sum(group.page_bytes for group in draft_groups(held)) + groups.num_slots * sum(
        pending_bytes(group, demand.num_drafts, channel_decay=demand.spec.has_channel_decay)
        for group in held.groups
        if group.kind is GroupKind.STATE
    )
    num_tokens = pool_tokens(
        config.memory, held, device, context_length=demand.context_length, max_rows=max_rows,
        num_sharing=demand.num_sharing, reserved_bytes=reserved_bytes,
        group_bytes=group_bytes(held, groups) + draft_bytes,
    )  # fmt: skip
    most_pages = held.whole_pages(num_tokens)
    num_pages = agree(most_pages)
    assert 0 < num_pages <= most_pages, "agreed on more pages than this rank can hold"
    most_window = (
        num_pages + one.num_window_pages
    )  # a request has no more window pages than pages, but for those on return
    groups = dataclasses.replace(groups, num_window_pages=min(groups.num_window_pages, most_window))
    return PoolSizes(num_pages, groups, num_scratch_pages)


def make_pools(held: KVLayout, sizes: PoolSizes, device: torch.device, *, shareable: bool) -> tuple[GroupPool, ...]:
    """Allocate the pools of a rank. `shareable`: see `GroupPool`."""
    return tuple(_pool_class(group)(group, sizes.pages_of(group), device, shareable=shareable) for group in held.groups)


def longest_chunk(config: ServerConfig, context_length: int) -> int:
    """Tokens of the longest prompt, or prefill chunk, of a step."""
    chunk = config.schedule.chunked_prefill_size or DEFAULT_CHUNK
    return min(chunk, context_length) if chunk > 0 else context_length


def captured_sizes(kernels: KernelConfig, max_rows: int) -> tuple[int, ...]:
    """Batch sizes at which decode steps are captured, where they can be."""
    if kernels.disable_cuda_graph:
        return ()
    return graph_sizes(min(max_rows, kernels.cuda_graph_max_bs or DEFAULT_MAX_ROWS))


def _own(number: int) -> int:
    return number


def _pool_class(group: KVGroup) -> type[GroupPool]:
    is_attention = group.kind in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.DRAFT)
    return KVPool if is_attention and group.is_uniform else GroupPool
