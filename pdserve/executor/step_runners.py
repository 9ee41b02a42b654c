"""Where steps are computed: on the calling thread, on a thread of their own, or in the stream of a CUDA device.

Made by `LocalExecutor`, called by the scheduler thread. Whatever the way: steps are computed in order of launch, and an
exception comes out where the step is resolved.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from pdserve.executor.interface import LayerEvents, StepResult
from pdserve.executor.layer_events import CountedLayerEvents, CudaLayerEvents

OnLayer = Callable[[int], None]
Collect = Callable[[], StepResult]
"""Waits for the device and brings the result to the host."""
Compute = Callable[[OnLayer | None], Collect]
"""Computes a step, or puts it into the current stream."""


class StepRunner(Protocol):
    """One way to compute steps."""

    def begin(self, compute: Compute, layer_marks: bool) -> tuple[LayerEvents | None, Collect]:
        """Take a step up; its marks if asked for, and what waits for it."""
        ...

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """What is given to the device within comes behind all steps that have begun."""
        ...

    def close(self) -> None:
        """Compute what has begun, then end what the runner has started."""
        ...


class SyncRunner:
    """CPU, no overlap: a step is computed in `begin`; with layer marks when it is waited for.

    So its marks are in the hands of copy workers before the first layer is computed. A later step computes it as well.
    """

    def __init__(self) -> None:
        self._deferred: deque[Callable[[], None]] = deque()

    def begin(self, compute: Compute, layer_marks: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        self._catch_up()
        if not layer_marks:
            return None, _computed(compute)
        marks = CountedLayerEvents()
        outcome: Future[Collect] = Future()
        self._deferred.append(lambda: _settle(outcome, compute, marks))

        def collect() -> StepResult:
            self._catch_up()
            return outcome.result()()

        return marks, collect

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """See `StepRunner.behind`."""
        self._catch_up()
        return contextlib.nullcontext()

    def close(self) -> None:
        """See `StepRunner.close`."""
        self._catch_up()

    def _catch_up(self) -> None:
        while self._deferred:
            self._deferred.popleft()()


class ThreadedRunner:
    """CPU with overlap: one thread, named "executor", computes step after step; `close` must be called to end it.

    It has as many torch threads as the one that made it.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._num_torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()

    def begin(self, compute: Compute, layer_marks: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        assert self._open, "launched on a closed executor"
        marks = CountedLayerEvents() if layer_marks else None
        outcome: Future[Collect] = Future()
        self._tasks.put(lambda: _settle(outcome, compute, marks))
        return marks, lambda: outcome.result()()

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """See `StepRunner.behind`: waits until nothing is being computed."""
        idle = threading.Event()
        if self._open:
            self._tasks.put(idle.set)
            idle.wait()
        return contextlib.nullcontext()

    def close(self) -> None:
        """See `StepRunner.close`."""
        if self._open:
            self._open = False
            self._tasks.put(lambda: None)
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._num_torch_threads)  # OpenMP and MKL keep it per thread
        while self._open or not self._tasks.empty():
            self._tasks.get()()


class StreamRunner:
    """CUDA: a step is put into a stream of its own and computed there while the host goes on.

    The stream is not the default one, for what others copy there would wait for every step that has been launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, compute: Compute, layer_marks: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        marks = CudaLayerEvents() if layer_marks else None
        outcome: Future[Collect] = Future()
        with self.behind():
            _settle(outcome, compute, marks)
        return marks, lambda: outcome.result()()

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """See `StepRunner.behind`; behind what lies in the current stream, too."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        """See `StepRunner.close`."""
        self._stream.synchronize()


def _computed(compute: Compute) -> Collect:
    """Compute now; what goes wrong is raised where the step is resolved."""
    try:
        return compute(None)
    except BaseException as error:
        failure = error

    def fail() -> StepResult:
        raise failure

    return fail


def _settle(outcome: Future[Collect], compute: Compute, marks: CountedLayerEvents | CudaLayerEvents | None) -> None:
    """Compute; whatever comes of it is kept for whoever resolves the step."""
    try:
        outcome.set_result(compute(None if marks is None else marks.on_layer))
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        if marks is not None:
            marks.end()
