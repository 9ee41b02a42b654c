"""Families over real gloo ranks compute what the whole model does, and a pair of different splits goes on.

`test_mla_split` has those with latents.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config.groups import ParallelConfig
from tests.model_families import DENSE, HYBRIDS, KIMI, PLAIN_DENSE, PLAIN_SPARSE, SPARSE
from tests.share import rest_slow
from tests.unit.executor.gang import Gang
from tests.unit.executor.split_checks import check_ranks, check_transfer

ALL = (*DENSE, *SPARSE, *PLAIN_DENSE, *PLAIN_SPARSE, *HYBRIDS)
SPLITS = {
    "tp2": ParallelConfig(tp_size=2),
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
    check_ranks(gang, family_checkpoint(name), SPLITS[split])


@pytest.mark.parametrize(
    ("name", "sizes"),
    rest_slow(
        [
            ("gemma3_text", (2, 1)),
            (KIMI, (2, 1)),
            (KIMI, (1, 2)),
            *((name, sizes) for name in ALL for sizes in ((2, 1), (1, 2))),
        ],
        keep=3,
    ),
)
def test_ranks_that_receive_pages_go_on_with_the_whole_models_tokens(
    name: str, sizes: tuple[int, int], gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    check_transfer(gang, family_checkpoint(name), *(ParallelConfig(tp_size=size) for size in sizes))
