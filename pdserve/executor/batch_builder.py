"""From a plan to tensors: which token, which position, which slot, for a whole step, without a loop over tokens.

Called by `LocalExecutor` only: `read_plan` when a step is launched, `build_batch` when it is computed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
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
    total = int(lengths.sum())
    if total == len(lines):  # one token a row: most steps, where a server's speed is decided
        offsets = np.arange(total)
        token_lines, positions, last = lines, starts, offsets
    else:
        offsets = lengths.cumsum() - lengths
        positions = np.arange(total) - (offsets - starts).repeat(lengths)
        token_lines, last = lines.repeat(lengths), offsets + lengths - 1
    columns = np.empty((4, total), dtype=np.int64)
    columns[0], columns[1] = token_lines, positions
    np.divmod(positions, page_tokens, out=(columns[2], columns[3]))
    columns[2] = table.pages[token_lines, columns[2]]
    num_pages = pages_for(int(ends.max()), page_tokens)
    sampled = np.array([row.sample for row in plan.rows]).nonzero()[0]
    return HostBatch(
        columns=columns,
        sampled=sampled,
        sample_index=last[sampled],
        lines=lines,
        rows=HostRows(starts=starts, ends=ends, offsets=offsets, pages=table.pages[lines, :num_pages]),
    )


def build_batch(host: HostBatch, tokens: Tensor) -> ForwardBatch:
    """Tensors of a step. `tokens` is int32 `[num_table_rows, context]` on the device: the known tokens of each row."""
    device = tokens.device
    columns = to_device(host.columns, device)
    if device.type == "cpu":  # torch's indexing of a few tokens takes several times as long as numpy's
        ids = torch.from_numpy(tokens.numpy()[host.columns[0], host.columns[1]].astype(np.int64))
    else:
        ids = tokens[columns[0], columns[1]].long()
    return ForwardBatch(
        input_ids=ids,
        positions=columns[1],
        write_pages=columns[2],
        write_slots=columns[3],
        sample_index=to_device(host.sample_index, device),
        host=host.rows,
    )
