"""From a plan to tensors: which token, which position, which slot, for a whole step, without a loop over tokens.

Called by `LocalExecutor` only: `read_plan` when a step is launched, `build_batch` when it is computed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from pdserve.executor.interface import BatchPlan
from pdserve.memory.layout import pages_for
from pdserve.memory.page_table import PageTable
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray
from pdserve.model.forward_batch import to_device as to_device


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A plan and what the page table said at its launch, as numbers on the host; all int64.

    `columns` `[4, N]`: table row, position, page and slot of each token. `sampled` `[S]`: plan rows that sample;
    `sample_index` `[S]`: the flat index of the last token of each. `lines` `[R]`: table rows of the plan's rows.
    """

    columns: IntArray
    sampled: IntArray
    sample_index: IntArray
    lines: IntArray
    rows: HostRows


def read_plan(plan: BatchPlan, table: PageTable, page_tokens: int) -> HostBatch:
    """Flatten `plan`. Everything is a copy: the page table may change as soon as this returns."""
    facts = np.array([(row.row, row.start, row.end) for row in plan.rows], dtype=np.int64)
    lines, starts, ends = facts[:, 0], facts[:, 1], facts[:, 2]
    lengths = ends - starts
    assert len(lines) and lengths.min() > 0, "a plan has rows and each row has tokens"
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(offsets - starts, lengths)
    token_lines = np.repeat(lines, lengths)
    pages = table.pages[token_lines, positions // page_tokens].astype(np.int64)
    num_pages = pages_for(int(ends.max()), page_tokens)
    sampled = np.flatnonzero([row.sample for row in plan.rows])
    return HostBatch(
        columns=np.stack((token_lines, positions, pages, positions % page_tokens)),
        sampled=sampled,
        sample_index=(offsets + lengths - 1)[sampled],
        lines=lines,
        rows=HostRows(starts=starts, ends=ends, offsets=offsets, pages=table.pages[:, :num_pages][lines]),
    )


def build_batch(host: HostBatch, tokens: Tensor) -> ForwardBatch:
    """Tensors of a step. `tokens` is int32 `[num_table_rows, context]` on the device: the known tokens of each row."""
    device = tokens.device
    columns = to_device(host.columns, device)
    return ForwardBatch(
        input_ids=tokens[columns[0], columns[1]].long(),
        positions=columns[1],
        write_pages=columns[2],
        write_slots=columns[3],
        sample_index=to_device(host.sample_index, device),
        host=host.rows,
    )
