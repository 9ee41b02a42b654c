"""An MTP module over real gloo ranks: all ranks have the drafts of the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, ParallelConfig
from pdserve.model.parallel import SingleRank
from tests.mtp import MTPReference, write_with_mtp
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.draft_ranks import NUM_DRAFTS, drafted
from tests.unit.executor.gang import Gang
from tests.unit.model.native_kit import needs_kernels

TORCH = KernelConfig(device="cpu", cpu_threads=1, cpu_kernels="torch")
NATIVE = dataclasses.replace(TORCH, cpu_kernels="native")
Models = Callable[[str], tuple[Path, MTPReference]]
CASES = {
    "tp2": ("qwen3_5_text", ParallelConfig(tp_size=2)),
    "tp2 x ep2": ("qwen3_5_moe", ParallelConfig(tp_size=2, ep_size=2)),
    "tp4, fewer kv heads": ("qwen3_next", ParallelConfig(tp_size=4)),
    "tp4 x ep4": ("qwen3_next", ParallelConfig(tp_size=4, ep_size=4)),
}


@pytest.mark.parametrize("name", rest_slow(CASES, keep=2))
def test_ranks_draft_what_the_reference_does(name: str, gang: Gang, mtp_model: Models) -> None:
    family, split = CASES[name]
    path, reference = mtp_model(family)
    ranks = gang.run(ParallelShape(tp_size=split.tp_size), drafted, path, VOCAB_SIZE, split, TORCH)
    assert all(rank == ranks[0] for rank in ranks)
    for tokens, drafts in ranks[0]:
        assert list(drafts) == reference.drafts(tokens, NUM_DRAFTS)


@needs_kernels
@pytest.mark.parametrize("name", rest_slow(["tp2", "tp2 x ep2"], keep=1))
def test_ranks_draft_alike_with_the_cpu_kernels(name: str, gang: Gang, tmp_path: Path) -> None:
    """Sums over ranks round otherwise than the whole model, so some drafts may differ from those of one rank."""
    family, split = CASES[name]
    path = write_with_mtp(family, tmp_path / "model", linear_key_head_dim=32, linear_value_head_dim=16)
    whole = drafted(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), NATIVE)
    ranks = gang.run(ParallelShape(tp_size=split.tp_size), drafted, path, VOCAB_SIZE, split, NATIVE)
    assert all(rank == ranks[0] for rank in ranks)
    same = sum(one == other for one, other in zip(whole, ranks[0], strict=True))
    assert same >= len(whole) / 2, f"{same} of {len(whole)}"


def test_stages_are_refused_by_the_flag(mtp_model: Models, gang: Gang) -> None:
    path, _ = mtp_model("qwen3_5_text")
    with pytest.raises(AssertionError, match="--speculative-algorithm NEXTN: with --pp-size above 1 it must be NGRAM"):
        gang.run(ParallelShape(pp_size=2), drafted, path, VOCAB_SIZE, ParallelConfig(pp_size=2), TORCH)
