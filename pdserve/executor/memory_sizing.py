"""Sizes the KV pool where no flag does. `factory` calls it after the weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pdserve.base.host_memory import available_bytes
from pdserve.config.groups import MemoryConfig
from pdserve.errors import ConfigError
from pdserve.memory.group_pools import GroupPools, GroupPoolSizes
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.model.config import ModelSpec
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, MLASpec, MLPSpec, Operation

LIBRARIES_BYTES = 512 << 20
"""Workspaces of cuBLAS and attention, kernels loaded at first use, and fragmentation."""
_COLUMNS = 16
"""Elements per token and hidden element inside one layer, where the layers are not known."""
KERNELS_PER_LAYER = 16
KERNEL_BYTES = 8 << 10
"""Bytes of one kernel in a CUDA graph: its node and arguments."""


def bytes_behind_pool(
    spec: ModelSpec,
    item_bytes: int,
    *,
    chunk: int,
    row_tokens: int,
    sizes: Sequence[int],
    max_pages: int,
    tp_size: int = 1,
) -> int:
    """Device memory reserved beside the KV pool, in bytes.

    It covers steps of `chunk` prompt tokens beside decode rows of `row_tokens` tokens, drafts included, and decode
    steps captured at batch sizes `sizes`.
    """
    return (
        LIBRARIES_BYTES
        + step_bytes(spec, item_bytes, chunk + row_tokens, row_tokens, tp_size)
        + graph_bytes(spec, item_bytes, sizes, max_pages, tp_size)
    )


def step_bytes(spec: ModelSpec, item_bytes: int, num_tokens: int, num_samples: int, tp_size: int = 1) -> int:
    """Bytes of the tensors of a step that live at the same time.

    They are one layer's activations of all tokens, and the logits of all samples: raw, in float32, and as
    probabilities.
    """
    columns = max((_columns(op, spec.hidden_size) for op in spec.operations), default=_COLUMNS * spec.hidden_size)
    widest = 4 * spec.hidden_size + -(-columns // tp_size)
    return num_tokens * widest * item_bytes + num_samples * spec.vocab_size * (item_bytes + 8)


def _columns(op: Operation, hidden_size: int) -> int:
    """Elements per token of the tensors inside one operation of a layer."""
    if isinstance(op, AttentionSpec):
        return op.qkv_width
    if isinstance(op, MLASpec):
        return op.num_heads * (op.key_dim + op.latent_dim + op.kv_lora_rank + op.value_dim) + 2 * op.latent_dim
    if isinstance(op, GatedDeltaSpec):
        by_channel = 16 * op.num_value_heads * op.key_dim if op.channel_decay else 0  # decays and decayed keys
        return 4 * (2 * op.key_width + 2 * op.value_width) + by_channel  # projections, convolution, both in float32
    if isinstance(op, MLPSpec):
        return 3 * op.intermediate_size
    return op.top_k * (3 * op.intermediate_size + 2 * hidden_size) + 3 * op.shared_intermediate_size


def graph_bytes(spec: ModelSpec, item_bytes: int, sizes: Sequence[int], max_pages: int, tp_size: int = 1) -> int:
    """Bytes of decode steps captured at batch sizes `sizes`, ascending.

    All sizes share the tensors of the largest. Each has its kernels, and for each kind of attention its own list of
    `max_pages` pages a row.
    """
    if not sizes:
        return 0
    kernels = len(sizes) * spec.num_layers * KERNELS_PER_LAYER * KERNEL_BYTES
    tables = 4 * sum(sizes) * max_pages * max(1, len(spec.attentions))
    return step_bytes(spec, item_bytes, sizes[-1], sizes[-1], tp_size) + tables + kernels


CPU_CAP_BYTES = 4 << 30
"""Most bytes of the pool on CPU where no flag sets its size."""
CPU_FRACTION = 0.2
"""Share of the available RAM for the pool. Several servers of one host each take it; `memory/prefault.py` commits
little of it before its use.
"""
CUDA_FRACTION = 0.88


def pool_tokens(
    memory: MemoryConfig,
    layout: KVLayout,
    device: torch.device,
    *,
    context_length: int,
    max_rows: int,
    num_sharing: int = 1,
    reserved_bytes: int = 0,
    group_bytes: int = 0,
) -> int:
    """Return the token slots of the pool, a multiple of the page size. `layout` is this rank's part.

    The result is `max_total_tokens` when given, else what memory allows, and at most what `max_rows` requests can use.

    `num_sharing` ranks of the server share this host's RAM. On a CUDA device `reserved_bytes` stay free for memory
    allocated after the pool (`bytes_behind_pool`), whatever fraction is configured. `group_bytes` of the pool's memory
    are window pages and state slots.

    Raises:
        ConfigError: not even one page fits, or `mem_fraction_static` is out of range.
    """
    page = layout.page_tokens
    wanted = memory.max_total_tokens
    if wanted is None:
        most = max_rows * layout.tokens_in(layout.pages_for(context_length))
        available = _available_bytes(memory.mem_fraction_static, device, num_sharing, reserved_bytes)
        fitting = (available - group_bytes) // layout.token_bytes if layout.token_bytes else most
        wanted = min(fitting, most)
    if wanted < page:
        raise ConfigError(
            f"the KV pool would hold {wanted} tokens, less than one page of {page}; raise max_total_tokens "
            "or mem_fraction_static, or lower page_size"
            + (f" ({reserved_bytes >> 20} MB are left to steps and graphs)" if reserved_bytes else ""),
            field="max_total_tokens",
        )
    return layout.round_down(wanted)


CACHED_STATES = 2
"""States of the prefix cache for each row: one at a junction and one for the next turn of its conversation."""


def sizes_of_one(
    layout: KVLayout,
    *,
    context_length: int,
    step_tokens: int | None,
    num_steps_ahead: int = 1,
    decode_step_tokens: int = 1,
) -> GroupPoolSizes:
    """Return the window pages and state slots that one request may have at a time; see `GroupPoolSizes`."""
    if not (layout.window or layout.has_state):
        return GroupPoolSizes()
    sizes = GroupPoolSizes(
        step_tokens=step_tokens, num_steps_ahead=num_steps_ahead, decode_step_tokens=decode_step_tokens
    )
    window_pages = GroupPools(layout, sizes).most_window_pages(context_length)
    return dataclasses.replace(sizes, num_window_pages=window_pages, num_slots=int(layout.has_state))


def sizes_of_many(one: GroupPoolSizes, num_requests: int, num_slots: int) -> GroupPoolSizes:
    """Return the window pages of `num_requests` requests, and `num_slots` state slots where one request has one."""
    return dataclasses.replace(
        one, num_window_pages=one.num_window_pages * num_requests, num_slots=one.num_slots * num_slots
    )


def most_requests(
    memory: MemoryConfig,
    layout: KVLayout,
    one: GroupPoolSizes,
    device: torch.device,
    *,
    num_sharing: int = 1,
    reserved_bytes: int = 0,
) -> int:
    """Return for how many requests window pages and state slots fit in about half of the pool's memory, at least 1.

    With STATE groups `mamba_full_memory_ratio` sets that share. Other arguments: see `pool_tokens`.
    """
    available = _available_bytes(memory.mem_fraction_static, device, num_sharing, reserved_bytes)
    ratio = memory.mamba_full_memory_ratio if layout.has_state else 1.0
    return requests_in(available, ratio, layout, one)


def requests_in(num_bytes: int, ratio: float, layout: KVLayout, one: GroupPoolSizes) -> int:
    """Return for how many requests, at least 1, window pages and slots fit in `ratio / (1 + ratio)` of the bytes."""
    return max(1, int(num_bytes * ratio / (1.0 + ratio)) // max(1, group_bytes(layout, one)))


def group_bytes(layout: KVLayout, sizes: GroupPoolSizes) -> int:
    """Return the bytes of the window pages and state slots."""
    window = sizes.num_window_pages * layout.space_bytes(PageSpace.WINDOW)
    return window + sizes.num_slots * layout.space_bytes(PageSpace.SLOTS)


def _available_bytes(fraction: float | None, device: torch.device, num_sharing: int, reserved: int) -> int:
    """Bytes for the pool.

    On CPU: this rank's share of the RAM that the server takes. On CUDA: the fraction is of all device memory, and the
    weights, which are loaded already, count against it.
    """
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise ConfigError(f"mem_fraction_static must be in (0, 1), got {fraction}", field="mem_fraction_static")
    if device.type == "cpu":
        available = available_bytes()
        taken = int(available * fraction) if fraction else min(CPU_CAP_BYTES, int(available * CPU_FRACTION))
        return taken // num_sharing
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - max(reserved, int(total * (1.0 - (fraction or CUDA_FRACTION)))))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free now: on CUDA of the device, else of this host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
