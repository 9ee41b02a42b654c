"""Layer marks: seen by other threads while later layers compute, on time when the step fails, never too early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import BatchPlan, BatchRow, LayerEvents
from pdserve.executor.layer_events import CountedLayerEvents, CudaLayerEvents
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.torch_sdpa import TorchStep
from tests.ahead import build_ahead
from tests.driver import Driver, random_prompt
from tests.tiny import VOCAB_SIZE, Family

PROMPT = random_prompt(37, VOCAB_SIZE)
NUM_LAYERS = 3
LIMIT_S = 60.0


class Gates:
    """One per layer: attention of a layer begins when its gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = [threading.Event() for _ in range(NUM_LAYERS)]
        attend = TorchStep.attend

        def gated(step: TorchStep, layer: int, heads: Heads) -> Tensor:
            assert self.events[layer].wait(LIMIT_S), f"the gate of layer {layer} stayed shut"
            return attend(step, layer, heads)

        monkeypatch.setattr(TorchStep, "attend", gated)


@pytest.fixture(params=[False, True], ids=["calling thread", "own thread"])
def built(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[LoadedEngine]:
    built = build_ahead(tiny_checkpoint("llama"), overlap=request.param)
    yield built
    built.executor.close()


def written(built: LoadedEngine, pages: list[int]) -> list[bool]:
    """Which layers of `pages` hold KV in all slots of the prompt's whole pages; the rest of the pool is NaN."""
    content = built.executor.pools[0].pages[pages]
    return [not bool(content[:, layer].isnan().any()) for layer in range(NUM_LAYERS)]


def test_a_mark_is_seen_before_the_next_layer_is_computed(built: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy worker opens the gate of each layer only when it has seen the mark, and the KV, of the one before."""
    gates = Gates(monkeypatch)
    row = Driver(built).open(PROMPT, 60)
    pages = built.table.pages[row, :2].tolist()
    handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)), layer_marks=True)
    assert handle.marks is not None
    seen = []

    def work(marks: LayerEvents) -> None:
        for layer in range(NUM_LAYERS):
            seen.append((marks.wait(layer + 1, 0.0), written(built, pages)))
            gates.events[layer].set()
            assert marks.wait(layer + 1, LIMIT_S)

    worker = threading.Thread(target=work, args=(handle.marks,))
    worker.start()
    (token,) = built.executor.resolve(handle).tokens
    worker.join(LIMIT_S)
    assert not worker.is_alive() and token is not None
    assert seen == [(False, [place < layer for place in range(NUM_LAYERS)]) for layer in range(NUM_LAYERS)]
    assert written(built, pages) == [True] * NUM_LAYERS


def test_marks_of_a_failed_step_let_everybody_go(built: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before the failure are written; who waits for more, whatever his time limit, hears of it."""
    attend = TorchStep.attend

    def broken(step: TorchStep, layer: int, heads: Heads) -> Tensor:
        if layer == 1:
            raise RuntimeError("kernel failed")
        return attend(step, layer, heads)

    monkeypatch.setattr(TorchStep, "attend", broken)
    row = Driver(built).open(PROMPT, 60)
    handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)), layer_marks=True)
    marks = handle.marks
    assert marks is not None
    answers: list[bool] = []
    worker = threading.Thread(target=lambda: answers.append(marks.wait(NUM_LAYERS, 1e6)), daemon=True)
    worker.start()
    with pytest.raises(RuntimeError, match="kernel failed"):
        built.executor.resolve(handle)
    worker.join(LIMIT_S)
    assert answers == [False]
    assert marks.wait(1, 0.0) and not marks.wait(2, 1e6)


def test_marks_are_made_where_they_are_asked_for(built: LoadedEngine) -> None:
    row = Driver(built).open(PROMPT, 60)
    plain = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, 9, False),)))
    assert plain.marks is None
    built.executor.resolve(plain)
    empty = built.executor.launch(BatchPlan(1, ()), layer_marks=True)
    built.executor.resolve(empty)
    assert empty.marks is not None and empty.marks.wait(NUM_LAYERS, 0.0)


def test_waiting_has_a_limit() -> None:
    marks = CountedLayerEvents()
    marks.on_layer(0)
    assert marks.wait(1, 0.0) and not marks.wait(2, 0.01)


class FakeEvent:
    """A CUDA event whose work ends when `done` is set."""

    made: list[FakeEvent] = []

    def __init__(self) -> None:
        self.recorded = self.done = self.broken = False
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error")
        return self.done or not self.recorded  # as CUDA has it: an event that was never recorded has happened


def test_marks_on_a_stream_wait_for_the_event_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", [])
    marks = CudaLayerEvents()
    for layer in range(NUM_LAYERS):
        marks.on_layer(layer)
    first, second, third = FakeEvent.made
    assert not marks.wait(1, 0.0)
    first.done = True
    assert marks.wait(1, 0.0) and not marks.wait(2, 0.01)
    timer = threading.Timer(0.01, lambda: setattr(second, "done", True))
    timer.start()
    assert marks.wait(2, LIMIT_S)
    third.broken = True
    assert not marks.wait(3, LIMIT_S)
    assert not marks.wait(NUM_LAYERS + 1, LIMIT_S), "a step that failed on the way to the device"
