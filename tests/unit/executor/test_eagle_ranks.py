"""EAGLE-3 heads and draft models split over tensor ranks draft what they draft on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.speculative_group import SpeculativeAlgorithm
from pdserve.model.parallel import SingleRank
from tests.tiny import make_tiny
from tests.unit.executor.eagle_ranks import drafts_of
from tests.unit.executor.gang import Gang
from tests.unit.model.eagle_kit import TORCH, Way, make_eagle3, ways


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_two_ranks_draft_alike(algorithm: SpeculativeAlgorithm, way: Way, gang: Gang, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    if algorithm == "EAGLE3":
        draft = make_eagle3(tmp_path / "draft", path, draft_vocab_size=97)
    else:
        draft = make_tiny("qwen3", tmp_path / "draft", num_hidden_layers=2, seed=5)
    alone = drafts_of(SingleRank(), path, draft, algorithm, way)
    ranks = gang.run(ParallelShape(tp_size=2), drafts_of, path, draft, algorithm, way)
    assert ranks[1] == ranks[0]
    same = [drafts == own for drafts, own in zip(ranks[0], alone, strict=True)]
    assert same.count(True) >= (len(same) if way is TORCH else 0.7 * len(same)), same
