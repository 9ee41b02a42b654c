"""The MTP module drafts what an independent computation of it drafts: behind prompts, chunks, steps, prefix hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config.speculative_group import SpeculativeConfig
from tests.driver import Driver, build, random_prompt
from tests.mtp import MTPReference, write_with_mtp
from tests.tiny import VOCAB_SIZE

NAMES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe")
NUM_DRAFTS = 3
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=NUM_DRAFTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, MTPReference]]:
    """Makes the checkpoint of a family and its reference, once."""
    made: dict[str, tuple[Path, MTPReference]] = {}

    def make(name: str) -> tuple[Path, MTPReference]:
        if name not in made:
            path = write_with_mtp(name, tmp_path_factory.mktemp(name) / "checkpoint")
            made[name] = path, MTPReference.load(path, path.parent / "reference")
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_the_reference_behind_prompts_and_decode_steps(
    name: str, checkpoint: Callable[[str], tuple[Path, MTPReference]]
) -> None:
    path, reference = checkpoint(name)
    driver = Driver(build(path, dtype="float32", cpu_kernels="torch", speculative=NEXTN))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (1, 15, 16, 40)]
    rows = [driver.open(prompt, len(prompt) + 8) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    starts = [0] * len(prompts)
    for _ in range(4):
        result = driver.result(*[(row, s, len(k), True) for row, s, k in zip(rows, starts, known, strict=True)])
        for index, token in enumerate(result.tokens):
            assert token is not None
            starts[index] = len(known[index])
            known[index].append(token.token_id)
            assert list(result.drafts[index]) == reference.drafts(known[index], NUM_DRAFTS), (index, len(known[index]))


def first_drafts(driver: Driver, prompt: list[int], *, chunk: int | None = None) -> tuple[list[int], list[int]]:
    """The prompt with the token sampled behind it, and its drafts. `chunk`: tokens of a step."""
    row, start = driver.open(prompt, len(prompt) + 1), 0
    while True:
        end = len(prompt) if chunk is None else min(len(prompt), start + chunk)
        result = driver.result((row, start, end, end == len(prompt)))
        start = end
        if end == len(prompt):
            break
    (token,) = result.tokens
    assert token is not None
    driver.close(row)
    return [*prompt, token.token_id], list(result.drafts[0])


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_drafts_do_not_depend_on_how_a_prompt_is_cut(
    chunk: int, checkpoint: Callable[[str], tuple[Path, MTPReference]]
) -> None:
    path, reference = checkpoint("qwen3_5_text")
    driver = Driver(build(path, dtype="float32", cpu_kernels="torch", speculative=NEXTN))
    for length in (2, 17, 48):
        tokens, drafts = first_drafts(driver, random_prompt(length, VOCAB_SIZE), chunk=chunk)
        assert drafts == reference.drafts(tokens, NUM_DRAFTS)
