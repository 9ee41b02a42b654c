"""Hybrid models over real gloo ranks compute what the whole model does: tokens, KV, convolution inputs and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.model.config import kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor import sharing_ranks
from tests.unit.executor.gang import Gang
from tests.unit.executor.hybrid_ranks import build, decode, moved, outcome, prefill

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
    path = hybrid_checkpoint(family)
    shape = ParallelShape(tp_size=split.tp_size, pp_size=split.pp_size)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    ranks = gang.run(shape, outcome, path, VOCAB_SIZE, split)
    layout = kv_layout(read_spec(path), 16, "float32")
    held = {(layer, plane.name): plane for group in layout.groups for layer in group.layers for plane in group.planes}
    assert held.keys() == whole.planes.keys()
    for index, rank in enumerate(ranks):
        coord = shape.coord(index)
        assert rank.greedy == whole.greedy and rank.chunked == whole.greedy
        assert {layer for layer, _ in rank.planes} == set(layout.layers_of(coord))
        for key, values in rank.planes.items():
            expected = whole.planes[key][:, held[key].heads_of(coord)]
            torch.testing.assert_close(values, expected, atol=2e-4, rtol=1e-3, equal_nan=True)
        assert rank.num_bytes < whole.num_bytes
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])


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
    """The copies are those of the transfer plan, into pools of NaN, at other pages and slots."""
    family, prefill_split, decode_split = PAIRS[name]
    path = hybrid_checkpoint(family)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    source = ParallelShape(tp_size=prefill_split.tp_size, pp_size=prefill_split.pp_size)
    target = ParallelShape(tp_size=decode_split.tp_size, pp_size=decode_split.pp_size)
    ranks = gang.run(source, prefill, path, VOCAB_SIZE, prefill_split)
    leader = next(rank for rank in ranks if rank.tokens)
    ranks = [dataclasses.replace(rank, tokens=leader.tokens) for rank in ranks]
    for tokens in gang.run(target, decode, path, VOCAB_SIZE, decode_split, source, ranks):
        assert tokens == whole.greedy


@pytest.mark.parametrize("ep_size", rest_slow([2, 1]))
def test_replicas_that_share_feed_forward_layers_compute_what_the_whole_model_does(
    ep_size: int, gang: Gang, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    """One replica begins idle, and the other ends so."""
    path = hybrid_checkpoint("qwen3_next")
    jobs = (sharing_ranks.Job((1, 40, 70)), sharing_ranks.Job((65, 3), chunk=33, idle_rounds=2))
    wholes = [
        sharing_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), [job], overlap=False) for job in jobs
    ]
    flags = ParallelConfig(tp_size=2, dp_size=2, enable_dp_attention=True, ep_size=ep_size)
    ranks = gang.run(ParallelShape(), sharing_ranks.outcome, path, VOCAB_SIZE, flags, jobs, False, num_sharing=2)
    for rank, whole in zip(ranks, wholes, strict=True):
        assert rank.greedy == whole.greedy
        assert rank.num_bytes < whole.num_bytes


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
