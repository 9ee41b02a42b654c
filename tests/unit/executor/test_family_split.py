"""Families over real gloo ranks compute what the whole model does, and a pair of different splits goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.model_families import DENSE, KIMI, SPARSE
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.gang import Gang
from tests.unit.executor.hybrid_ranks import decode, outcome, prefill

ONE, TP2 = ParallelConfig(), ParallelConfig(tp_size=2)
SPLITS = {
    "tp2": TP2,
    "tp4, fewer kv heads": ParallelConfig(tp_size=4),
    "pp2": ParallelConfig(pp_size=2),
    "ep2": ParallelConfig(tp_size=2, ep_size=2),
}


@pytest.mark.parametrize(
    ("name", "split"),
    rest_slow(
        [
            ("olmo3", "tp4, fewer kv heads"),
            ("gemma2", "pp2"),
            ("gpt_oss", "tp2"),
            ("glm4_moe", "ep2"),
            (KIMI, "tp2"),
            (KIMI, "pp2"),
            (KIMI, "ep2"),
            *((name, "tp2") for name in (*DENSE, *SPARSE[1:])),
            *((name, "ep2") for name in SPARSE if name != "glm4_moe"),
        ],
        keep=5,
    ),
)
def test_a_split_model_computes_what_the_whole_one_does(
    name: str, split: str, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    path, flags = family_checkpoint(name), SPLITS[split]
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ONE)
    ranks = gang.run(ParallelShape(tp_size=flags.tp_size, pp_size=flags.pp_size), outcome, path, VOCAB_SIZE, flags)
    assert [rank.greedy for rank in ranks] == [whole.greedy] * len(ranks)
    assert [rank.chunked for rank in ranks] == [whole.greedy] * len(ranks)
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])


@pytest.mark.parametrize(
    ("name", "sizes"),
    rest_slow(
        [
            ("gemma3_text", (2, 1)),
            (KIMI, (2, 1)),
            (KIMI, (1, 2)),
            *((name, sizes) for name in (*DENSE, *SPARSE) for sizes in ((2, 1), (1, 2))),
        ],
        keep=3,
    ),
)
def test_ranks_that_receive_pages_go_on_with_the_whole_models_tokens(
    name: str, sizes: tuple[int, int], gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    """The copies are those of the transfer plan, into pools of NaN, at other pages."""
    path = family_checkpoint(name)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ONE)
    splits = [ParallelConfig(tp_size=size) for size in sizes]
    source, target = (ParallelShape(tp_size=size) for size in sizes)
    ranks = gang.run(source, prefill, path, VOCAB_SIZE, splits[0])
    leader = next(rank for rank in ranks if rank.tokens)
    ranks = [dataclasses.replace(rank, tokens=leader.tokens) for rank in ranks]
    for tokens in gang.run(target, decode, path, VOCAB_SIZE, splits[1], source, ranks):
        assert tokens == whole.greedy
