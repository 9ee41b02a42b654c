"""The least probability that top-p keeps, without sorting: the bits of a float are searched, two at a time.

Called by the sampler on CUDA. A token is kept while those likelier than it have less than `top_p` together; so the
least one is the largest value v for which everything from v on has `top_p` or more. Floats that are not negative are
in the order of their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.base.env import triton_is_interpreted
from pdserve.model.gpu.runtime import power_of_2


def least_of_nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Of `probs` float32 `[R, vocab]`, whose rows add up to 1, and `top_p` float32 `[R]`: float32 `[R]`.

    0 where the whole row has less than `top_p`.
    """
    num_rows, vocab = probs.shape
    least = torch.empty(num_rows, dtype=torch.float32, device=probs.device)
    if num_rows:
        block = power_of_2(vocab) if triton_is_interpreted() else 4096
        _search[(num_rows,)](probs, top_p, least, probs.stride(0), vocab, BLOCK=block, num_warps=8)
    return least


@triton.jit
def _search(probs, top_p, least, stride, vocab, BLOCK: tl.constexpr):
    """One row: 30 bits, for probabilities are below 2."""
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
