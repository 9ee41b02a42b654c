"""Steps that compute nothing, run once at start-up: kernels are compiled and libraries opened before the first request.

Called by `LocalExecutor.warm_up` on devices whose kernels are compiled when first used. The steps have every form that
serving has: a chunk as long as they get, beside as many rows as there are; few rows and many, short ones and long
ones, which kernels cut up in other ways, alone and beside a chunk. They read the page of zeros and write nowhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.batch_builder import HostBatch, build_batch
from pdserve.executor.graphs import NOWHERE
from pdserve.memory.layout import pages_for
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.families.interface import Model
from pdserve.model.forward_batch import HostRows

_LOG = logging.getLogger(__name__)
Span = tuple[int, int]
"""Positions `[start, end)` of a row."""
_COUNTS = (1, 2, 4, 16, 32, 64)
"""Rows of a step. Decode attention has tilings for few, some and many pairs of a row and a KV head (`AttentionTiling`).
The most "some" are eight times the least: whatever the number of heads, a count is among them, and so is one less,
which is what a chunk leaves of it.
"""
_FEW_TOKENS = 64
"""So many have products of their own (`gpu/few_rows.py`), and a server of few rows meets them in short chunks only."""


def spans_of(context: int, max_rows: int, chunk: int) -> list[list[Span]]:
    """The rows of each step, for requests of up to `context` tokens.

    One long row is enough: into how many parts rows are cut up is said by the longest of them.
    """
    short, long = (0, 1), (context - 1, context)
    longest, two = (0, min(context, chunk)), (0, min(2, context, chunk))
    steps = [[*[short] * (max_rows - 1), longest], [(0, min(_FEW_TOKENS, context, chunk))]]
    for first in (short, long):
        for count in sorted({min(count, max_rows) for count in (*_COUNTS, max_rows)}):
            rows = [first, *[short] * (count - 1)]
            steps += [rows, [*rows[:-1], two]]
    return steps


def idle_batch(spans: Sequence[Span], *, page_tokens: int, null_page: int, spare_line: int) -> HostBatch:
    """A step over `spans` that reads the null page and writes nowhere, with the tokens of row `spare_line`."""
    starts, ends = (np.array(bounds, dtype=np.int64) for bounds in zip(*spans, strict=True))
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(offsets - starts, lengths)
    lines = np.full(len(spans), spare_line, dtype=np.int64)
    token_lines, nowhere = np.repeat(lines, lengths), np.full(len(positions), NOWHERE, dtype=np.int64)
    pages = np.full((len(spans), pages_for(int(ends.max()), page_tokens)), null_page, dtype=np.int32)
    return HostBatch(
        columns=np.stack((token_lines, positions, nowhere, positions % page_tokens)),
        sampled=np.arange(len(spans)),
        sample_index=offsets + lengths - 1,
        lines=lines,
        rows=HostRows(starts=starts, ends=ends, offsets=offsets, prompts=np.zeros_like(starts), pages=pages),
    )


def warm_up(
    model: Model,
    attention: AttentionBackend,
    tokens: Tensor,
    *,
    page_tokens: int,
    null_page: int,
    max_rows: int,
    chunk: int,
) -> None:
    """Run the steps. The last row of `tokens` int32 `[rows, context + 1]` is no request's."""
    began, context = time.monotonic(), tokens.shape[1] - 1
    steps = spans_of(context, max_rows, chunk)
    for spans in steps:
        host = idle_batch(spans, page_tokens=page_tokens, null_page=null_page, spare_line=len(tokens) - 1)
        batch = build_batch(host, tokens)
        model.forward(batch, attention.begin(batch)).argmax(-1)
    if tokens.device.type == "cuda":
        from pdserve.model.gpu.sampling import least_of_nucleus

        vocab = model.spec.vocab_size
        least_of_nucleus(torch.full((1, vocab), 1.0 / vocab, device=tokens.device), tokens.new_ones(1).float())
        torch.cuda.current_stream(tokens.device).synchronize()
    for mixture in model.moe_layers.values():
        mixture.counts.zero_()
    _LOG.info("ran %d steps to build kernels: %.1f s", len(steps), time.monotonic() - began)
