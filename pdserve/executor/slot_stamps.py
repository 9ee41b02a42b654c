"""State slots between the rows of steps: their stamps, and copies from and to the prefix cache.

`LocalExecutor` reads a plan at its launch, and applies the result in the order of the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.executor.interface import BatchPlan
from pdserve.executor.verify import Fold, PendingRows
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import IntArray, to_device


@dataclasses.dataclass(frozen=True)
class SlotCopies:
    """Copies of state slots beside a step: pairs of slots, int64 `[2, N]` each, source and target."""

    before: IntArray
    after: IntArray

    @classmethod
    def of(cls, plan: BatchPlan, table: PageTable) -> SlotCopies | None:
        """Return the copies of the plan; None when it has none."""
        before = [(row.state_from, table.slots[row.row]) for row in plan.rows if row.state_from >= 0]
        after = [(table.slots[row.row], row.state_to) for row in plan.rows if row.state_to >= 0]
        assert not any(row.drafts for row in plan.rows if row.state_to >= 0), "no state is kept behind drafts"
        if not before and not after:
            return None
        return cls(*(np.array(pairs, dtype=np.int64).reshape(-1, 2).T for pairs in (before, after)))


@torch.inference_mode()
def copy_slots(pools: Sequence[GroupPool], pairs: IntArray) -> None:
    """Copy state slots in the pools that have them. On CUDA in the current stream. No slot is a target twice."""
    if not pairs.shape[1]:
        return
    for pool in pools:
        if pool.group.space is PageSpace.SLOTS and pool.group.num_layers:
            slots = pool.pages_as_bytes
            source, target = to_device(np.ascontiguousarray(pairs), slots.device)
            slots.index_copy_(0, target, slots.index_select(0, source))


@dataclasses.dataclass(frozen=True)
class StampWrites:
    """Stamps that a step writes: `slots` int64 `[R]`, `content` int64 `[R, 2 * layers]`."""

    slots: IntArray
    content: IntArray


class SlotStamps:
    """Stamps of the rows of `table` in `pool`. Only rows that compute known tokens are stamped, not decoding ones.

    So a slot with pending tokens (`HostRows.num_folded`) keeps the stamp of its last known token, as the slot of any
    request does that decodes. A transfer sends slots of prefilled prompts, which have none pending, and `seal`ed ones.

    `open`, `plan_writes` and `has` are called on the scheduler thread, `write` in the order of the steps.
    """

    def __init__(self, pool: GroupPool, table: PageTable) -> None:
        self._pool = pool
        self._table = table
        self._num_layers = pool.group.num_layers
        self._open: dict[int, tuple[SlotStamp, int]] = {}

    def open(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Record the request in `row`, whose known tokens are `token_ids`."""
        self._open[row] = SlotStamp.of(token_ids[:num_prompt_tokens], 0), len(token_ids)

    def plan_writes(self, plan: BatchPlan) -> StampWrites | None:
        """Return the stamps that the plan writes; None when it computes no known tokens."""
        rows = [row for row in plan.rows if row.end <= self._open[row.row][1] and not row.drafts]
        if not rows or not self._num_layers:
            return None
        words = [SlotStamp(self._open[row.row][0].request, row.end).words * self._num_layers for row in rows]
        slots = self._table.slots[[row.row for row in rows]].astype(np.int64)
        return StampWrites(slots, np.array(words, dtype=np.uint64).view(np.int64))

    def write(self, writes: StampWrites) -> None:
        """Write planned stamps. On CUDA in the current stream."""
        pages = self._pool.pages_as_bytes
        content = to_device(writes.content, pages.device).view(torch.uint8)
        pages.index_copy_(0, to_device(writes.slots, pages.device), content)

    def seal(self, slot: int, stamp: SlotStamp, pending: PendingRows | None, fold: Fold | None) -> None:
        """Fold the pending tokens of `slot`, and write `stamp`. Returns when both are in the pool."""
        if pending is not None and fold is not None:
            pending.settle([slot], fold)
        words = np.array([stamp.words * self._num_layers], dtype=np.uint64).view(np.int64)
        if self._num_layers:
            self.write(StampWrites(np.array([slot], dtype=np.int64), words))
        device = self._pool.pages_as_bytes.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def has(self, slot: int, stamp: SlotStamp) -> bool:
        """Return whether all layers' stamps in `slot` are `stamp`; True on a rank without STATE layers."""
        page = self._pool.pages_as_bytes[slot]
        if page.device.type == "cpu":
            return stamp.fills(page.numpy())
        with torch.cuda.stream(torch.cuda.Stream(page.device)):  # type: ignore[no-untyped-call]
            return stamp.fills(page.cpu().numpy())
