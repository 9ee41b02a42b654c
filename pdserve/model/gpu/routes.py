"""MoE routing in two small kernels: top-k expert choice, and sorting of rows by expert.

Called by `layers/triton_kernels.py` and `experts.py`. Torch needs a dozen launches per layer for the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.expert_math import TINY
from pdserve.model.gpu.runtime import chaining, power_of_2
from pdserve.model.layer_spec import MoeSpec

MAX_ROWS = 8192
"""Upper bound for `order_rows`, which compares every row with every other; above it, sorting is faster."""
_BLOCK_ROWS = 32
_CHUNK = 128


def route(logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from the outputs `[N, E]` of a router; see `Kernels.route`.

    Ties go to the lower expert index, and between groups to the lower group.
    """
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, moe.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, moe.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, logits if correction is None else correction, experts, weights, logits.stride(0), moe.routed_scale,
            EXPERTS=num_experts, BLOCK=power_of_2(num_experts), TOP_K=moe.top_k, BLOCK_K=power_of_2(moe.top_k),
            NORMALISE=moe.norm_top_k, SIGMOID=moe.scoring == "sigmoid", CORRECTS=correction is not None,
            SCALES=moe.routed_scale != 1.0, GROUPS=moe.num_groups, TOP_GROUPS=moe.top_groups, TINY=TINY,
            num_warps=1 if num_experts <= 256 else 4, **chaining(logits.device),
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
def _in_best_groups(
    choice, at, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """Set the scores outside of a token's best groups to -inf."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = at // SIZE
    of_group = tl.full((BLOCK,), float("-inf"), tl.float32)
    for index in range(GROUPS):
        mine = tl.where(group == index, choice, float("-inf"))
        total = tl.max(mine, 0)
        if SIGMOID and SIZE > 1:
            first = tl.min(tl.where(mine == total, at, BLOCK), 0)
            total += tl.max(tl.where(at == first, float("-inf"), mine), 0)
        of_group = tl.where(group == index, total, of_group)
    kept = tl.full((BLOCK,), float("-inf"), tl.float32)
    for _ in range(TOP_GROUPS):
        most = tl.max(of_group, 0)
        best = tl.min(tl.where(of_group == most, group, GROUPS - 1), 0)
        kept = tl.where(group == best, choice, kept)
        of_group = tl.where(group == best, float("-inf"), of_group)
    return kept


@triton.jit
def _route(
    logits, correction, experts, weights, stride, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TINY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_expert = at < EXPERTS
    outputs = tl.load(logits + token * stride + at, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-outputs))
    else:
        parts = tl.where(is_expert, tl.exp(outputs - tl.max(outputs, 0)), 0.0)
        scores = parts / tl.sum(parts, 0)
    choice = scores
    if CORRECTS:
        choice += tl.load(correction + at, mask=is_expert, other=0.0)
    left = tl.where(is_expert, choice, float("-inf"))
    if GROUPS > 1:
        left = _in_best_groups(left, at, EXPERTS, BLOCK, GROUPS, TOP_GROUPS, SIGMOID)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    taken = tl.zeros((BLOCK_K,), tl.float32)
    for choice_index in range(TOP_K):
        most = tl.max(left, 0)
        best = tl.min(tl.where(left == most, at, EXPERTS - 1), 0)  # the last expert when all are NaN
        score = most
        if CORRECTS:
            score = tl.sum(tl.where(at == best, scores, 0.0), 0)
        chosen = tl.where(places == choice_index, best, chosen)
        taken = tl.where(places == choice_index, score, taken)
        left = tl.where(at == best, float("-inf"), left)
    if NORMALISE:
        total = tl.sum(taken, 0)
        if SIGMOID:
            total += TINY
        taken = taken / total
    if SCALES:
        taken = taken * scale
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
