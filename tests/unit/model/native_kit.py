"""Batches and reference arithmetic for the tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.base.native import LEVELS, Unavailable, library, supports
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.native.weights import BLOCK, Format, inputs_of


def missing() -> str | None:
    """Why there are no kernels to test here; None when there are."""
    try:
        library()
    except Unavailable as unavailable:
        return str(unavailable)
    return None


WHY_NOT = missing()
needs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
LEVELS_HERE = [] if WHY_NOT is not None else [level for level in LEVELS if supports(level)]


def batch_of(rows: Sequence[tuple[int, int]], page_tokens: int, *, seed: int = 0) -> tuple[ForwardBatch, int]:
    """Rows that compute positions `[start, end)`, on scattered pages; and how many pages a pool must have."""
    starts, ends = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    lines = np.repeat(np.arange(len(rows)), lengths)
    positions = np.concatenate([np.arange(start, end) for start, end in rows])
    counts = -(-ends // page_tokens)
    num_pages = int(counts.sum()) + 3
    scattered = np.random.default_rng(seed).permutation(num_pages)
    table = np.full((len(rows), int(counts.max())), num_pages + 1000, dtype=np.int32)  # beyond a row: no page at all
    at = 0
    for line, count in enumerate(counts):
        table[line, :count] = scattered[at : at + count]
        at += count
    pages = table[lines, positions // page_tokens].astype(np.int64)
    columns = torch.from_numpy(np.stack((np.zeros_like(positions), positions, pages, positions % page_tokens)))
    samples = torch.from_numpy(offsets + lengths - 1)
    return ForwardBatch(
        columns, samples, HostRows(starts, ends, offsets, np.where(lengths > 1, ends, 0), table)
    ), num_pages


def part_of(batch: ForwardBatch, start: int, end: int, *, prompt: int) -> ForwardBatch:
    """Positions `[start, end)` of the only row of `batch`, which begins at 0; `prompt` tokens of it are its prompt."""
    host = HostRows(*(np.array([item]) for item in (start, end, 0, prompt)), batch.host.pages)
    return ForwardBatch(batch.columns[:, start:end].contiguous(), torch.tensor([end - start - 1]), host)


def rows_of_batch(batch: ForwardBatch, rows: Sequence[int]) -> ForwardBatch:
    """Some of the rows of `batch`, all of which have one token."""
    host = batch.host
    picked = HostRows(host.starts[rows], host.ends[rows], np.arange(len(rows)), host.prompts[rows], host.pages[rows])
    return ForwardBatch(batch.columns[:, rows].contiguous(), torch.arange(len(rows)), picked)


def fill_known(kv: Tensor, batch: ForwardBatch, page_tokens: int) -> None:
    """Random keys and values at all positions before each row's first new one."""
    for line, start in enumerate(batch.host.starts.tolist()):
        tokens = np.arange(start)
        pages = torch.from_numpy(batch.host.pages[line, tokens // page_tokens].astype(np.int64))
        known = torch.randn(start, *kv.shape[1:4], kv.shape[5]).to(kv.dtype)
        kv[pages, :, :, :, torch.from_numpy(tokens % page_tokens)] = known


def known_pages(batch: ForwardBatch, num_pages: int, page_tokens: int, dim: int) -> Tensor:
    """Pages of latents, of two layers, with random latents of what the rows have computed before; all else is NaN."""
    pages = torch.full((num_pages, 2, 1, 1, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    for line, start in enumerate(batch.host.starts.tolist()):
        tokens = np.arange(start)
        table = torch.from_numpy(batch.host.pages[line, tokens // page_tokens].astype(np.int64))
        pages[table, :, 0, 0, torch.from_numpy(tokens % page_tokens)] = torch.randn(start, 2, dim).bfloat16()
    return pages


def rounded(x: Tensor, format: Format) -> Tensor:
    """Inputs `[rows, in]` of a product as the kernels have them: bf16, or 8 bits with a scale per 32 columns."""
    if inputs_of(format) == "bf16":
        return x.bfloat16().float()
    groups = F.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, : x.shape[1]]


def rounded_weight(weight: Tensor, format: Format) -> Tensor:
    """A bf16 weight `[out, in]` as the kernels have it: itself, or 8 bits with a scale per output."""
    wide = weight.float()
    if format == "bf16":
        return wide
    scale = wide.abs().amax(1, keepdim=True) / 127
    return (wide / scale).round() * scale


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension, or nothing."""
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """Heads `[tokens, heads, dim]` rotated over their halves."""
    angles = positions[:, None].float() * inverse
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(
    q: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    page_tokens: int,
    *,
    layer: int,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of `q` `[tokens, heads, dim]` over the pages `kv`, token by token: `[tokens, heads * dim]`."""
    out = torch.empty_like(q)
    share = q.shape[1] // kv.shape[3]
    for line, (start, end) in enumerate(zip(batch.host.starts.tolist(), batch.host.ends.tolist(), strict=True)):
        tokens = np.arange(end)
        pages = torch.from_numpy(batch.host.pages[line, tokens // page_tokens].astype(np.int64))
        slots = torch.from_numpy(tokens % page_tokens)
        keys, values = (kv[pages, layer, i, :, slots].float().repeat_interleave(share, 1) for i in (0, 1))
        for position in range(start, end):
            flat = int(batch.host.offsets[line]) + position - start
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            scores = torch.einsum("hd,thd->ht", q[flat], keys[seen]) * q.shape[-1] ** -0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None]), 1)
            weights = scores.softmax(-1)[:, : len(keys[seen])]
            out[flat] = torch.einsum("ht,thd->hd", weights, values[seen])
    return out.flatten(1)
