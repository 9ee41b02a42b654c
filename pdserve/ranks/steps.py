"""Which steps a follower has computed, and the gates of its copy jobs. Pure waiting; no thread of its own.

`begun` and `done` are called by the computing thread, `gate` by the link thread, and gates by copy workers.
"""

from __future__ import annotations

import dataclasses
import threading
import time

from pdserve.executor.interface import LayerMarks
from pdserve.transfer.events import Ready


class StepLog:
    """Steps come in ascending order. `layers` are those of the model that this rank has."""

    def __init__(self, layers: range) -> None:
        self._layers = layers
        self._changed = threading.Condition()
        self._done = -1
        self._marks: dict[int, LayerMarks] = {}
        self._gates: dict[tuple[int, int | None], Ready] = {}

    def begun(self, step: int, marks: LayerMarks | None) -> None:
        """`step` is being computed; `marks` count this rank's own layers."""
        if marks is not None:
            with self._changed:
                self._marks[step] = marks
                self._changed.notify_all()

    def done(self, step: int) -> None:
        """`step` and all before it are computed."""
        with self._changed:
            assert step > self._done, (step, self._done)
            self._done = step
            self._marks.pop(step, None)
            self._gates = {key: gate for key, gate in self._gates.items() if key[0] > step}
            self._changed.notify_all()

    def gate(self, step: int | None, num_layers: int | None) -> Ready | None:
        """The gate of the first `num_layers` layers of the model in `step`; None when it is open.

        `num_layers` None: all of the step. Layers of earlier stages only: the first own one, before which no earlier
        step is at work here.
        """
        own = None if num_layers is None else min(max(num_layers - self._layers.start, 1), len(self._layers))
        with self._changed:
            if step is None or step <= self._done:
                return None
            return self._gates.setdefault((step, own), _Gate(self, step, own))

    def wait(self, step: int, num_own: int | None, timeout_s: float) -> bool:
        """Whether the first `num_own` layers of this rank, or all, are written in `step`, soon enough."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: step <= self._done or (num_own is not None and step in self._marks), timeout_s
            )
            if step <= self._done:
                return True
            marks = None if num_own is None else self._marks.get(step)
        return marks is not None and num_own is not None and marks.wait(num_own, max(0.0, deadline - time.monotonic()))


@dataclasses.dataclass(frozen=True, eq=False)
class _Gate:
    """Implements `Ready`. All jobs for the same layers share one, so that it is asked once for all of them."""

    log: StepLog
    step: int
    num_own: int | None

    def __call__(self, timeout_s: float, /) -> bool:
        """See `Ready`."""
        return self.log.wait(self.step, self.num_own, timeout_s)
