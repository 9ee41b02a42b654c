"""Steps launched ahead, on the calling thread and on one of their own, are the steps computed one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.torch_sdpa import TorchStep
from tests.ahead import Request, build_ahead, generate_ahead, requests, sampled
from tests.driver import GREEDY, Driver, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, Family

PROMPT = random_prompt(37, VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("qwen3")


@contextlib.contextmanager
def opened(checkpoint: Path, *, overlap: bool, max_rows: int = 6) -> Iterator[LoadedEngine]:
    """An executor that is closed at the end."""
    built = build_ahead(checkpoint, overlap=overlap, max_rows=max_rows)
    try:
        yield built
    finally:
        built.executor.close()


def executor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "executor"]


@pytest.mark.parametrize("layer_events", [False, True])
@pytest.mark.parametrize("depth", rest_slow([2, 1, 3]))
@pytest.mark.parametrize("overlap", [False, True])
def test_results_do_not_depend_on_how_far_ahead_steps_are_launched(
    checkpoint: Path, overlap: bool, depth: int, layer_events: bool
) -> None:
    """Log-probabilities too, to the last bit; penalties see the tokens of steps that nobody has resolved yet."""
    with opened(checkpoint, overlap=False) as built:
        expected = generate_ahead(built, requests(), depth=1)
    with opened(checkpoint, overlap=overlap) as built:
        assert generate_ahead(built, requests(), depth=depth, layer_events=layer_events) == expected
    assert any(token.top for token in sampled(expected))
    assert len({token.token_id for token in sampled(expected)}) > 10


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_reused_while_a_step_is_unresolved(checkpoint: Path, overlap: bool) -> None:
    """One request of two rows ends and another takes its row, while the step behind it computes."""
    first, long, late = requests()[:3]
    wanted = [
        Request(first.prompt, 4, 0, first.sampling),
        Request(long.prompt, 20, 0, long.sampling, 1),
        Request(late.prompt, 5, 6, late.sampling),
    ]
    with opened(checkpoint, overlap=False, max_rows=3) as built:
        expected = generate_ahead(built, wanted, depth=1)
    with opened(checkpoint, overlap=overlap, max_rows=2) as built:
        assert generate_ahead(built, wanted, depth=2) == expected
        assert built.table.num_free == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_computed_from_what_the_scheduler_s_tables_said_at_its_launch(
    checkpoint: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page table is scribbled over and the row closed before the first layer is computed."""
    with opened(checkpoint, overlap=False) as built:
        expected = Driver(built).generate([PROMPT], 1)[0]
    gate, attend = threading.Event(), TorchStep.attend

    def gated(self: TorchStep, layer: int, heads: Heads) -> Tensor:
        assert gate.wait(60)
        return attend(self, layer, heads)

    monkeypatch.setattr(TorchStep, "attend", gated)
    with opened(checkpoint, overlap=overlap) as built:
        driver = Driver(built)
        row = driver.open(PROMPT, 60)
        handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)), layer_events=True)
        built.table.pages[row] = 0
        built.executor.close_row(row)
        gate.set()
        (token,) = built.executor.resolve(handle).tokens
        assert token is not None and [token.token_id] == expected


def test_only_overlap_has_a_thread_and_close_ends_it(checkpoint: Path) -> None:
    before = len(executor_threads())
    with opened(checkpoint, overlap=False):
        assert len(executor_threads()) == before
    with opened(checkpoint, overlap=True) as built:
        assert len(executor_threads()) == before + 1
        row = Driver(built).open(PROMPT, 60)
        handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)))
        built.executor.close()
        assert len(executor_threads()) == before
        assert len(built.executor.resolve(handle).tokens) == 1


def test_the_thread_computes_with_as_many_torch_threads_and_without_gradients(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, bool]] = []
    attend = TorchStep.attend

    def watched(self: TorchStep, layer: int, heads: Heads) -> Tensor:
        seen.append((threading.current_thread().name, torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return attend(self, layer, heads)

    monkeypatch.setattr(TorchStep, "attend", watched)
    with opened(checkpoint, overlap=True) as built:
        Driver(built).generate([PROMPT], 1)
    assert set(seen) == {("executor", torch.get_num_threads(), True)}


@pytest.mark.parametrize("layer_events", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_forward_raises_comes_out_of_resolve(
    checkpoint: Path, overlap: bool, layer_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it, launched before anybody knew, is still computed."""
    attend, failing = TorchStep.attend, [True]

    def broken(self: TorchStep, layer: int, heads: Heads) -> Tensor:
        if layer == 1 and failing:
            failing.clear()
            raise RuntimeError("kernel failed")
        return attend(self, layer, heads)

    with opened(checkpoint, overlap=overlap) as built:
        expected = Driver(built).generate([PROMPT], 1)[0]
        driver = Driver(built, seed=1)
        bad, good = driver.open(PROMPT[:9], 20), driver.open(PROMPT, 60)
        monkeypatch.setattr(TorchStep, "attend", broken)
        first = built.executor.launch(BatchPlan(0, (BatchRow("bad", bad, 0, 9, True),)), layer_events=layer_events)
        second = built.executor.launch(BatchPlan(1, (BatchRow("good", good, 0, len(PROMPT), True),)))
        with pytest.raises(RuntimeError, match="kernel failed"):
            built.executor.resolve(first)
        (token,) = built.executor.resolve(second).tokens
        assert token is not None and [token.token_id] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_resolved_in_the_order_of_their_launch(checkpoint: Path, overlap: bool) -> None:
    with opened(checkpoint, overlap=overlap) as built:
        row = Driver(built).open(PROMPT, 60, GREEDY)
        first = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, 9, False),)))
        second = built.executor.launch(BatchPlan(1, (BatchRow("a", row, 9, 20, False),)))
        with pytest.raises(AssertionError, match="order of their launch"):
            built.executor.resolve(second)
        assert built.executor.resolve(first).step == 0
        assert built.executor.resolve(second).step == 1
        assert run(built.executor, BatchPlan(2, ())).tokens == ()
