"""What must hold of a model that is split over ranks: it computes what the whole model does, alone and as a pair."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.model.config import kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.tiny import VOCAB_SIZE
from tests.unit.executor import sharing_ranks
from tests.unit.executor.gang import Gang
from tests.unit.executor.hybrid_ranks import decode, outcome, prefill


def shape_of(split: ParallelConfig) -> ParallelShape:
    """Return the ranks of a replica."""
    return ParallelShape(tp_size=split.tp_size, pp_size=split.pp_size)


def check_ranks(gang: Gang, path: Path, split: ParallelConfig) -> None:
    """Assert that ranks have the whole model's tokens, their part of its pages and states, and less memory."""
    shape = shape_of(split)
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


def check_transfer(gang: Gang, path: Path, prefill_split: ParallelConfig, decode_split: ParallelConfig) -> None:
    """Assert that decode ranks continue from the pages and slots of prefill ranks with the whole model's tokens.

    The copies are those of the transfer plan, into pools of NaN, at other pages and slots.
    """
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    source, target = shape_of(prefill_split), shape_of(decode_split)
    ranks = gang.run(source, prefill, path, VOCAB_SIZE, prefill_split)
    leader = next(rank for rank in ranks if rank.tokens)
    ranks = [dataclasses.replace(rank, tokens=leader.tokens) for rank in ranks]
    for tokens in gang.run(target, decode, path, VOCAB_SIZE, decode_split, source, ranks):
        assert tokens == whole.greedy


def check_sharing(gang: Gang, path: Path, ep_size: int) -> None:
    """Assert that two replicas that share feed-forward layers compute what the whole model does, with less memory.

    One replica begins idle, and the other ends so.
    """
    jobs = (sharing_ranks.Job((1, 40, 70)), sharing_ranks.Job((65, 3), chunk=33, idle_rounds=2))
    wholes = [
        sharing_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), [job], overlap=False) for job in jobs
    ]
    flags = ParallelConfig(tp_size=2, dp_size=2, enable_dp_attention=True, ep_size=ep_size)
    ranks = gang.run(ParallelShape(), sharing_ranks.outcome, path, VOCAB_SIZE, flags, jobs, False, num_sharing=2)
    for rank, whole in zip(ranks, wholes, strict=True):
        assert rank.greedy == whole.greedy
        assert rank.num_bytes < whole.num_bytes
