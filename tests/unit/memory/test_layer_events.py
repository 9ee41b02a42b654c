"""Layer events: each callback comes once, as soon as its layers are written, in layer numbers of the whole model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, CudaLayerEvents, LayerEvents

NUM_LAYERS = 3
LIMIT_S = 60.0


class Heard:
    """What was reported, by number of layers, in order."""

    def __init__(self, events: LayerEvents) -> None:
        self._events = events
        self.answers: list[tuple[int, bool]] = []

    def wait_for(self, *num_layers: int) -> None:
        for number in num_layers:
            self._events.when_written(number, partial(self._hear, number))

    def _hear(self, num_layers: int, written: bool) -> None:
        self.answers.append((num_layers, written))


def test_a_layer_is_reported_when_it_is_written_and_at_once_later() -> None:
    events = CountedLayerEvents(range(NUM_LAYERS))
    heard = Heard(events)
    heard.wait_for(2, 1, 1)
    assert heard.answers == []
    events.on_layer(0)
    assert heard.answers == [(1, True)] * 2
    events.on_layer(1)
    heard.wait_for(1)
    assert heard.answers == [(1, True)] * 2 + [(2, True), (1, True)]


def test_several_layers_at_once_are_reported_in_order() -> None:
    events = CountedLayerEvents(range(NUM_LAYERS))
    heard = Heard(events)
    heard.wait_for(3, 2, 1)
    events.on_layer(2)
    assert heard.answers == [(1, True), (2, True), (3, True)]


def test_layers_that_a_failed_step_did_not_write_are_reported_as_such() -> None:
    events = CountedLayerEvents(range(NUM_LAYERS))
    heard = Heard(events)
    events.on_layer(0)
    heard.wait_for(2)
    events.end()
    heard.wait_for(1, 3)
    assert heard.answers == [(2, False), (1, True), (3, False)]


def test_the_end_of_a_step_that_wrote_all_layers_reports_nothing_again() -> None:
    events = CountedLayerEvents(range(NUM_LAYERS))
    heard = Heard(events)
    heard.wait_for(NUM_LAYERS)
    events.on_layer(NUM_LAYERS - 1)
    events.end()
    assert heard.answers == [(NUM_LAYERS, True)]


def test_a_stage_waits_for_its_own_layers_of_the_model() -> None:
    """Layers of later stages are ignored; for layers of earlier stages alone, its first one must be written."""
    events = CountedLayerEvents(range(4, 8))
    heard = Heard(events)
    heard.wait_for(2, 4, 5, 6, 8, 12)
    events.on_layer(0)
    assert [number for number, _ in heard.answers] == [2, 4, 5]
    events.on_layer(3)
    assert [number for number, _ in heard.answers] == [2, 4, 5, 6, 8, 12]


def test_of_resolved_steps_all_layers_are_written() -> None:
    heard = Heard(ALL_WRITTEN)
    heard.wait_for(0, 5)
    assert heard.answers == [(0, True), (5, True)]


def test_each_of_many_callbacks_comes_once_while_another_thread_computes() -> None:
    events = CountedLayerEvents(range(100))
    heard = Heard(events)
    computing = threading.Thread(target=lambda: [events.on_layer(layer) for layer in range(100)])
    computing.start()
    heard.wait_for(*range(1, 101))
    computing.join(LIMIT_S)
    assert sorted(heard.answers) == [(number, True) for number in range(1, 101)]


class FakeEvent:
    """A CUDA event whose work ends when `done` is set; it fails when `broken` is set."""

    made: list[FakeEvent] = []

    def __init__(self, blocking: bool) -> None:
        assert blocking, "a waiting thread must not take a core"
        self.recorded = self.broken = False
        self.done = threading.Event()
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "as CUDA has it, an event that was never recorded has happened"
        assert self.done.wait(LIMIT_S)
        if self.broken:
            raise RuntimeError("CUDA error")


def cuda_events(monkeypatch: pytest.MonkeyPatch, reporter: ThreadPoolExecutor) -> CudaLayerEvents:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", [])
    return CudaLayerEvents(range(NUM_LAYERS), reporter)


def test_on_a_stream_a_layer_is_written_when_its_event_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as reporter:
        events = cuda_events(monkeypatch, reporter)
        heard = [threading.Event() for _ in range(NUM_LAYERS)]
        for layer in range(NUM_LAYERS):
            events.on_layer(layer)
            events.when_written(layer + 1, lambda written, layer=layer: heard[layer].set() if written else None)  # type: ignore[misc]
        events.end()
        for layer, made in enumerate(FakeEvent.made):
            assert not any(later.is_set() for later in heard[layer:])
            made.done.set()
            assert heard[layer].wait(LIMIT_S)


def test_a_failed_kernel_ends_the_wait_for_its_layer_and_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as reporter:
        events = cuda_events(monkeypatch, reporter)
        heard = Heard(events)
        heard.wait_for(1, 2, 3)
        for layer in range(NUM_LAYERS):
            events.on_layer(layer)
        for made in FakeEvent.made:
            made.done.set()
        FakeEvent.made[1].broken = True
        events.end()
    assert heard.answers == [(1, True), (2, False), (3, False)]


def test_a_step_that_failed_on_its_way_to_the_device_reports_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as reporter:
        events = cuda_events(monkeypatch, reporter)
        heard = Heard(events)
        heard.wait_for(1, 2)
        events.on_layer(0)
        FakeEvent.made[0].done.set()
        events.end()
    assert heard.answers == [(1, True), (2, False)]
