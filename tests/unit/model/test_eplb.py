"""Placements: every expert somewhere, none twice on a rank, and better balanced the more there is to gain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.parallel import dealt
from pdserve.errors import ConfigError
from pdserve.model.eplb import Row, balanced, balancedness, moves_between, num_copies
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.layers.expert_parallel import ExpertTable, plan_dispatch
from pdserve.model.placement import first_placement, num_slots_for, slots_of

LAYERS = (0, 2)


def moe(num_experts: int) -> MoeSpec:
    return MoeSpec(num_experts=num_experts, top_k=1, intermediate_size=8, norm_top_k=True)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], int, Row]:
    """Counts of a layer's experts, ranks, and how the experts lie."""
    num_ranks, num_experts = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    least = -(-num_experts // num_ranks)
    num_slots = draw(st.integers(least, min(num_experts, least + 3)))
    counts = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return counts, num_ranks, tuple(i % num_experts for i in range(num_ranks * num_slots))


def is_sound(row: Row, num_experts: int, num_ranks: int) -> bool:
    ranks = [slots_of(row, num_ranks, rank) for rank in range(num_ranks)]
    return set(row) == set(range(num_experts)) and all(len(set(held)) == len(held) for held in ranks)


@given(situations(), st.randoms(use_true_random=False))
def test_a_new_placement_is_sound_and_never_worse(situation: tuple[list[int], int, Row], random: Any) -> None:
    counts, num_ranks, before = situation
    assert is_sound(before, len(counts), num_ranks)
    after = balanced(counts, num_ranks, before)
    assert len(after) == len(before) and is_sound(after, len(counts), num_ranks)
    assert after == before or balancedness(counts, num_ranks, after) > balancedness(counts, num_ranks, before)
    random.shuffle(counts)
    again = balanced(counts, num_ranks, after)
    assert len(again) == len(before) and is_sound(again, len(counts), num_ranks)


@given(situations())
def test_no_rank_has_more_to_do_than_its_slots_full_of_the_heaviest_copy(
    situation: tuple[list[int], int, Row],
) -> None:
    counts, num_ranks, before = situation
    row = balanced(counts, num_ranks, before)
    copies = num_copies(counts, num_ranks, len(before))
    heaviest = max(count / number for count, number in zip(counts, copies, strict=True))
    mean = sum(counts) / num_ranks
    num_slots = len(before) // num_ranks
    assert balancedness(counts, num_ranks, row) >= min(1.0, mean / (heaviest * num_slots or 1.0)) - 1e-9


@given(situations(), st.data())
def test_moves_make_the_old_placement_the_new_one(situation: tuple[list[int], int, Row], data: st.DataObject) -> None:
    counts, num_ranks, before = situation
    after = balanced(counts, num_ranks, before)
    num_slots = len(before) // num_ranks
    slots = list(before)
    for move in moves_between(before, after, num_ranks):
        assert move.source != move.target
        expert = before[move.source * num_slots + move.source_slot]
        slots[move.target * num_slots + move.target_slot] = expert
    assert tuple(slots) == after
    assert moves_between(after, after, num_ranks) == []


def test_a_hot_expert_is_copied_and_the_others_make_room() -> None:
    counts = [900, 10, 10, 10, 10, 10]
    before: Row = (0, 1, 2, 3, 4, 5, 0, 1)
    after = balanced(counts, 4, before)
    assert after.count(0) == 3
    assert balancedness(counts, 4, after) > balancedness(counts, 4, before)
    assert balanced([5, 5, 5, 5], 2, (0, 1, 2, 3)) == (0, 1, 2, 3)
    assert balanced([0, 0, 0, 0], 2, (0, 1, 2, 3)) == (0, 1, 2, 3)


def test_experts_that_stay_keep_their_slots() -> None:
    before: Row = (0, 1, 2, 3)
    after = balanced([10, 10, 1, 1], 2, before)
    assert sum(old == new for old, new in zip(before, after, strict=True)) == 2


def test_places_left_over_hold_copies() -> None:
    assert first_placement(moe(6), LAYERS, 4, 0, "trivial").rows == dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5, 0, 1))
    assert num_slots_for(moe(6), 2, 0) == 3 and num_slots_for(moe(6), 2, 1) == 4
    with pytest.raises(ConfigError, match="6") as error:
        num_slots_for(moe(6), 2, 7)
    assert error.value.field == "ep_num_redundant_experts"


