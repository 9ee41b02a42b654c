"""Computes steps: on the calling thread, on a thread of their own, or in the stream of a CUDA device.

`NativeDecodePath` computes a small greedy decode step with one call of the native kernels.

Made by `LocalExecutor`, called by the scheduler thread. Every runner computes steps in the order of their launch, and
raises the exception of a step where the step is resolved. `own_layers` are this rank's layers, for layer events.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.executor.input_batch import SamplingMetadata
from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layer_events import CountedLayerEvents, CudaLayerEvents, LayerEvents
from pdserve.model.forward_batch import IntArray

OnLayer = Callable[[int], None]
Collect = Callable[[], StepResult]
"""Waits for the device and copies the result to the host."""
Compute = Callable[[OnLayer | None], Collect]
"""Computes a step, or puts it into the current stream."""


class StepRunner(Protocol):
    """Computes steps in order."""

    def begin(self, compute: Compute, layer_events: bool) -> tuple[LayerEvents | None, Collect]:
        """Begin a step; returns its layer events (None without `layer_events`) and the function that waits for its
        result.
        """
        ...

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """A context in which device work is ordered behind all steps that have begun."""
        ...

    def close(self) -> None:
        """Finish the steps that have begun, then end the runner's threads."""
        ...


class SyncRunner:
    """CPU without overlap: computes a step in `begin`, or with layer events when its result is awaited.

    So the scheduler submits copies of the first layers before they are computed. A later `begin` also computes the
    step.
    """

    def __init__(self, own_layers: range) -> None:
        self._own_layers = own_layers
        self._deferred: deque[Callable[[], None]] = deque()

    def begin(self, compute: Compute, layer_events: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        self._catch_up()
        if not layer_events:
            return None, _computed(compute)
        events = CountedLayerEvents(self._own_layers)
        outcome: Future[Collect] = Future()
        self._deferred.append(lambda: _compute_into(outcome, compute, events))

        def collect() -> StepResult:
            self._catch_up()
            return outcome.result()()

        return events, collect

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
    """CPU with overlap: one thread, named "executor", computes the steps; `close` ends it.

    The thread has as many torch threads as the thread that made the runner.
    """

    def __init__(self, own_layers: range) -> None:
        self._own_layers = own_layers
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._num_torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()

    def begin(self, compute: Compute, layer_events: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        assert self._open, "launched on a closed executor"
        events = CountedLayerEvents(self._own_layers) if layer_events else None
        outcome: Future[Collect] = Future()
        self._tasks.put(lambda: _compute_into(outcome, compute, events))
        return events, lambda: outcome.result()()

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """See `StepRunner.behind`. Waits until no step is being computed."""
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
    """CUDA: puts a step into a stream of its own, while the host goes on.

    The stream is not the default one: copies in the default stream would wait for every launched step. A thread,
    "layer-events", waits for the layers of steps with layer events; `close` ends it.
    """

    def __init__(self, device: torch.device, own_layers: range) -> None:
        self._device = device
        self._own_layers = own_layers
        self._reporter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layer-events")
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, compute: Compute, layer_events: bool) -> tuple[LayerEvents | None, Collect]:
        """See `StepRunner.begin`."""
        events = CudaLayerEvents(self._own_layers, self._reporter) if layer_events else None
        outcome: Future[Collect] = Future()
        with self.behind():
            _compute_into(outcome, compute, events)
        return events, lambda: outcome.result()()

    def behind(self) -> contextlib.AbstractContextManager[object]:
        """See `StepRunner.behind`. The work is also ordered behind the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        """See `StepRunner.close`."""
        self._stream.synchronize()
        self._reporter.shutdown()


def _computed(compute: Compute) -> Collect:
    """Compute now; an exception is raised where the step is resolved."""
    try:
        return compute(None)
    except BaseException as error:
        failure = error

    def fail() -> StepResult:
        raise failure

    return fail


def _compute_into(
    outcome: Future[Collect], compute: Compute, events: CountedLayerEvents | CudaLayerEvents | None
) -> None:
    """Compute, and store the result or exception for the resolve of the step."""
    try:
        outcome.set_result(compute(None if events is None else events.on_layer))
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        if events is not None:
            events.end()


Decode = Callable[[IntArray, npt.NDArray[np.int32], npt.NDArray[np.int32]], list[int]]
"""Signature of `NativeDecoder.decode`."""


class NativeDecodePath:
    """Computes greedy decode steps of at most `most_rows` rows.

    `tokens` int32 `[table rows, context]`: known tokens of each row, on the host.
    """

    def __init__(
        self, decode: Decode, most_rows: int, tokens: npt.NDArray[np.int32], table: PageTable, params: SamplingMetadata
    ) -> None:
        self._decode = decode
        self._most_rows = most_rows
        self._tokens = tokens
        self._pages = table.pages
        self._params = params

    def computation(self, plan: BatchPlan) -> Compute | None:
        """Return the computation of `plan`; None: the plan is no small greedy decode step.

        It must run at once, not later: it reads the page table.
        """
        rows = plan.rows
        if not 0 < len(rows) <= self._most_rows or self._params.prompt_logprob_params:
            return None
        for row in rows:
            if not row.sample or row.end - row.start != 1:
                return None
            assert row.end < self._tokens.shape[1], "the next token has its place"
        facts = np.array([[row.row for row in rows], [row.start for row in rows]])
        params = self._params.pick(facts[0], facts[1] + 1)
        if not params.all_greedy or (facts[1] < params.columns["num_prompt"]).any():
            return None
        return partial(self._compute, plan.step, facts)

    def _compute(self, step: int, facts: IntArray, on_layer: OnLayer | None) -> Collect:
        assert on_layer is None, "the fast path reports no layer events"
        tokens = self._decode(facts, self._tokens, self._pages)
        return lambda: StepResult(step, tuple(map(SampledToken, tokens)))
