"""Stamps and copies of state slots in a rank's pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.slot_stamps import SlotCopies, SlotStamps, copy_slots
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.model.attention.page_gather import GroupPool
from pdserve.sim.hash_lm import hash_layout

PROMPT = [5, 6, 7, 8]
LAYOUT = hash_layout(4, num_layers=6, has_state=True)


def pools_of(rank: int = 0, pp_size: int = 1) -> list[GroupPool]:
    held = LAYOUT.of_rank(ParallelShape(pp_size=pp_size).coord(rank))
    return [GroupPool(group, 5, torch.device("cpu")) for group in held.groups]


def table_of() -> PageTable:
    table = PageTable(3, 4)
    table.slots[:] = (4, 1, 2)
    return table


def test_rows_of_known_tokens_are_stamped_in_every_layer() -> None:
    pool = pools_of()[2]
    assert pool.group.num_layers == 3
    stamps = SlotStamps(pool, table_of())
    stamps.open(0, [*PROMPT, 9], len(PROMPT))
    stamps.open(1, PROMPT, len(PROMPT))
    plan = BatchPlan(1, (BatchRow("a", 0, 0, 3, False), BatchRow("b", 1, 4, 5, True)))
    writes = stamps.plan_writes(plan)
    assert writes is not None and writes.slots.tolist() == [4], "row 1 decodes"
    stamps.write(writes)
    assert stamps.has(4, SlotStamp.of(PROMPT, 3))
    assert not stamps.has(4, SlotStamp.of(PROMPT, 4)) and not stamps.has(4, SlotStamp.of([*PROMPT, 9], 3))
    assert not stamps.has(1, SlotStamp.of(PROMPT, 5))
    pool.pages_as_bytes[4, -1] += 1
    assert not stamps.has(4, SlotStamp.of(PROMPT, 3)), "the last layer has another position"
    assert stamps.plan_writes(BatchPlan(2, (BatchRow("b", 1, 4, 5, True),))) is None


def test_rows_with_drafts_are_neither_stamped_nor_kept() -> None:
    """The state of their slot stays as it was before them."""
    stamps = SlotStamps(pools_of()[2], table_of())
    stamps.open(0, [*PROMPT, 9, 10, 11], len(PROMPT))
    stamps.open(1, [*PROMPT, 9], len(PROMPT))
    drafted = BatchRow("a", 0, 4, 7, True, drafts=(10, 11))
    writes = stamps.plan_writes(BatchPlan(1, (drafted, BatchRow("b", 1, 4, 5, True))))
    assert writes is not None and writes.slots.tolist() == [1]
    with pytest.raises(AssertionError, match="no state is kept behind drafts"):
        SlotCopies.of(BatchPlan(1, (BatchRow("a", 0, 4, 7, True, state_to=3, drafts=(10, 11)),)), table_of())


def test_a_rank_without_recurrent_layers_has_every_stamp() -> None:
    pool = pools_of(rank=0, pp_size=6)[2]
    assert pool.group.num_layers == 0
    stamps = SlotStamps(pool, table_of())
    stamps.open(0, PROMPT, len(PROMPT))
    assert stamps.plan_writes(BatchPlan(1, (BatchRow("a", 0, 0, 4, True),))) is None
    assert stamps.has(2, SlotStamp.of(PROMPT, 1))


@pytest.mark.parametrize("copied", [(), (3,), (3, 0)])
def test_copies_move_states_and_stamps_and_no_pages(copied: tuple[int, ...]) -> None:
    pools = pools_of()
    for pool in pools:
        pool.pages_as_bytes[:] = torch.arange(5, dtype=torch.uint8)[:, None]
    rows = [BatchRow(f"r{i}", i, 4, 8, False, state_from=slot) for i, slot in enumerate(copied)]
    rows.append(BatchRow("kept", 2, 0, 4, False, state_to=3))
    copies = SlotCopies.of(BatchPlan(1, tuple(rows)), table_of())
    assert copies is not None
    copy_slots(pools, copies.before)
    expected = [0, 1, 2, 3, 4]
    for row, slot in enumerate(copied):
        expected[int(table_of().slots[row])] = slot
    for pool, content in zip(pools, ([0, 1, 2, 3, 4], expected, expected), strict=True):
        assert pool.pages_as_bytes[:, 0].tolist() == content
    copy_slots(pools, copies.after)
    assert pools[1].pages_as_bytes[3].unique().tolist() == [expected[2]]


def test_a_plan_without_copies_has_none() -> None:
    assert SlotCopies.of(BatchPlan(1, (BatchRow("a", 0, 0, 4, False),)), table_of()) is None


def test_a_stamp_is_of_the_prompt_and_the_position() -> None:
    stamp = SlotStamp.of(PROMPT, 4)
    assert stamp.fills(stamp.to_bytes() * 3) and stamp.fills(b"")
    assert np.frombuffer(stamp.to_bytes(), dtype=np.uint64).tolist() == list(stamp.words)
    assert len({SlotStamp.of(prompt, 4).request for prompt in ([1, 2], [2, 1], [1], [256], [1, 0])}) == 5
