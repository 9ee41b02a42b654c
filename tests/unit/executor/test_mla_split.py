"""Latent attention over real gloo ranks: heads split, latents on every rank, and one writer of them in a transfer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.model.config import check_spec, kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.transfer.plan import shard_flows
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import divergence
from tests.unit.executor.native_ranks import outcome as kernel_outcome
from tests.unit.executor.split_checks import check_ranks, check_sharing, check_transfer
from tests.unit.model.native_kit import needs_kernels

CASES = {
    "tp2 x ep2": ("deepseek_v3", ParallelConfig(tp_size=2, ep_size=2)),
    "tp4": ("deepseek_v2", ParallelConfig(tp_size=4)),
    "pp2": ("deepseek_v3", ParallelConfig(pp_size=2)),
    "tp2 x pp2": ("deepseek_v2", ParallelConfig(tp_size=2, pp_size=2)),
    "tp2": ("deepseek_v3", ParallelConfig(tp_size=2)),
    "tp2, index": ("deepseek_v32", ParallelConfig(tp_size=2)),
    "pp2, shared index": ("glm_moe_dsa", ParallelConfig(pp_size=2)),
}


@pytest.mark.parametrize("name", rest_slow(CASES, keep=2))
def test_a_split_model_computes_what_the_whole_one_does(
    name: str, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    family, split = CASES[name]
    check_ranks(gang, family_checkpoint(family), split)


PAIRS = {
    "tp 1 to 2": ("deepseek_v3", ParallelConfig(), ParallelConfig(tp_size=2)),
    "tp 2 to 1": ("deepseek_v2", ParallelConfig(tp_size=2), ParallelConfig()),
    "pp 2, tp 2 to tp 4": ("deepseek_v3", ParallelConfig(tp_size=2, pp_size=2), ParallelConfig(tp_size=4)),
    "tp 1 to 2, index": ("deepseek_v32", ParallelConfig(), ParallelConfig(tp_size=2)),
    "tp 4 to pp 2": ("deepseek_v2", ParallelConfig(tp_size=4), ParallelConfig(pp_size=2)),
    "pp 2 to tp 2, shared index": ("glm_moe_dsa", ParallelConfig(pp_size=2), ParallelConfig(tp_size=2)),
}


@pytest.mark.parametrize("name", rest_slow(PAIRS))
def test_ranks_that_receive_latents_go_on_with_the_whole_models_tokens(
    name: str, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    family, prefill_split, decode_split = PAIRS[name]
    check_transfer(gang, family_checkpoint(family), prefill_split, decode_split)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (4, 2), (2, 2)])
def test_each_rank_gets_its_latents_from_one_rank(
    sizes: tuple[int, int], family_checkpoint: Callable[[str], Path]
) -> None:
    source, target = (ParallelShape(tp_size=size) for size in sizes)
    for group in kv_layout(read_spec(family_checkpoint("deepseek_v32")), 16, "float32").groups:
        flows = shard_flows(group, source, target)
        assert sorted(flow.destination_rank for flow in flows) == list(range(sizes[1]))


@pytest.mark.parametrize(
    ("name", "ep_size"), rest_slow([("deepseek_v3", 2), ("deepseek_v3", 1), ("deepseek_v32", 2), ("glm_moe_dsa", 1)])
)
def test_replicas_that_share_feed_forward_layers_compute_what_the_whole_model_does(
    name: str, ep_size: int, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    check_sharing(gang, family_checkpoint(name), ep_size)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "shape"),
    rest_slow(
        [
            ("deepseek_v3", ParallelShape(tp_size=2)),
            ("deepseek_v3", ParallelShape(tp_size=4)),
            ("deepseek_v32", ParallelShape(tp_size=2)),
            ("glm_moe_dsa", ParallelShape(pp_size=2)),
        ]
    ),
)
def test_the_kernels_of_split_ranks_agree(
    name: str, shape: ParallelShape, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    whole = kernel_outcome(SingleRank(), path, VOCAB_SIZE, "native")
    ranks = gang.run(shape, kernel_outcome, path, VOCAB_SIZE, "native")
    for rank in ranks:
        assert rank.greedy == ranks[0].greedy
        assert divergence(rank.logprobs, whole.logprobs) < 4e-3


def test_a_stage_needs_the_index_of_its_layers(family_checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(family_checkpoint("glm_moe_dsa"))
    check_spec(spec, ParallelShape(pp_size=2), 1)
    with pytest.raises(ConfigError, match="begins a stage with layer 1") as error:
        check_spec(spec, ParallelShape(pp_size=3), 1)
    assert error.value.field == "pp_size"


def test_heads_that_do_not_divide_are_refused_by_name(family_checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(family_checkpoint("deepseek_v3"))
    with pytest.raises(ConfigError, match="4 attention heads") as error:
        check_spec(spec, ParallelShape(tp_size=3), 1)
    assert error.value.field == "tp_size"
