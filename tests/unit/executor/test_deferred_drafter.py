"""A drafter that drafts nothing sees decode steps later: its drafts do not change, and the steps run no draft model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from pdserve.executor.deferred_drafter import DEPTH
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.executor.model_runner import NativeDecodePath
from pdserve.model.drafting.eagle3 import Eagle3Head
from pdserve.model.drafting.interface import Drafted
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.native.decoder import NativeDecoder
from tests.driver import Driver, build, random_prompt
from tests.mtp import MTPReference, write_with_mtp
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.test_drafter import NEXTN, drafting
from tests.unit.model.eagle_kit import (
    NATIVE,
    NUM_DRAFTS,
    TORCH,
    ReferenceHead,
    head_drafts,
    make_eagle3,
    options,
)
from tests.unit.model.native_kit import needs_kernels

PROMPTS = [random_prompt(length, VOCAB_SIZE) for length in (1, 15, 40)]
Found = list[tuple[list[int], list[int]]]
"""All known tokens of each row, and the drafts behind them."""


def drafts_after(driver: Driver, num_plain: int, *, num_proposals: int = 0, every: int = 1) -> Found:
    """Compute PROMPTS, then `num_plain` decode steps with `num_proposals`, then a step that drafts.

    Of the decode steps each row but the first is only in every `every`-th one.
    """
    executor = driver.built.executor
    rows = [driver.open(prompt, len(prompt) + num_plain + NUM_DRAFTS + 3) for prompt in PROMPTS]
    known = [list(prompt) for prompt in PROMPTS]
    starts = [0] * len(rows)

    def step(number: int, picked: Sequence[int], most: int | None) -> dict[int, tuple[int, ...]]:
        plan = tuple(BatchRow(str(i), rows[i], starts[i], len(known[i]), True) for i in picked)
        result = run(executor, BatchPlan(number, plan, most))
        for at, i in enumerate(picked):
            token = result.tokens[at]
            assert token is not None
            starts[i] = len(known[i])
            known[i].append(token.token_id)
        return dict(result.drafts)

    everyone = range(len(rows))
    step(0, everyone, 0)
    for number in range(1, num_plain + 1):
        found = step(number, everyone if number % every == 0 else [0], num_proposals)
        assert bool(found) == bool(num_proposals)
    drafts = step(num_plain + 1, everyone, None)
    for row in rows:
        driver.close(row)
    return [(known[i], list(drafts[i])) for i in everyone]


class Passes:
    """Counts the passes of EAGLE-3 heads, and the steps that the CPU kernels compute in one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_drafting = self.num_at_once = 0
        forward, decode = Eagle3Head.forward, NativeDecoder.decode

        def counted(head: Eagle3Head, batch: ForwardBatch, hidden: Tensor) -> Drafted | None:
            self.num_drafting += 1
            return forward(head, batch, hidden)

        def at_once(model: NativeDecoder, *args: object, **named: object) -> list[int]:
            self.num_at_once += 1
            return decode(model, *args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(Eagle3Head, "forward", counted)
        monkeypatch.setattr(NativeDecoder, "decode", at_once)


@pytest.mark.parametrize(("num_plain", "every"), [(3, 1), (DEPTH + 4, 1), (DEPTH + 4, 3)])
def test_a_head_drafts_as_if_it_had_seen_each_step(
    num_plain: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    reference = load_reference(path)
    head = ReferenceHead(directory, reference.get_input_embeddings().weight)
    driver, passes = Driver(build(path, **options(TORCH, "EAGLE3", directory))), Passes(monkeypatch)
    for known, drafts in drafts_after(driver, num_plain, every=every):
        assert drafts == head_drafts(reference, head, known), len(known)
    num_full = num_plain // (DEPTH + 1)  # steps that find the backlog full, with a pass for it and one for the step
    assert passes.num_drafting == 1 + 2 * num_full + 1 + NUM_DRAFTS


@pytest.mark.parametrize("num_plain", [DEPTH + 4])
def test_a_draft_model_drafts_as_if_it_had_seen_each_step(num_plain: int, tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "target", num_hidden_layers=4)
    small = make_tiny("llama", tmp_path / "draft", num_hidden_layers=2, num_key_value_heads=1, seed=3)
    reference = load_reference(small)
    driver = Driver(build(path, **options(TORCH, "STANDALONE", small)))
    for known, drafts in drafts_after(driver, num_plain):
        assert drafts == reference_greedy(reference, known, NUM_DRAFTS), len(known)


def test_a_module_beside_recurrent_layers_drafts_as_if_it_had_seen_each_step(
    mtp_model: Callable[[str], tuple[Path, MTPReference]],
) -> None:
    path, reference = mtp_model("qwen3_5_text")
    for known, drafts in drafts_after(drafting(path), DEPTH + 4):
        assert drafts == reference.drafts(known, NUM_DRAFTS), len(known)


def test_a_row_that_is_opened_again_has_no_backlog(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    reference = load_reference(path)
    head = ReferenceHead(directory, reference.get_input_embeddings().weight)
    driver = Driver(build(path, **options(TORCH, "EAGLE3", directory), max_rows=3))
    executor = driver.built.executor
    left = driver.open(PROMPTS[2], 60)
    for number, (start, end) in enumerate([(0, 40), (40, 41), (41, 42)]):
        run(executor, BatchPlan(number, (BatchRow("left", left, start, end, True),), 0))
    driver.close(left)
    for known, drafts in drafts_after(driver, 2):
        assert drafts == head_drafts(reference, head, known), len(known)


@contextlib.contextmanager
def without_one_call() -> Iterator[None]:
    """Steps are computed part by part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeDecodePath, "computation", lambda self, plan: None)
        yield


@needs_kernels
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_steps_beside_a_drafter_are_computed_by_the_cpu_kernels_in_one_call(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred ones, those that draft, and the one that finds the backlog full."""
    path = make_tiny("qwen3", tmp_path / "target", num_hidden_layers=6)
    draft = make_eagle3(tmp_path / "draft", path) if algorithm == "EAGLE3" else path
    num_plain = DEPTH + 4
    with without_one_call():
        wanted = drafts_after(Driver(build(path, **options(NATIVE, algorithm, draft))), num_plain, num_proposals=1)
    for num_proposals in (0, 1):
        with monkeypatch.context() as patch:
            passes = Passes(patch)
            driver = Driver(build(path, **options(NATIVE, algorithm, draft)))
            assert drafts_after(driver, num_plain, num_proposals=num_proposals) == wanted
            assert passes.num_at_once == num_plain + 1


@needs_kernels
def test_steps_of_a_model_with_recurrent_layers_are_computed_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_with_mtp(
        "qwen3_5_text", tmp_path / "model", agrees=0.01, linear_key_head_dim=32, linear_value_head_dim=16
    )
    native = {"dtype": "bfloat16", "cpu_kernels": "native"}
    with without_one_call():
        wanted = drafts_after(drafting(path, NEXTN, **native), DEPTH + 4, num_proposals=1)
    for num_proposals in (0, 1):
        with monkeypatch.context() as patch:
            passes = Passes(patch)
            assert drafts_after(drafting(path, NEXTN, **native), DEPTH + 4, num_proposals=num_proposals) == wanted
            assert passes.num_at_once == DEPTH + 5


def test_prompt_tokens_are_never_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their draft KV is in the prefix cache, and on the way to decode servers, once they are computed."""
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    driver, passes = Driver(build(path, **options(TORCH, "EAGLE3", directory))), Passes(monkeypatch)
    row = driver.open(PROMPTS[0], 4)
    run(driver.built.executor, BatchPlan(0, (BatchRow("r", row, 0, 1, True),), 0))
    assert passes.num_drafting == 1
