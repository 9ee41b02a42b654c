"""DP attention: replicas that share their feed-forward layers compute what whole models would, whatever they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.memory.layout import KVGroup
from pdserve.model.config import kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.executor.sharing_ranks import (
    Job,
    Outcome,
    gathered,
    in_bfloat16,
    out_of_step,
    outcome,
    with_other_weights,
)

ONE, TP2 = ParallelShape(), ParallelShape(tp_size=2)
BOTH_BUSY = (Job((1, 15, 40, 90)), Job((70, 3), chunk=33, idle_rounds=2))
ONE_IDLE = (Job(), Job((1, 15, 40)))
ONE_TOKEN = (Job((1,)), Job())


def flags(num_ranks: int, ep_size: int = 1, copies: int = 0) -> ParallelConfig:
    return ParallelConfig(
        tp_size=num_ranks, dp_size=2, enable_dp_attention=True, ep_size=ep_size, ep_num_redundant_experts=copies
    )


@pytest.mark.parametrize(
    ("family", "shape", "parallel", "jobs", "overlap"),
    [
        ("llama", ONE, flags(2), BOTH_BUSY, False),
        ("llama", TP2, flags(4), BOTH_BUSY, True),
        ("qwen2", ONE, flags(2), ONE_IDLE, False),
        ("qwen3_moe", TP2, flags(4), BOTH_BUSY, False),
        ("qwen3_moe", ONE, flags(2, 2), BOTH_BUSY, True),
        ("qwen3_moe", TP2, flags(4, 4), BOTH_BUSY, False),
        ("qwen3_moe", TP2, flags(4, 4, 2), ONE_IDLE, False),
        ("qwen3_moe", TP2, flags(4, 4), ONE_TOKEN, False),
    ],
)
def test_each_replica_computes_what_the_whole_model_does(
    family: Family,
    shape: ParallelShape,
    parallel: ParallelConfig,
    jobs: Sequence[Job],
    overlap: bool,
    gang: Gang,
    tmp_path: Path,
) -> None:
    path = make_tiny(family, tmp_path, seed=5)
    wholes = [outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), [job], False) for job in jobs]
    ranks = gang.run(shape, outcome, path, VOCAB_SIZE, parallel, jobs, overlap, num_sharing=2)
    spec = read_spec(path)
    group: KVGroup = kv_layout(spec, 16, "float32").groups[0]
    for index, rank in enumerate(ranks):
        whole = wholes[index // shape.num_ranks]
        assert rank.greedy == whole.greedy
        (heads, _) = group.heads_of(shape.coord(index % shape.num_ranks))
        held = whole.pages[:, :, :, heads.start : heads.stop]
        torch.testing.assert_close(rank.pages, held, atol=2e-4, rtol=0.0, equal_nan=True)
        assert rank.counts == _sums(wholes), "all ranks count all tokens"
        assert rank.num_bytes < whole.num_bytes
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([wholes[0].samples])


def _sums(wholes: Sequence[Outcome]) -> dict[int, list[int]]:
    layers = wholes[0].counts
    return {layer: [sum(c) for c in zip(*(whole.counts[layer] for whole in wholes), strict=True)] for layer in layers}


@pytest.mark.parametrize(("family", "ep_size"), rest_slow([("qwen3_moe", 4), ("llama", 1), ("qwen3_moe", 1)]))
def test_deterministic_mode_holds_whatever_other_replicas_compute(
    family: Family, ep_size: int, gang: Gang, tmp_path: Path
) -> None:
    """In bfloat16, where another order of adding up would show."""
    path = make_tiny(family, tmp_path, seed=11)
    ranks = gang.run(TP2, in_bfloat16, path, VOCAB_SIZE, flags(4, ep_size), fixed_order=True, num_sharing=2)
    answers = [tokens for rank in ranks for tokens in rank]
    assert all(tokens == answers[0] for tokens in answers)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [(ONE, (3, 5, 0, 1)), (ONE, (7, 0, 0, 0)), (ONE, (4, 4, 4, 4)), (ONE, (0, 0, 0, 0)), (TP2, (5, 1)), (TP2, (0, 6))],
)
def test_rows_of_uneven_replicas_are_gathered_and_added_up(
    shape: ParallelShape, sizes: tuple[int, ...], gang: Gang
) -> None:
    assert all(gang.run(shape, gathered, sizes, num_sharing=len(sizes)))


def test_ranks_in_different_rounds_are_an_error_and_no_wrong_token(gang: Gang) -> None:
    said = gang.run(ONE, out_of_step, num_sharing=2)
    assert all("not in the same round" in one for one in said), said


def test_no_step_is_computed_with_different_weights(gang: Gang) -> None:
    said = gang.run(ONE, with_other_weights, num_sharing=2)
    assert all("the ranks compute with different weights" in one for one in said), said
