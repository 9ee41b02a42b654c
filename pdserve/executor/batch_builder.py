"""From a plan to tensors: which token, which position, which slot, for a whole step, without a loop over tokens.

Called by `LocalExecutor.run` only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.executor.interface import BatchPlan
from pdserve.memory.layout import pages_for
from pdserve.memory.page_table import PageTable
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray


def build_batch(plan: BatchPlan, table: PageTable, page_tokens: int, tokens: Tensor) -> ForwardBatch:
    """Flatten `plan`. `tokens` is int32 `[num_table_rows, context]` on the device: the known tokens of each row."""
    lines, starts, ends = plan_arrays(plan)
    lengths = ends - starts
    assert len(lines) and lengths.min() > 0, "a plan has rows and each row has tokens"
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(offsets - starts, lengths)
    token_lines = np.repeat(lines, lengths)
    pages = table.pages[token_lines, positions // page_tokens].astype(np.int64)
    num_pages = pages_for(int(ends.max()), page_tokens)
    sampled = np.flatnonzero([row.sample for row in plan.rows])
    device = tokens.device
    columns = to_device(np.stack((token_lines, positions, pages, positions % page_tokens)), device)
    return ForwardBatch(
        input_ids=tokens[columns[0], columns[1]].long(),
        positions=columns[1],
        write_pages=columns[2],
        write_slots=columns[3],
        sample_index=to_device((offsets + lengths - 1)[sampled], device),
        host=HostRows(starts=starts, ends=ends, offsets=offsets, pages=table.pages[:, :num_pages][lines]),
    )


def plan_arrays(plan: BatchPlan) -> tuple[IntArray, IntArray, IntArray]:
    """`(table row, start, end)` of the plan's rows, int64 each."""
    facts = np.array([(row.row, row.start, row.end) for row in plan.rows], dtype=np.int64).reshape(-1, 3)
    return facts[:, 0], facts[:, 1], facts[:, 2]


def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float32], device: torch.device) -> Tensor:
    """`array` on `device`; the copy does not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
