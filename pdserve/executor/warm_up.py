"""Warm-up steps at start-up, which compile kernels and load libraries before the first request.

`LocalExecutor.warm_up` runs them on devices whose kernels are compiled at first use. The steps cover all shapes of
serving: the longest chunk beside the most rows; and few or many rows, short or long, which kernels tile differently,
alone and beside a chunk. They read the null page and write no KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.graphs import Padding
from pdserve.executor.input_batch import HostBatch, build_batch
from pdserve.memory.layout import KVLayout
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.forward_batch import NOWHERE, HostRows
from pdserve.model.interface import Model

_LOG = logging.getLogger(__name__)
Span = tuple[int, int]
"""Positions `[start, end)` of a row."""
_COUNTS = (1, 2, 4, 16, 32, 64)
"""Rows of a step. Decode attention tiles by the number of (row, KV head) pairs: few, some, many (`AttentionTiling`).

The upper bound of "some" is eight times its lower bound. So with any number of heads it contains one of these counts,
and that count less one, which is what remains beside a chunk.
"""
_FEW_TOKENS = 64
"""Most tokens of the small-batch products (`gpu/small_batch_gemm.py`). Servers of few rows meet them in short chunks
only.
"""


def spans_of(context: int, max_rows: int, chunk: int) -> list[list[Span]]:
    """Return the rows of each step, for requests of up to `context` tokens.

    One long row is enough: the longest row determines the number of parts that kernels split rows into.
    """
    short, long = (0, 1), (context - 1, context)
    longest, two = (0, min(context, chunk)), (0, min(2, context, chunk))
    steps = [[*[short] * (max_rows - 1), longest], [(0, min(_FEW_TOKENS, context, chunk))]]
    for first in (short, long):
        for count in sorted({min(count, max_rows) for count in (*_COUNTS, max_rows)}):
            rows = [first, *[short] * (count - 1)]
            steps += [rows, [*rows[:-1], two]]
    return steps


def idle_batch(spans: Sequence[Span], *, layout: KVLayout, padding: Padding) -> HostBatch:
    """Return a step over `spans` whose rows are rows of padding."""
    starts, ends = (np.array(bounds, dtype=np.int64) for bounds in zip(*spans, strict=True))
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(offsets - starts, lengths)
    table_rows = np.full(len(spans), padding.spare_row, dtype=np.int64)
    token_rows, nowhere = np.repeat(table_rows, lengths), np.full(len(positions), NOWHERE, dtype=np.int64)
    size = len(spans), layout.pages_for(int(ends.max()))
    return HostBatch(
        columns=np.stack((token_rows, positions, nowhere, layout.page_and_slot(positions)[1])),
        sampled=np.arange(len(spans)),
        sample_index=offsets + lengths - 1,
        table_rows=table_rows,
        rows=HostRows(
            starts, ends, offsets, np.zeros_like(starts), padding.pages(*size), padding.window(*size),
            padding.slots(len(spans)),
        ),
    )  # fmt: skip


def warm_up(
    model: Model,
    attention: AttentionBackend,
    tokens: Tensor,
    *,
    layout: KVLayout,
    padding: Padding,
    max_rows: int,
    chunk: int,
) -> None:
    """Run the steps. `tokens` int32 `[rows, context + 1]`: no request has row `padding.spare_row`."""
    began, context = time.monotonic(), tokens.shape[1] - 1
    steps = spans_of(context, max_rows, chunk)
    for spans in steps:
        host = idle_batch(spans, layout=layout, padding=padding)
        batch = build_batch(host, tokens)
        model.forward(batch, attention.begin(batch)).argmax(-1)
    if tokens.device.type == "cuda":
        from pdserve.model.gpu.sampling import top_p_threshold

        vocab = model.spec.vocab_size
        top_p_threshold(torch.full((1, vocab), 1.0 / vocab, device=tokens.device), tokens.new_ones(1).float())
        torch.cuda.current_stream(tokens.device).synchronize()
    for moe in model.moe_layers.values():
        moe.counts.zero_()
    _LOG.info("ran %d steps to build kernels: %.1f s", len(steps), time.monotonic() - began)
