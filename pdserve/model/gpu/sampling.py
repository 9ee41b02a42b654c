"""Argmax of every row in one pass that also copies the logits to a fixed tensor, and the threshold of top-p sampling.

`keep_argmax` is called by captured decode steps between the head and the next step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.base.env import triton_is_interpreted
from pdserve.model.gpu.runtime import chaining, power_of_2

_BLOCK = 4096


def keep_argmax(
    logits: Tensor, kept: Tensor, argmax: Tensor, tokens: Tensor, table_rows: Tensor, positions: Tensor
) -> None:
    """Copy `logits` `[N, vocab]` to `kept` and write each row's argmax to `argmax`; ties go to the lower index.

    Also writes the argmax to `tokens` int32 `[rows, width]`, in row `table_rows[n]` after position `positions[n]`.
    `argmax`, `table_rows` and `positions` are int64 `[N]`.
    """
    num_rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    peaks = torch.empty(num_rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device)
    chained = chaining(logits.device)
    _peaks[(num_rows, blocks)](
        logits, kept, peaks, places, logits.stride(0), kept.stride(0), vocab, BLOCK=_BLOCK, num_warps=4, **chained
    )
    _best[(num_rows,)](
        peaks, places, argmax, tokens, table_rows, positions, tokens.stride(0), blocks, vocab, BLOCK=power_of_2(blocks),
        num_warps=1, **chained,
    )  # fmt: skip


@triton.jit
def _peaks(
    logits, kept, peaks, places, stride, kept_stride, vocab, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """One block of one row."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < vocab
    values = tl.load(logits + row * stride + at, mask=mask, other=float("-inf"))
    tl.store(kept + row * kept_stride + at, values, mask=mask)
    wide = values.to(tl.float32)
    peak = tl.max(wide, 0)
    place = tl.min(tl.where((wide == peak) & mask, at, vocab - 1), 0)  # the last index when all are NaN
    tl.store(peaks + row * tl.num_programs(1) + block, peak)
    tl.store(places + row * tl.num_programs(1) + block, place)


@triton.jit(do_not_specialize_on_alignment=["table_rows", "positions"])  # see `fused_qk_norm_rope_cache._place`
def _best(
    peaks, places, best, tokens, table_rows, positions, token_stride, blocks, vocab, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < blocks
    values = tl.load(peaks + row * blocks + at, mask=mask, other=float("-inf"))
    where = tl.load(places + row * blocks + at, mask=mask, other=vocab - 1)
    place = tl.min(tl.where((values == tl.max(values, 0)) & mask, where, vocab - 1), 0)
    tl.store(best + row, place.to(tl.int64))
    tl.store(tokens + tl.load(table_rows + row) * token_stride + tl.load(positions + row) + 1, place)


def top_p_threshold(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest probability in each row's top-p nucleus: float32 `[R]`.

    `probs` is float32 `[R, vocab]`, with rows that add up to 1; `top_p` is float32 `[R]`. The result is the largest
    value v such that the probabilities of at least v sum to `top_p`; 0 when the whole row sums to less.
    """
    num_rows, vocab = probs.shape
    least = torch.empty(num_rows, dtype=torch.float32, device=probs.device)
    if num_rows:
        block = power_of_2(vocab) if triton_is_interpreted() else 4096
        _search[(num_rows,)](probs, top_p, least, probs.stride(0), vocab, BLOCK=block, num_warps=8)
    return least


@triton.jit
def _search(probs, top_p, least, stride, vocab, BLOCK: tl.constexpr):
    """One row. A search over 30 bits is enough, because probabilities are below 2."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(top_p + row)
    found = tl.full((), 0, tl.int32)
    for step in range(15):
        unit = tl.full((), 1, tl.int32) << (28 - 2 * step)
        one = tl.zeros((BLOCK,), tl.float32)
        two = tl.zeros((BLOCK,), tl.float32)
        three = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(probs + row * stride + at, mask=at < vocab, other=0.0)
            above = values.to(tl.int32, bitcast=True) - found
            one += tl.where(above >= unit, values, 0.0)
            two += tl.where(above >= 2 * unit, values, 0.0)
            three += tl.where(above >= 3 * unit, values, 0.0)
        found += unit * (tl.sum(one, 0) >= wanted).to(tl.int32)
        found += unit * (tl.sum(two, 0) >= wanted).to(tl.int32)
        found += unit * (tl.sum(three, 0) >= wanted).to(tl.int32)
    tl.store(least + row, found.to(tl.float32, bitcast=True))
