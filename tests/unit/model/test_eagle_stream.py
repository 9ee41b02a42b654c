"""With drafts of EAGLE-3 heads and draft models, right and wrong ones, the greedy stream is the one without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.executor.interface import BatchPlan, BatchRow, run
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.eagle_kit import (
    NUM_DRAFTS,
    TORCH,
    ReferenceHead,
    Way,
    head_drafts,
    make_eagle3,
    options,
    ways,
)

LENGTHS = (1, 15, 16, 40)


def speculative_stream(
    driver: Driver, prompts: Sequence[list[int]], wanted: Sequence[list[int]], *, corrects: bool
) -> Iterator[tuple[int, list[int], tuple[int, ...], int]]:
    """Decode greedily, as many tokens as `wanted` has, with the drafts that each step proposes.

    With `corrects` the first drafts of a row, in turn 0 to all of them, are replaced by those that are right.

    Yields for each row of a step: its number, all known tokens, what was proposed behind them, and how many drafts were
    accepted.
    """
    rows = [driver.open(prompt, len(prompt) + len(wanted[0]) + NUM_DRAFTS + 1) for prompt in prompts]
    known, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    drafts: list[tuple[int, ...]] = [()] * len(prompts)
    for step in itertools.count():
        left = [i for i, prompt in enumerate(prompts) if len(known[i]) < len(prompt) + len(wanted[i])]
        if not left:
            return
        for i in left if corrects and step else ():
            done = len(known[i]) - len(prompts[i])
            right = wanted[i][done : done + (step + i) % (NUM_DRAFTS + 1)]
            drafts[i] = (*right, *drafts[i][len(right) :])
        plan = tuple(
            BatchRow(str(i), rows[i], starts[i], len(known[i]) + len(drafts[i]), True, drafts=drafts[i]) for i in left
        )
        result = run(driver.built.executor, BatchPlan(step, plan))
        for at, i in enumerate(left):
            sampled = result.sampled(at)
            starts[i] = len(known[i]) + len(sampled) - 1
            known[i] += [token.token_id for token in sampled]
            drafts[i] = result.drafts[at]
            yield i, list(known[i]), drafts[i], len(sampled) - 1


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("corrects", [False, True])
def test_the_greedy_stream_is_that_without_speculation(
    algorithm: str, way: Way, corrects: bool, tmp_path: Path
) -> None:
    path = make_tiny("qwen3", tmp_path / "target", num_hidden_layers=6)
    draft = make_eagle3(tmp_path / "draft", path) if algorithm == "EAGLE3" else path
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    speculating, plain = options(way, algorithm, draft), options(way, algorithm, draft) | {"speculative": None}
    wanted = Driver(build(path, **plain)).generate(prompts, 40)
    num_accepted, found = 0, [list(prompt) for prompt in prompts]
    for i, known, _, count in speculative_stream(
        Driver(build(path, **speculating)), prompts, wanted, corrects=corrects
    ):
        found[i], num_accepted = known, num_accepted + count
    assert [tokens[len(prompt) :][:40] for tokens, prompt in zip(found, prompts, strict=True)] == wanted
    if corrects or algorithm == "STANDALONE":
        assert num_accepted > 20 * len(prompts)


def test_drafts_behind_accepted_ones_equal_the_reference(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    reference = load_reference(path)
    head = ReferenceHead(directory, reference.get_input_embeddings().weight)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    wanted = [reference_greedy(reference, prompt, 24) for prompt in prompts]
    driver = Driver(build(path, **options(TORCH, "EAGLE3", directory)))
    for _, known, drafts, _ in speculative_stream(driver, prompts, wanted, corrects=True):
        assert list(drafts) == head_drafts(reference, head, known), len(known)
