"""Warm-up steps at start-up, which compile kernels and load libraries before the first request.

`LocalExecutor.warm_up` runs them on devices whose kernels are compiled at first use. The steps cover all shapes of
serving: the longest chunk beside the most rows; and few or many rows, short or long, which kernels tile differently,
alone and beside a chunk. With speculative decoding the same rows also have drafts. The steps read the null page and
write no KV.
"""

from __future__ import annotations

import dataclasses
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


def verify_steps(context: int, max_rows: int, chunk: int, max_drafts: int) -> list[tuple[list[Span], list[int]]]:
    """Return the rows of each step with drafts, and the drafts of each row, for rows of at most `max_drafts` drafts.

    Attention tiles a row with d drafts as 1 + d rows. The numbers of drafts of one row at most double from step to
    step, as do the numbers of rows with all drafts.
    """
    most = min(max_drafts, context - 1)
    if most < 1:
        return []
    doubled = {2**power - 1 for power in range(1, (most + 1).bit_length())}
    sizes = [(1, drafts) for drafts in sorted(doubled | {most})]
    sizes += [(2**power, most) for power in range(1, max_rows.bit_length())]
    sizes += [(max_rows, most)] if (max_rows, most) not in sizes else []
    steps: list[tuple[list[Span], list[int]]] = []
    for num_rows, num_drafts in sizes:
        length = 1 + num_drafts
        short, long = (0, length), (context - length, context)
        for first in (short, long):
            rows = [first, *[short] * (num_rows - 1)]
            steps.append((rows, [num_drafts] * num_rows))
            if num_rows < max_rows:
                steps.append(([*rows, (0, min(_FEW_TOKENS, context, chunk))], [*[num_drafts] * num_rows, 0]))
    return steps


def idle_batch(
    spans: Sequence[Span], *, layout: KVLayout, padding: Padding, drafts: Sequence[int] | None = None
) -> HostBatch:
    """Return a step over `spans` whose rows are rows of padding.

    `drafts`: draft tokens of each row, see `HostRows.num_drafts`; each row also folds a pending token where the model
    has states. None: no row has drafts.
    """
    starts, ends = (np.array(bounds, dtype=np.int64) for bounds in zip(*spans, strict=True))
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(offsets - starts, lengths)
    table_rows = np.full(len(spans), padding.spare_row, dtype=np.int64)
    token_rows, nowhere = np.repeat(table_rows, lengths), np.full(len(positions), NOWHERE, dtype=np.int64)
    size = len(spans), layout.pages_for(int(ends.max()))
    rows = HostRows(
        starts, ends, offsets, np.zeros_like(starts), padding.pages(*size), padding.window(*size),
        padding.slots(len(spans)),
    )  # fmt: skip
    counts = np.ones_like(starts)
    if drafts is not None:
        num_drafts = np.array(drafts, dtype=np.int64)
        rows = dataclasses.replace(rows, num_drafts=num_drafts, num_folded=counts if padding.has_state else None)
        counts = 1 + num_drafts
    behind = counts.cumsum().repeat(counts) - 1 - np.arange(int(counts.sum()))
    return HostBatch(
        columns=np.stack((token_rows, positions, nowhere, layout.page_and_slot(positions)[1])),
        sampled=np.arange(len(spans)).repeat(counts),
        sample_index=(offsets + lengths - 1).repeat(counts) - behind,
        table_rows=table_rows,
        rows=rows,
    )


def warm_up(
    model: Model,
    attention: AttentionBackend,
    tokens: Tensor,
    *,
    layout: KVLayout,
    padding: Padding,
    max_rows: int,
    chunk: int,
    max_drafts: int = 0,
) -> None:
    """Run the steps. `tokens` int32 `[rows, context + 1]`: no request has row `padding.spare_row`.

    `max_drafts`: most draft tokens of a row.
    """
    began, context = time.monotonic(), tokens.shape[1] - 1
    steps: list[tuple[list[Span], list[int] | None]] = [(spans, None) for spans in spans_of(context, max_rows, chunk)]
    steps += verify_steps(context, max_rows, chunk, max_drafts)
    for spans, drafts in steps:
        host = idle_batch(spans, layout=layout, padding=padding, drafts=drafts)
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
