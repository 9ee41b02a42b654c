"""Drafts of an MTP module are verified by the next step: tokens are those of single steps, and drafts stay right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.interface import BatchPlan, BatchRow, StepResult, run
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.mtp import MTPReference, write_with_mtp
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.model.native_kit import needs_kernels

NUM_DRAFTS, NUM_NEW = 3, 14
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=NUM_DRAFTS)
Models = Callable[[str], tuple[Path, MTPReference]]
LENGTHS = (1, 31, 45)
AGREES = 0.01
"""With outputs of layers this small most drafts are right."""
Choose = Callable[[int, int, tuple[int, ...]], tuple[int, ...]]
"""Returns the drafts of a row from its index, the tokens it has generated, and the drafter's proposal."""


def drafting(path: Path, speculative: SpeculativeConfig = NEXTN, **changes: Any) -> Driver:
    """A driver with the module, in float32 with torch."""
    return Driver(build(path, **{"dtype": "float32", "cpu_kernels": "torch", **changes}, speculative=speculative))


def speculate(
    driver: Driver, prompts: Sequence[list[int]], choose: Choose, sampling: CoreSamplingParams = GREEDY
) -> tuple[list[list[int]], list[tuple[list[int], tuple[int, ...]]], int]:
    """Tokens of prompts that run at once, all known tokens with the drafts behind them, and the accepted drafts."""
    rows = [driver.open(prompt, len(prompt) + NUM_NEW + NUM_DRAFTS + 2, sampling) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    proposals: list[tuple[int, ...]] = [()] * len(prompts)
    starts, found, num_accepted = [0] * len(prompts), [], 0
    for step in itertools.count():
        live = [i for i, tokens in enumerate(known) if len(tokens) < len(prompts[i]) + NUM_NEW]
        if not live:
            break
        plan = []
        for i in live:
            drafts = choose(i, len(known[i]) - len(prompts[i]), proposals[i]) if starts[i] else ()
            end = len(known[i]) + len(drafts)
            plan.append(BatchRow(str(i), rows[i], starts[i], end, True, drafts=drafts))
        result: StepResult = run(driver.built.executor, BatchPlan(step, tuple(plan)))
        for index, i in enumerate(live):
            sampled = [token.token_id for token in result.sampled(index)]
            known[i] += sampled
            starts[i], num_accepted = len(known[i]) - 1, num_accepted + len(sampled) - 1
            proposals[i] = result.drafts.get(index, ())
            found.append((list(known[i]), proposals[i]))
    for row in rows:
        driver.close(row)
    tokens = [own[len(prompt) :][:NUM_NEW] for own, prompt in zip(known, prompts, strict=True)]
    return tokens, found, num_accepted


def proposed(row: int, count: int, proposal: tuple[int, ...]) -> tuple[int, ...]:
    """What the drafter proposes."""
    return proposal


def no_drafts(row: int, count: int, proposal: tuple[int, ...]) -> tuple[int, ...]:
    """No drafts, on an executor that proposes none."""
    assert proposal == ()
    return ()


@pytest.mark.parametrize("name", rest_slow(("qwen3_5_text", "qwen3_next", "qwen3_5_moe"), keep=2))
def test_drafts_behind_right_and_wrong_drafts_equal_the_reference(name: str, mtp_model: Models) -> None:
    path, reference = mtp_model(name)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    driver = drafting(path)
    single, _, _ = speculate(drafting(path, SpeculativeConfig()), prompts, no_drafts)

    def mixed(row: int, count: int, proposal: tuple[int, ...]) -> tuple[int, ...]:
        """Right up to a position that changes from step to step and row to row."""
        right = single[row][count : count + (count + row) % (NUM_DRAFTS + 1)]
        wrong = (single[row][count : count + len(right) + 1] or [0])[-1] + 1
        return (*right, wrong % VOCAB_SIZE)[:NUM_DRAFTS]

    tokens, found, num_accepted = speculate(driver, prompts, mixed)
    assert tokens == single and num_accepted > NUM_NEW
    for known, drafts in found:
        assert list(drafts) == reference.drafts(known, NUM_DRAFTS), len(known)


@pytest.mark.parametrize("name", rest_slow(("qwen3_5_moe", "qwen3_next", "qwen3_5"), keep=1))
def test_the_stream_is_that_of_single_steps_where_most_drafts_are_right(name: str, tmp_path: Path) -> None:
    path = write_with_mtp(name, tmp_path / "model", agrees=AGREES)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    driver = drafting(path)
    single, _, _ = speculate(drafting(path, SpeculativeConfig()), prompts, no_drafts)
    tokens, _, num_accepted = speculate(driver, prompts, proposed)
    assert tokens == single and num_accepted >= NUM_NEW


@needs_kernels
@pytest.mark.parametrize("sampling", [GREEDY, CoreSamplingParams(temperature=1.0, seed=5)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", rest_slow(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), keep=2))
def test_the_cpu_kernels_give_the_stream_of_single_steps(
    name: str, quantization: str | None, sampling: CoreSamplingParams, tmp_path: Path
) -> None:
    path = write_with_mtp(name, tmp_path / "model", agrees=AGREES, linear_key_head_dim=32, linear_value_head_dim=16)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    changes: dict[str, Any] = {"dtype": "bfloat16", "cpu_kernels": "native", "quantization": quantization}
    single, _, _ = speculate(drafting(path, SpeculativeConfig(), **changes), prompts, no_drafts, sampling)
    tokens, _, num_accepted = speculate(drafting(path, **changes), prompts, proposed, sampling)
    assert tokens == single
    assert num_accepted >= NUM_NEW or sampling is not GREEDY
