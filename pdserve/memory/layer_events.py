"""Layer events: report, while a step still computes, which layers' KV is written.

    executor        launch ── on_layer(0) ── on_layer(1) ── ... ── end
                                 │
    copy workers    when_written(1, then) ──> then(True): the copies of layer 0 may begin

`Executor.launch` makes them for a step where the scheduler requests it. Layer-wise sends wait for them: a copy job is
queued on its thread only when its layers are written. So no thread blocks on a layer, or polls.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Then = Callable[[bool], None]
"""Receives True when the layers are written, False when the step has failed before. Neither blocks nor raises."""


class LayerEvents(Protocol):
    """Reports when the KV of the first layers of a step is in this rank's pool."""

    def when_written(self, num_layers: int, then: Then) -> None:
        """Call `then(True)` once layers `[0, num_layers)` of the model are written, `then(False)` if the step fails
        before.

        Any thread. `then` is called once: at once where the answer is known, else by the thread that reports the layer.
        """
        ...


class AllLayersWritten:
    """Implements `LayerEvents` for KV of steps that are resolved."""

    def when_written(self, num_layers: int, then: Then) -> None:
        """See `LayerEvents.when_written`."""
        then(True)


ALL_WRITTEN: LayerEvents = AllLayersWritten()


class CountedLayerEvents:
    """Implements `LayerEvents` on CPU, where a layer's KV is written once the computing thread reports it.

    `own` are the layers of this rank's pipeline stage. Layers of later stages are ignored. For layers of earlier stages
    alone, this rank's first layer must be written: then no earlier step runs here.
    """

    def __init__(self, own: range) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._num_written = 0
        self._ended = False
        self._waiting: dict[int, list[Then]] = {}
        """By the number of own layers that must be written."""

    def on_layer(self, layer: int) -> None:
        """Report that the KV of this rank's layers up to and including its layer `layer` is written. One thread."""
        with self._lock:
            written = range(self._num_written + 1, layer + 2)
            reached = [then for num_layers in written for then in self._waiting.pop(num_layers, ())]
            self._num_written = layer + 1
        for then in reached:
            then(True)

    def end(self) -> None:
        """Report the end of the step, computed or failed. The same thread as `on_layer`."""
        with self._lock:
            self._ended = True
            never = [then for waiting in self._waiting.values() for then in waiting]
            self._waiting.clear()
        for then in never:
            then(False)

    def when_written(self, num_layers: int, then: Then) -> None:
        """See `LayerEvents.when_written`."""
        num_own = min(max(num_layers - self._own.start, 1), len(self._own))
        with self._lock:
            written = self._num_written >= num_own
            if not written and not self._ended:
                self._waiting.setdefault(num_own, []).append(then)
                return
        then(written)


class CudaLayerEvents:
    """Implements `LayerEvents` with a CUDA event behind each layer's kernels in the current stream.

    `own` as for `CountedLayerEvents`. A thread of `reporter` waits for the events in their order, without the GIL and
    asleep: CUDA has no wait with a timeout, and its callbacks may not call into CUDA.
    """

    def __init__(self, own: range, reporter: concurrent.futures.Executor) -> None:
        self._counted = CountedLayerEvents(own)
        self._reporter = reporter
        self._recorded: list[tuple[int, torch.cuda.Event]] = []

    def on_layer(self, layer: int) -> None:
        """Record an event behind the kernels that write the KV of this rank's layers up to and including `layer`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._recorded.append((layer, event))

    def end(self) -> None:
        """Report the layers as the device writes them: the step is in the stream, or has failed before."""
        self._reporter.submit(self._report)

    def when_written(self, num_layers: int, then: Then) -> None:
        """See `LayerEvents.when_written`."""
        self._counted.when_written(num_layers, then)

    def _report(self) -> None:
        try:
            for layer, event in self._recorded:
                event.synchronize()
                self._counted.on_layer(layer)
        except RuntimeError:  # a kernel failed, which `resolve` raises
            pass
        finally:
            self._counted.end()
