"""MoE routing in two small kernels: top-k expert choice, and sorting of rows by expert.

Called by `layers/triton_kernels.py` and `experts.py`. Torch needs a dozen launches per layer for the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.runtime import chaining, power_of_2

MAX_ROWS = 8192
"""Upper bound for `order_rows`, which compares every row with every other; above it, sorting is faster."""
_BLOCK_ROWS = 32
_CHUNK = 128


def route(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the `top_k` likeliest experts of `[N, E]`, best first, int64 `[N, top_k]`, and float32 probabilities.

    With `normalise` the probabilities of a token add up to 1. Ties go to the lower expert index.
    """
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, experts, weights, logits.stride(0),
            EXPERTS=num_experts, BLOCK=power_of_2(num_experts), TOP_K=top_k, BLOCK_K=power_of_2(top_k),
            NORMALISE=normalise, num_warps=1 if num_experts <= 256 else 4,
            **chaining(logits.device),
        )  # fmt: skip
    return experts, weights


def order_rows(slots: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `order`, `row_ends` and `tile_ends` of `Sorted` for `slots` int64 `[R]`, R at most MAX_ROWS."""
    num_rows, device = len(slots), slots.device
    order = torch.empty(num_rows, dtype=torch.int64, device=device)
    row_ends, tile_ends = torch.empty(2, num_experts, dtype=torch.int64, device=device)
    _order[(1 + triton.cdiv(num_rows, _BLOCK_ROWS),)](
        slots, order, row_ends, tile_ends, num_rows, tile_rows,
        EXPERTS=num_experts, BLOCK_EXPERTS=power_of_2(num_experts), BLOCK_ROWS=_BLOCK_ROWS, CHUNK=_CHUNK, num_warps=4,
        **chaining(device),
    )  # fmt: skip
    return order, row_ends, tile_ends


@triton.jit
def _route(
    logits, experts, weights, stride,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One token."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_expert = at < EXPERTS
    scores = tl.load(logits + token * stride + at, mask=is_expert, other=float("-inf")).to(tl.float32)
    highest = tl.max(scores, 0)
    parts = tl.where(is_expert, tl.exp(scores - highest), 0.0)
    total = tl.sum(parts, 0)
    left = tl.where(is_expert, parts / total, -1.0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    taken = tl.zeros((BLOCK_K,), tl.float32)
    for choice in range(TOP_K):
        most = tl.max(left, 0)
        best = tl.min(tl.where(left == most, at, EXPERTS - 1), 0)  # the last expert when all are NaN
        chosen = tl.where(places == choice, best, chosen)
        taken = tl.where(places == choice, most, taken)
        left = tl.where(at == best, -1.0, left)
    if NORMALISE:
        taken = taken / tl.sum(taken, 0)
    tl.store(experts + token * TOP_K + places, chosen.to(tl.int64), mask=places < TOP_K)
    tl.store(weights + token * TOP_K + places, taken, mask=places < TOP_K)


@triton.jit(do_not_specialize=["num_rows"])
def _order(
    slots, order, row_ends, tile_ends, num_rows, tile_rows,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program 0 counts each expert's rows. The other programs compute the sorted position of some rows."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    others = tl.arange(0, CHUNK)
    if block == 0:
        experts = tl.arange(0, BLOCK_EXPERTS)
        counts = tl.zeros((BLOCK_EXPERTS,), tl.int32)
        for start in range(0, num_rows, CHUNK):
            theirs = tl.load(slots + start + others, mask=start + others < num_rows, other=-1)
            counts += tl.sum((theirs[None, :] == experts[:, None]).to(tl.int32), 1)
        tiles = (counts + tile_rows - 1) // tile_rows
        is_expert = experts < EXPERTS
        tl.store(row_ends + experts, tl.cumsum(counts, 0).to(tl.int64), mask=is_expert)
        tl.store(tile_ends + experts, tl.cumsum(tiles, 0).to(tl.int64), mask=is_expert)
    else:
        rows = (block - 1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = rows < num_rows
        mine = tl.load(slots + rows, mask=is_row, other=0)
        before = tl.zeros((BLOCK_ROWS,), tl.int32)
        for start in range(0, num_rows, CHUNK):
            at = start + others
            theirs = tl.load(slots + at, mask=at < num_rows, other=EXPERTS)
            is_less = theirs[None, :] < mine[:, None]
            is_earlier = (theirs[None, :] == mine[:, None]) & (at[None, :] < rows[:, None])
            before += tl.sum((is_less | is_earlier).to(tl.int32), 1)
        tl.store(order + before, rows.to(tl.int64), mask=is_row)
