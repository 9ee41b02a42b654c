"""Families with experts by the CPU kernels: near to torch in float32, the same bits however they run, over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.driver import Driver, build, random_prompt
from tests.model_families import SPARSE
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.executor import expert_ranks
from tests.unit.executor.expert_ranks import Precision
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import LENGTHS, Outcome, outcome
from tests.unit.executor.same_bits import PROMPT, answer
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
TP2 = ParallelShape(tp_size=2)
SPLITS = {"tp2": ParallelConfig(tp_size=2), "ep2": ParallelConfig(tp_size=2, ep_size=2)}


def made(
    path: Path, *, dtype: Literal["bfloat16", "float32"] = "bfloat16", page_size: int = 16, threads: int = 1
) -> Driver:
    """A driver; in bfloat16 of the kernels, else of torch."""
    kernels: Literal["native", "torch"] = "native" if dtype == "bfloat16" else "torch"
    return Driver(build(path, dtype=dtype, cpu_kernels=kernels, page_size=page_size, cpu_threads=threads, max_rows=40))


def logprobs(driver: Driver) -> torch.Tensor:
    """Log probabilities behind prompts, `[prompts, vocab]`."""
    found = torch.zeros(len(LENGTHS), VOCAB_SIZE)
    for line, length in zip(found, LENGTHS, strict=True):
        row = driver.open(random_prompt(length, VOCAB_SIZE), length + 1, top_logprobs=VOCAB_SIZE)
        (token,) = driver.step((row, 0, length, True))
        assert token is not None
        for index, value in token.top:
            line[index] = value
        driver.close(row)
    return found


def divergence(found: Outcome, truth: torch.Tensor) -> float:
    """Kullback-Leibler divergence, the mean over prompts."""
    return float((truth.exp() * (truth - found.logprobs)).sum(-1).mean())


@pytest.mark.parametrize("name", rest_slow(SPARSE, keep=2))
def test_logits_are_nearer_to_float32_than_torch_in_bfloat16(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    truth = logprobs(made(path, dtype="float32"))
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels) for kernels in ("native", "torch"))
    assert divergence(mine, truth) < max(1e-2, 1.2 * divergence(torchs, truth))


@pytest.mark.parametrize("name", rest_slow(SPARSE))
def test_any_company_chunk_page_size_and_thread_gives_the_same_bits(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(name)
    alone = answer(made(path))
    assert answer(made(path), others=8, chunk=7).same_bits(alone)
    assert answer(made(path, page_size=5, threads=2), others=3, chunk=64).same_bits(alone)


@pytest.mark.parametrize("name", rest_slow(SPARSE))
def test_a_step_of_one_call_gives_the_same_tokens(
    name: str, family_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = family_checkpoint(name)
    found = made(path).generate([PROMPT, PROMPT[:20]], 8)
    monkeypatch.setattr(NativeDecoder, "max_native_rows", 0)
    assert made(path).generate([PROMPT, PROMPT[:20]], 8) == found


@pytest.mark.parametrize(
    ("name", "split", "precision"),
    rest_slow(
        [(name, split, "bfloat16") for name, split in (("glm4_moe", "ep2"), ("gpt_oss", "tp2"), ("gpt_oss", "ep2"))]
        + [(name, split, "int8") for name in SPARSE for split in SPLITS],
        keep=0,
    ),
)
def test_ranks_with_parts_of_the_experts_agree(
    name: str, split: str, precision: Precision, gang: Gang, family_checkpoint: Callable[[str], Path]
) -> None:
    """Each rank has the same tokens. A sum in another order may send a token to another expert, and few tokens go."""
    path = family_checkpoint(name)
    whole = expert_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), precision)
    ranks = gang.run(TP2, expert_ranks.outcome, path, VOCAB_SIZE, SPLITS[split], precision)
    for rank in ranks:
        assert rank.greedy == ranks[0].greedy
        for layer, counts in rank.counts.items():
            moved = sum(abs(a - b) for a, b in zip(counts, whole.counts[layer], strict=True)) / 2
            assert moved <= 0.06 * sum(counts), f"layer {layer}"
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])