def test_a_file_says_where_experts_start_or_what_they_had_to_do(tmp_path: Path) -> None:
    file = tmp_path / "where.json"
    file.write_text(json.dumps({"physical_to_logical_map": [[3, 2, 1, 0], [0, 0, 0, 0], [0, 2, 1, 3]]}))
    assert first_placement(moe(4), LAYERS, 2, 0, str(file)).rows == {0: (3, 2, 1, 0), 2: (0, 2, 1, 3)}
    counts = [[10, 10, 0, 0], [0, 0, 0, 0], [0, 5, 5, 0]]
    file.write_text(json.dumps({"logical_count": [counts, counts]}))
    for layer, row in first_placement(moe(4), LAYERS, 2, 0, str(file)).rows.items():
        assert balancedness(counts[layer], 2, row) == 1.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ("{}", "neither"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3]]}', "1 rows of 4, expected 3 of 4"),
        ('{"physical_to_logical_map": [[0, 1], [0, 1], [0, 1]]}', "3 rows of 2"),
        ('{"physical_to_logical_map": [[0, 1, 2, 4], [0], [0]]}', "not a table"),
        ('{"physical_to_logical_map": [[0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3]]}', "layer 0 must have each of 4"),
        ('{"physical_to_logical_map": "x"}', "not a table"),
        ('{"logical_count": [[1, -1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3]]}', "not a table"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "where.json").write_text(text)
    with pytest.raises(ConfigError, match=named) as error:
        first_placement(moe(4), LAYERS, 2, 0, str(tmp_path / "where.json"))
    assert error.value.field == "init_expert_location"


def test_an_expert_twice_on_a_rank_is_refused(tmp_path: Path) -> None:
    row = {"physical_to_logical_map": [[0, 0, 1, 2]] * 3}
    (tmp_path / "where.json").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="rank 0 an expert twice"):
        first_placement(moe(3), LAYERS, 2, 1, str(tmp_path / "where.json"))


@given(situations(), st.integers(1, 20), st.integers(1, 3), st.integers(0, 1000))
def test_every_row_reaches_a_copy_of_its_expert_and_finds_back(
    situation: tuple[list[int], int, Row], num_tokens: int, top_k: int, seed: int
) -> None:
    counts, num_ranks, row = situation
    top_k, num_slots = min(top_k, len(counts)), len(row) // num_ranks
    chance = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_tokens, len(counts), generator=chance).topk(top_k, -1).indices
    table = ExpertTable(row, num_ranks, len(counts), torch.device("cpu"))
    share = -(-num_tokens // num_ranks)
    plans = [
        plan_dispatch(table.places(experts), dealt(num_tokens, num_ranks), rank, table) for rank in range(num_ranks)
    ]
    for rank, plan in enumerate(plans):
        mine = experts[rank * share : (rank + 1) * share].flatten().tolist()
        assert sorted(plan.rows.tolist()) == list(range(len(mine))) and sum(plan.send) == len(mine)
        assert [other.send[rank] for other in plans] == plan.receive and len(plan.slots) == sum(plan.receive)
        arrived = [
            experts.flatten()[source * share * top_k + index].item()
            for source, other in enumerate(plans)
            for index in other.rows[sum(other.send[:rank]) : sum(other.send[: rank + 1])].tolist()
        ]
        assert arrived == [row[rank * num_slots + slot] for slot in plan.slots.tolist()]
