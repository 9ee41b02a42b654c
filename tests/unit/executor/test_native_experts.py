"""Experts and feed-forward layers of many ranks by the CPU kernels: what the whole model computes, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.executor import expert_ranks, sharing_ranks
from tests.unit.executor.expert_ranks import Precision
from tests.unit.executor.gang import Gang
from tests.unit.executor.sharing_ranks import Job
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
ONE, TP2, TP4 = ParallelShape(), ParallelShape(tp_size=2), ParallelShape(tp_size=4)
ROUNDING = 0.05
"""Of the norm of the prompts' KV. Other orders of adding up are rounded otherwise, and a token may go to another expert
for that, which counts most."""
FEW = 0.03
"""Of all routes."""
PROMPTS = (Job((1, 15, 40), num_tokens=1), Job((70, 3), chunk=33, idle_rounds=2, num_tokens=1))


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference of two pools over the norm of one; what nobody wrote is NaN in both."""
    assert torch.equal(got.isnan(), wanted.isnan())
    difference = got.float().nan_to_num() - wanted.float().nan_to_num()
    return float(difference.norm() / wanted.float().nan_to_num().norm())


def few_differ(got: dict[int, list[int]], wanted: dict[int, list[int]]) -> None:
    """Two counts of routes: as many of them, nearly all to the same experts."""
    assert got.keys() == wanted.keys()
    for layer, counts in got.items():
        assert sum(counts) == sum(wanted[layer])
        differing = sum(abs(a - b) for a, b in zip(counts, wanted[layer], strict=True)) / 2
        assert differing <= FEW * sum(counts)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("shape", "experts"),
    [
        (TP2, ParallelConfig(tp_size=2, ep_size=2)),
        (TP4, ParallelConfig(tp_size=4, ep_size=4)),
        (TP2, ParallelConfig(tp_size=2)),
    ],
    ids=["ep2", "ep4, two experts twice", "columns of all"],
)
def test_experts_of_many_ranks(
    shape: ParallelShape, experts: ParallelConfig, precision: Precision, gang: Gang, tmp_path: Path
) -> None:
    path = make_tiny("qwen3_moe", tmp_path, seed=5)
    whole = expert_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), precision)
    ranks = gang.run(shape, expert_ranks.outcome, path, VOCAB_SIZE, experts, precision)
    for rank in ranks:
        assert rank.greedy == ranks[0].greedy
        few_differ(rank.counts, whole.counts)
    heads = torch.cat([rank.pages for rank in ranks[:: max(1, shape.tp_size // whole.pages.shape[3])]], 3)
    assert apart(heads, whole.pages) < ROUNDING
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_packed_experts_move(precision: Precision, gang: Gang, tmp_path: Path) -> None:
    path = make_tiny("qwen3_moe", tmp_path, seed=7)
    experts = ParallelConfig(tp_size=2, ep_size=2)
    ranks = gang.run(TP2, expert_ranks.moved, path, VOCAB_SIZE, experts, False, precision)
    for rank in ranks:
        assert rank.sound, "a slot has other weights than it should"
        assert rank.tokens == ranks[0].tokens
        assert rank.after == ranks[0].after != rank.before
    assert sum(rank.num_moved for rank in ranks) > 0


@pytest.mark.parametrize(
    ("family", "ep_size", "jobs", "precision"),
    [
        ("llama", 1, PROMPTS, "bfloat16"),
        ("llama", 1, PROMPTS, "int8"),
        ("qwen3_moe", 1, (Job(), PROMPTS[0]), "bfloat16"),
        ("qwen3_moe", 2, PROMPTS, "bfloat16"),
        ("qwen3_moe", 2, PROMPTS, "int8"),
    ],
)
def test_replicas_that_share_layers(
    family: Family, ep_size: int, jobs: Sequence[Job], precision: Precision, gang: Gang, tmp_path: Path
) -> None:
    path = make_tiny(family, tmp_path, seed=5)
    flags = ParallelConfig(tp_size=2, dp_size=2, enable_dp_attention=True, ep_size=ep_size)
    wholes = [
        sharing_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), [job], False, precision) for job in jobs
    ]
    ranks = gang.run(ONE, sharing_ranks.outcome, path, VOCAB_SIZE, flags, jobs, False, precision, num_sharing=2)
    for rank, job, whole in zip(ranks, jobs, wholes, strict=True):
        if job.lengths:
            assert apart(rank.pages, whole.pages) < ROUNDING
        sums = {
            layer: [a + b for a, b in zip(counts, wholes[1].counts[layer], strict=True)]
            for layer, counts in wholes[0].counts.items()
        }
        few_differ(rank.counts, sums)
