"""Converts a plan to tensors: token, position and KV slot of every token in a step, without a loop over tokens.

Called by `LocalExecutor` only: `read_plan` when a step is launched, `build_batch` when it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.interface import BatchPlan
from pdserve.memory.layout import pages_for
from pdserve.memory.page_table import PageTable
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray, to_device


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A plan and its page-table entries at the launch, on the host; all arrays int64.

    `columns` `[4, N]`: table row, position, page, and slot in the page of each token. `sampled` `[S]`: plan rows that
    sample; `sample_index` `[S]`: flat index of the last token of each. `lines` `[R]`: table rows of the plan's rows.
    """

    columns: IntArray
    sampled: IntArray
    sample_index: IntArray
    lines: IntArray
    rows: HostRows


def read_plan(plan: BatchPlan, table: PageTable, prompts: IntArray, page_tokens: int) -> HostBatch:
    """Flatten `plan`. `prompts` int64 `[table rows]`: prompt tokens of each row.

    The result is a copy: the page table and the rows may change as soon as this returns.
    """
    facts = np.array([(row.row, row.start, row.end) for row in plan.rows]).T.copy()
    lines, starts, ends = facts
    longest = pages_for(max(row.end for row in plan.rows), page_tokens)
    if all(row.sample and row.end - row.start == 1 for row in plan.rows):
        # fast path for decode steps, which are most steps: one token a row
        columns = np.empty((4, len(lines)), dtype=np.int64)
        columns[:2] = facts[:2]
        every = np.arange(len(lines))
        offsets = sampled = sample_index = every
    else:
        lengths = ends - starts
        assert lengths.min() > 0, "each row has tokens"
        total = int(lengths.sum())
        columns = np.empty((4, total), dtype=np.int64)
        offsets = lengths.cumsum() - lengths
        columns[0], columns[1] = lines.repeat(lengths), np.arange(total) - (offsets - starts).repeat(lengths)
        sampled = np.array([row.sample for row in plan.rows]).nonzero()[0]
        sample_index = (offsets + lengths - 1)[sampled]
    np.divmod(columns[1], page_tokens, out=(columns[2], columns[3]))
    columns[2] = table.pages[columns[0], columns[2]]
    rows = HostRows(starts, ends, offsets, prompts[lines], table.pages[lines, :longest])
    return HostBatch(columns, sampled, sample_index, lines, rows)


def sampled_rows(batches: Sequence[HostBatch]) -> tuple[IntArray, IntArray]:
    """Return, for all rows that sample, the table row and the position of the sampled token; int64 `[S]` each."""
    lines = [batch.lines[batch.sampled] for batch in batches]
    ends = [batch.rows.ends[batch.sampled] for batch in batches]
    return (lines[0], ends[0]) if len(batches) == 1 else (np.concatenate(lines), np.concatenate(ends))


def build_batch(host: HostBatch, tokens: Tensor) -> ForwardBatch:
    """Build the tensors of a step. `tokens` int32 `[num_table_rows, context]`: known tokens, on the device."""
    device = tokens.device
    if device.type == "cpu":  # for a few tokens torch's indexing takes several times as long as numpy's
        numbers = host.columns.copy()
        numbers[0] = tokens.numpy()[numbers[0], numbers[1]]
        columns = torch.from_numpy(numbers)
    else:
        columns = to_device(host.columns, device)
        columns[0] = tokens[columns[0], columns[1]]
    return ForwardBatch(columns, to_device(host.sample_index, device), host.rows)
