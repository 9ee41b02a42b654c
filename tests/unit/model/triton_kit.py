"""Paged rows and a plain reference for the Triton kernels. Without a CUDA device they are interpreted."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from pdserve.base.env import triton_is_interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
assert DEVICE == "cuda" or triton_is_interpreted(), "tests/conftest.py says so, before anything imports triton"
pytest.importorskip("triton", reason="triton is not installed")


@dataclasses.dataclass(frozen=True)
class Paged:
    """Rows over a pool full of NaN, but for their own positions.

    `kv` `[pages + 1, 2, kv_heads, page_tokens, D]` is one layer of three of the pool; `keys[r]`, `values[r]`
    `[ends[r], kv_heads, D]`.
    """

    kv: Tensor
    table: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def ends(self) -> Tensor:
        return torch.tensor([len(keys) for keys in self.keys], dtype=torch.int32, device=DEVICE)


def paged(lengths: list[int], kv_heads: int, dim: int, page_tokens: int, dtype: torch.dtype, seed: int) -> Paged:
    """Random rows of these lengths, on scattered pages."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    pages = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(pages)
    pool = torch.full((len(pages) + 1, 3, 2, kv_heads, page_tokens, dim), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(counts) + 2), len(pages) - 1, dtype=torch.int32)
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [pages.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        both = torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype)
        for position in range(length):
            pool[mine[position // page_tokens], 1, :, :, position % page_tokens] = both[:, position]
        keys.append(both[0])
        values.append(both[1])
    return Paged(pool.to(DEVICE)[:, 1], table.to(DEVICE), keys, values)


def behind_window(rows: Paged, starts: list[int], window: int) -> None:
    """Table entries of pages that no query from `starts` on sees become a page of NaN."""
    page_tokens = rows.kv.shape[3]
    for row, start in enumerate(starts):
        rows.table[row, : max(0, start - window + 1) // page_tokens] = len(rows.kv) - 1


def attended(
    q: Tensor, keys: Tensor, values: Tensor, start: int, *, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """The definition, in float64: queries `[T, heads, D]` from position `start` on, over `[P, kv_heads, D]`."""
    group = q.shape[1] // keys.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,phd->htp", q.double().cpu(), wide_k) * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(keys))
    hidden = key > at
    if window:
        hidden |= key <= at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        taken = sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, taken), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("htp,phd->thd", weights, wide_v)
