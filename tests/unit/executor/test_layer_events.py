"""Layer events of steps: they come while later layers compute, at once when the step fails, never too early."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.memory.layer_events import LayerEvents
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.torch_sdpa import TorchStep
from tests.ahead import build_ahead, written_within
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


def test_a_layer_is_reported_before_the_next_is_computed(built: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread opens the gate of each layer only when the one before is reported, and its KV is there."""
    gates = Gates(monkeypatch)
    row = Driver(built).open(PROMPT, 60)
    pages = built.table.pages[row, :2].tolist()
    handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)), layer_events=True)
    assert handle.layer_events is not None
    seen = []

    def work(events: LayerEvents) -> None:
        for layer in range(NUM_LAYERS):
            seen.append((written_within(events, layer + 1, 0.0), written(built, pages)))
            gates.events[layer].set()
            assert written_within(events, layer + 1, LIMIT_S)

    worker = threading.Thread(target=work, args=(handle.layer_events,))
    worker.start()
    (token,) = built.executor.resolve(handle).tokens
    worker.join(LIMIT_S)
    assert not worker.is_alive() and token is not None
    assert seen == [(False, [place < layer for place in range(NUM_LAYERS)]) for layer in range(NUM_LAYERS)]
    assert written(built, pages) == [True] * NUM_LAYERS


def test_a_failed_step_reports_the_layers_that_it_never_wrote(
    built: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before the failure are written."""
    attend = TorchStep.attend

    def broken(step: TorchStep, layer: int, heads: Heads) -> Tensor:
        if layer == 1:
            raise RuntimeError("kernel failed")
        return attend(step, layer, heads)

    monkeypatch.setattr(TorchStep, "attend", broken)
    row = Driver(built).open(PROMPT, 60)
    handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)), layer_events=True)
    events = handle.layer_events
    assert events is not None
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    events.when_written(NUM_LAYERS, answers.put)
    with pytest.raises(RuntimeError, match="kernel failed"):
        built.executor.resolve(handle)
    assert answers.get(timeout=LIMIT_S) is False
    events.when_written(1, answers.put)
    events.when_written(2, answers.put)
    assert [answers.get(timeout=LIMIT_S) for _ in range(2)] == [True, False]


def test_layer_events_are_made_where_they_are_requested(built: LoadedEngine) -> None:
    row = Driver(built).open(PROMPT, 60)
    plain = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, 9, False),)))
    assert plain.layer_events is None
    built.executor.resolve(plain)
    empty = built.executor.launch(BatchPlan(1, ()), layer_events=True)
    built.executor.resolve(empty)
    assert empty.layer_events is not None and written_within(empty.layer_events, NUM_LAYERS, LIMIT_S)
