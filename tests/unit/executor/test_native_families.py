"""Dense families by the CPU kernels, whole and split over ranks: near to the model in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.model.loader import read_spec
from pdserve.model.native.support import cannot_run
from pdserve.model.parallel import SingleRank
from tests.model_families import DENSE
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import divergence, outcome
from tests.unit.executor.sharing_ranks import Job
from tests.unit.executor.sharing_ranks import outcome as shared
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
TP2, PP2 = ParallelShape(tp_size=2), ParallelShape(pp_size=2)


@pytest.mark.parametrize("name", DENSE)
def test_the_kernels_compute_every_dense_family(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    assert cannot_run(read_spec(family_checkpoint(name)), torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.parametrize("name", rest_slow(DENSE, keep=3))
def test_logits_are_nearer_to_float32_than_torch_in_bfloat16(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    truth = outcome(SingleRank(), path, VOCAB_SIZE, "torch", "float32").logprobs
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels).logprobs for kernels in ("native", "torch"))
    assert divergence(mine, truth) < max(1e-3, 1.2 * divergence(torchs, truth))


@pytest.mark.parametrize(
    ("name", "shape"),
    rest_slow([("olmo2", TP2), ("gemma2", PP2), *((name, TP2) for name in DENSE if name != "olmo2")], keep=1),
)
def test_a_split_model_is_near_to_the_whole_one(
    name: str, shape: ParallelShape, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, "native")
    ranks = gang.run(shape, outcome, path, VOCAB_SIZE, "native")
    for rank in ranks:
        assert rank.greedy == ranks[0].greedy
        assert divergence(rank.logprobs, whole.logprobs) < 4e-3


@pytest.mark.parametrize("name", rest_slow(["gemma2", "olmo2", "granite"]))
def test_replicas_that_share_feed_forward_layers_are_near_to_the_whole_model(
    name: str, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    """The keys and values of prompts, whose feed-forward layers are computed outside of the program."""
    path, jobs = family_checkpoint(name), [Job((40, 7), num_tokens=1), Job((90,), num_tokens=1)]
    flags = ParallelConfig(tp_size=2, dp_size=2, enable_dp_attention=True)
    wholes = [shared(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), [job], False, "bfloat16") for job in jobs]
    ranks = gang.run(ParallelShape(), shared, path, VOCAB_SIZE, flags, jobs, False, "bfloat16", num_sharing=2)
    for rank, whole in zip(ranks, wholes, strict=True):
        mine, theirs = rank.pages.float(), whole.pages.float()
        assert torch.equal(mine.isnan(), theirs.isnan()) and not theirs.isnan().all()
        difference = (mine - theirs).nan_to_num(0.0)
        assert float(difference.norm() / theirs.nan_to_num(0.0).norm()) < 0.03
