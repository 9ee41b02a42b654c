"""What steps take of a CUDA device beside weights and KV pool, from their shapes. Called by `factory` before the pool
is sized: activations and graphs come after it, and must find room.

An estimate from above, of one rank. What capturing really took is logged (`graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.model.config import ModelSpec

LIBRARIES_BYTES = 512 << 20
"""Workspaces of cuBLAS and attention, kernels that are loaded when they are first used, and what lies in gaps."""
KERNELS_PER_LAYER = 16
KERNEL_BYTES = 8 << 10
"""Of one kernel in a graph, for its node and arguments."""


def bytes_behind_pool(
    spec: ModelSpec,
    item_bytes: int,
    *,
    chunk: int,
    max_rows: int,
    sizes: Sequence[int],
    max_pages: int,
    tp_size: int = 1,
) -> int:
    """Of all: steps of `chunk` tokens of prompts beside `max_rows` rows, and decode steps captured at batch `sizes`."""
    return (
        LIBRARIES_BYTES
        + step_bytes(spec, item_bytes, chunk + max_rows, max_rows, tp_size)
        + graph_bytes(spec, item_bytes, sizes, max_pages, tp_size)
    )


def step_bytes(spec: ModelSpec, item_bytes: int, num_tokens: int, num_samples: int, tp_size: int = 1) -> int:
    """The tensors of a step that are there at the same time: a layer's of all tokens, and the logits of all samples as
    they are, in float32, and as probabilities.
    """
    attention = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    feed_forward = 3 * spec.intermediate_size
    if spec.moe is not None:
        routed = spec.moe.top_k * (3 * spec.moe.intermediate_size + 2 * spec.hidden_size)
        feed_forward = max(feed_forward if spec.num_dense else 0, routed)
    widest = 4 * spec.hidden_size + -(-max(attention, feed_forward) // tp_size)
    return num_tokens * widest * item_bytes + num_samples * spec.vocab_size * (item_bytes + 8)


def graph_bytes(spec: ModelSpec, item_bytes: int, sizes: Sequence[int], max_pages: int, tp_size: int = 1) -> int:
    """Of decode steps captured at batch `sizes`, ascending: they share the largest one's tensors; each has its list of
    `max_pages` pages a row, and its kernels.
    """
    if not sizes:
        return 0
    kernels = len(sizes) * spec.num_layers * KERNELS_PER_LAYER * KERNEL_BYTES
    return step_bytes(spec, item_bytes, sizes[-1], sizes[-1], tp_size) + 4 * sum(sizes) * max_pages + kernels
