"""Layer marks: how copy workers learn, while a step still computes, that its first layers' KV is written.

Made by `runners` for each step that asks for them; `on_layer` is called by whoever computes the step, `wait` by any
thread.
"""

from __future__ import annotations

import threading
import time

import torch

_POLL_S = 50e-6


class CountedLayerEvents:
    """Implements `LayerEvents` where the computing thread has written what it says it has: on CPU."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._ended = False

    def on_layer(self, layer: int) -> None:
        """Layers up to and with `layer` are written."""
        with self._changed:
            self._num_written = layer + 1
            self._changed.notify_all()

    def end(self) -> None:
        """The step is over, computed or failed: nobody shall wait for more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerEvents.wait`; False at once when the step failed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_written >= num_layers or self._ended, timeout_s)
            return self._num_written >= num_layers


class CudaLayerEvents:
    """Implements `LayerEvents` by an event behind each layer in the stream of a CUDA device.

    All events are recorded before `launch` returns, so that nobody meets one that is not.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def on_layer(self, layer: int) -> None:
        """What writes the KV up to and with `layer` is in the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._events.extend([event] * (layer + 1 - len(self._events)))

    def end(self) -> None:
        """The step is in the stream, or failed on the way."""

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerEvents.wait`. Polls, for CUDA has no wait with a deadline; False at once when the step failed."""
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
        except RuntimeError:  # the device reports the failure of a kernel to whoever asks; `resolve` raises it
            return False
        return True
