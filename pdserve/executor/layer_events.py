"""Layer events: tell copy workers, while a step still computes, which layers' KV is written.

`step_runners` makes them for each step that requests them. The thread that computes the step calls `on_layer`; any
thread calls `wait`.
"""

from __future__ import annotations

import threading
import time

import torch

_POLL_S = 50e-6


class CountedLayerEvents:
    """Implements `LayerEvents` on CPU, where a layer's KV is written once the computing thread reports it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._ended = False

    def on_layer(self, layer: int) -> None:
        """Report that the KV of layers up to and including `layer` is written."""
        with self._changed:
            self._num_written = layer + 1
            self._changed.notify_all()

    def end(self) -> None:
        """Report the end of the step, computed or failed: wakes all waiting threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerEvents.wait`. Returns False at once when the step has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_written >= num_layers or self._ended, timeout_s)
            return self._num_written >= num_layers


class CudaLayerEvents:
    """Implements `LayerEvents` with an event behind each layer in the stream of a CUDA device.

    All events are recorded before `launch` returns, so `wait` meets no unrecorded event.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def on_layer(self, layer: int) -> None:
        """Record an event behind the kernels that write the KV of layers up to and including `layer`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.extend([event] * (layer + 1 - len(self._events)))

    def end(self) -> None:
        """Do nothing: the step is in the stream, or has failed before."""

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerEvents.wait`. Polls, because CUDA has no wait with a timeout. Returns False at once when the step
        has failed.
        """
        if num_layers <= 0:
            return True
        if num_layers > len(self._events):
            return False
        deadline, event = time.monotonic() + timeout_s, self._events[num_layers - 1]
        try:
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:  # `query` reports a failed kernel, which `resolve` raises
            return False
        return True
