"""Rows with drafts on several ranks: every rank gets the same results, and they are those of single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.executor.interface import SampledToken
from pdserve.model.parallel import SingleRank
from tests.tiny import Family
from tests.unit.executor.gang import Gang
from tests.unit.executor.verify_ranks import answers
from tests.unit.model.native_kit import needs_kernels

TP2, PP2, BOTH = (ParallelShape(tp_size=tp, pp_size=pp) for tp, pp in ((2, 1), (1, 2), (2, 2)))
Tokens = list[list[SampledToken]]


def ids(tokens: Tokens) -> list[list[int]]:
    return [[token.token_id for token in line] for line in tokens]


@needs_kernels
@pytest.mark.parametrize("shape", [TP2, PP2, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_all_ranks_accept_the_same_drafts(
    gang: Gang, tiny_checkpoint: Callable[[Family], Path], shape: ParallelShape
) -> None:
    """By the CPU kernels, so to the bit."""
    found = gang.run(shape, answers, tiny_checkpoint("llama"), "bfloat16")
    plain, drafted = found[0]
    assert drafted == plain
    assert all(other == found[0] for other in found)


def test_torch_in_stages_has_the_tokens_of_one_rank(gang: Gang, tiny_checkpoint: Callable[[Family], Path]) -> None:
    path = tiny_checkpoint("llama")
    found = gang.run(PP2, answers, path, "float32")
    _, alone = answers(SingleRank(), path, "float32")
    assert all(ids(drafted) == ids(alone) for _, drafted in found)
