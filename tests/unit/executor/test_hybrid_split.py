"""Hybrid models over real gloo ranks compute what the whole model does: tokens, KV, convolution inputs and states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.model.parallel import SingleRank
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.gang import Gang
from tests.unit.executor.hybrid_ranks import build, moved, outcome
from tests.unit.executor.split_checks import check_ranks, check_sharing, check_transfer

CASES = {
    "tp4, fewer key heads and kv heads": ("qwen3_next", ParallelConfig(tp_size=4)),
    "pp2, a stage without attention": ("qwen3_5_text", ParallelConfig(pp_size=2)),
    "tp2 x ep2": ("qwen3_5_moe", ParallelConfig(tp_size=2, ep_size=2)),
    "tp2": ("qwen3_5", ParallelConfig(tp_size=2)),
    "tp2 x pp2": ("qwen3_5_moe_text", ParallelConfig(tp_size=2, pp_size=2)),
    "tp4 x ep4": ("qwen3_next", ParallelConfig(tp_size=4, ep_size=4)),
}


@pytest.mark.parametrize("name", rest_slow(CASES, keep=3))
def test_a_split_model_computes_what_the_whole_one_does(
    name: str, gang: Gang, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    family, split = CASES[name]
    check_ranks(gang, hybrid_checkpoint(family), split)


PAIRS = {
    "tp 2 to 4": ("qwen3_next", ParallelConfig(tp_size=2), ParallelConfig(tp_size=4)),
    "tp 4 to 2 with ep 2": ("qwen3_5_moe", ParallelConfig(tp_size=4), ParallelConfig(tp_size=2, ep_size=2)),
    "pp 2 to 1": ("qwen3_5", ParallelConfig(pp_size=2), ParallelConfig()),
    "tp 1 to 2": ("qwen3_5_text", ParallelConfig(), ParallelConfig(tp_size=2)),
    "tp 2 to 1": ("qwen3_5_moe_text", ParallelConfig(tp_size=2), ParallelConfig()),
    "pp 2, tp 2 to tp 4": ("qwen3_next", ParallelConfig(tp_size=2, pp_size=2), ParallelConfig(tp_size=4)),
}


@pytest.mark.parametrize("name", rest_slow(PAIRS, keep=2))
def test_ranks_that_receive_pages_and_states_go_on_with_the_whole_models_tokens(
    name: str, gang: Gang, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    family, prefill_split, decode_split = PAIRS[name]
    check_transfer(gang, hybrid_checkpoint(family), prefill_split, decode_split)


@pytest.mark.parametrize("ep_size", rest_slow([2, 1]))
def test_replicas_that_share_feed_forward_layers_compute_what_the_whole_model_does(
    ep_size: int, gang: Gang, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    check_sharing(gang, hybrid_checkpoint("qwen3_next"), ep_size)


def test_experts_that_move_in_the_middle_of_generation_change_no_token(
    gang: Gang, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    path = hybrid_checkpoint("qwen3_next")
    split = ParallelConfig(tp_size=2, ep_size=2, ep_num_redundant_experts=2)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    ranks = gang.run(ParallelShape(tp_size=2), moved, path, VOCAB_SIZE, split)
    before = [[0, 1, 2, 3, 0, 1]] * 4
    for tokens, rows in ranks:
        assert tokens == whole.greedy
        assert rows == ranks[0][1] and [list(row) for row in rows] != before


@pytest.mark.parametrize(
    ("split", "message"),
    [(ParallelConfig(tp_size=8), "value heads"), (ParallelConfig(tp_size=3), "value heads")],
    ids=["tp8", "tp3"],
)
def test_value_heads_that_do_not_divide_are_refused_by_name(
    split: ParallelConfig, message: str, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    class Elsewhere(SingleRank):
        coord = ParallelShape(tp_size=split.tp_size).coord(0)

    path = hybrid_checkpoint("qwen3_next")
    with pytest.raises(ConfigError, match=message) as error:
        build(Elsewhere(), path, split)
    assert error.value.field == "tp_size"
