"""Runs one rank's part of a step: micro-batches through its pipeline stage, and one sampling for all ranks.

`LocalExecutor` calls `ModelRunner` for each step. All ranks of a replica compute the same plans in the same order. A
pipeline stage starts the next step before the previous step's tokens arrive. The two steps have different requests.

    stage 0   | step 1 | step 2 |           | step 3 | step 4 |      step 3 uses the tokens of step 1
    stage 1            | step 1, sampling | step 2, sampling | step 3 ...
                                  └─ tokens ──> every rank

A `StepRunner` computes the steps on the calling thread, on a thread of its own, or in the stream of a CUDA device. It
computes them in the order of their launch, and raises the exception of a step where the step is resolved.
`NativeDecodePath` computes a small greedy decode step with one call of the native kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.executor.grammar_rows import StepMasks
from pdserve.executor.graphs import DecodeGraphs
from pdserve.executor.input_batch import HostBatch, SamplingMetadata, StepParams, build_batch
from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.executor.prompt_logprobs import PromptLogprobComputer, PromptLogprobTensors
from pdserve.executor.sampler import Sampled, Sampler
from pdserve.executor.token_outputs import TokenOutputParams, TokenOutputs
from pdserve.executor.verify import StepDrafts, take_apart
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layer_events import CountedLayerEvents, CudaLayerEvents, LayerEvents
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.forward_batch import IntArray
from pdserve.model.interface import LayerTaps, Model
from pdserve.model.lora import Adapters
from pdserve.model.parallel import Arrival, is_sampler


class ModelRunner:
    """Computes one rank's part of the model. `taps`: see `Model.forward`."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler | None = None,
        *,
        taps: LayerTaps | None = None,
    ) -> None:
        self.taps = taps
        self.graphs: DecodeGraphs | None = None
        """Captured decode steps; None until they are captured."""
        self._argmax: Tensor | None = None
        self.has_put = False
        """True when the argmax tokens of the step just computed are already in the rows' tokens."""
        self._model = model
        self._attention = attention
        self._sample = sampler or Sampler()
        self._parallel = model.parallel
        self.is_sampler = is_sampler(self._parallel.coord)
        self._scores: list[PromptLogprobTensors] = []
        self._hidden: list[Tensor] = []

    def logits(
        self,
        batches: Sequence[HostBatch],
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        output_params: Sequence[TokenOutputParams],
    ) -> Tensor | None:
        """Compute a step's micro-batches. Returns logits `[S, vocab]` on the sampling rank, None elsewhere.

        `on_layer(i)` is called once all micro-batches have written the KV of this rank's layer i.
        `output_params`: for each micro-batch, what `token_outputs` returns of its tokens.
        """
        last = len(batches) - 1
        self._scores, self._hidden, self._argmax, self.has_put = [], [], None, False
        size = None
        is_plain = on_layer is None and not output_params[0].any and batches[0].embeds is None
        if self.graphs is not None and last == 0 and is_plain:
            size = self.graphs.size_for(batches[0])
        if self.graphs is not None and size is not None:
            decoded = self.graphs.run(batches[0], size)
            self._argmax = decoded.argmax
            self.has_put = True
            if self.taps is not None and decoded.tapped is not None:
                self.taps.replace(decoded.tapped)
            return decoded.logits
        is_last = self._parallel.coord.is_last_stage
        outputs = []
        for i, (host, params) in enumerate(zip(batches, output_params, strict=True)):
            output = self._run(host, tokens, on_layer if i == last else None, params)
            outputs.append(output.clone() if is_last and i < last else output)
        if last == 0:
            self._argmax = self._model.argmax
        if not self._parallel.coord.is_last_stage or not any(len(host.sampled) for host in batches):
            return None
        part = outputs[0] if last == 0 else torch.cat(outputs)
        return self._parallel.gather_logits(part.float(), self._model.spec.vocab_size)

    def begin(self, step: int, num_tokens: int) -> None:
        """Begin `step` on all ranks; this replica computes `num_tokens` tokens."""
        self._parallel.dp_attention_group.begin(step, num_tokens)

    def idle(self) -> None:
        """Take part in a step in which this replica has nothing to compute."""
        if self._parallel.dp_attention_group.spans_replicas:
            self._model.idle()

    def choose(self, logits: Tensor | None, params: StepParams, tokens: Tensor, masks: StepMasks | None) -> Sampled:
        """Sample on the sampling rank; on other ranks return tensors that `share` fills.

        `tokens`: see `sample`. `masks`: None where no row has a grammar.
        """
        if not self.is_sampler:
            return Sampled.blank(params, self._model.spec.vocab_size, tokens.device)
        assert logits is not None, "the sampling rank has the logits"
        if self._argmax is not None and params.all_greedy:
            return Sampled(self._argmax, None, None, None)
        logits = logits.float()
        if masks is None:
            return self._sample(logits, params, tokens)
        failed, params = masks.apply(logits), params.without_grammar_bans()
        return self._sample(logits, params, tokens, failed)

    def token_outputs(self, output_params: Sequence[TokenOutputParams], device: torch.device) -> TokenOutputs | None:
        """Return what the micro-batches just computed return of their tokens; None when nothing is requested.

        On stages before the last one, `share` fills the tensors.
        """
        if not any(params.any for params in output_params):
            return None
        if not self._parallel.coord.is_last_stage:
            return TokenOutputs.blank(output_params, self._model.spec.hidden_size, device)
        outputs = TokenOutputs.joined(self._scores, self._hidden, output_params)
        self._scores, self._hidden = [], []
        return outputs

    def share(self, chosen: Sampled | None, outputs: TokenOutputs | None) -> Arrival:
        """Begin to send the sampling rank's results of a step to every rank."""
        tensors = [] if chosen is None else chosen.tensors()
        if outputs is not None and self._parallel.coord.shape.pp_size > 1:
            tensors += [tensor for tensor in outputs.tensors() if tensor.numel()]
        return self._parallel.share_tokens(tensors)

    def _run(
        self,
        host: HostBatch,
        tokens: Tensor,
        on_layer: Callable[[int], None] | None,
        params: TokenOutputParams,
    ) -> Tensor:
        """Compute one micro-batch, and send its output to the next stage where there is one."""
        model, parallel = self._model, self._parallel
        batch = build_batch(host, tokens)
        hidden = None
        if not parallel.coord.is_first_stage:
            shape = (len(batch.positions), model.spec.hidden_size)
            hidden = parallel.receive(shape, model.dtype, tokens.device)
        on_hidden = None
        if params.any and parallel.coord.is_last_stage:
            scorer = None if params.logprobs is None else PromptLogprobComputer(model, params.logprobs, tokens)

            def on_hidden(x: Tensor) -> None:
                if params.hidden is not None:
                    self._hidden.append(params.hidden.compute(model, x))
                if scorer is not None:
                    self._scores.append(scorer(x))

        output = model.forward(batch, self._attention.begin(batch), on_layer, hidden, on_hidden, self.taps)
        if not parallel.coord.is_last_stage:
            parallel.send(output)
        return output


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


Table = npt.NDArray[np.int32]
Decode = Callable[[IntArray, Table, Table, Table | None, Table, IntArray | None, Adapters | None], list[int]]
"""Signature of `NativeDecoder.decode`."""
AdaptersOf = Callable[[Iterable[int]], Adapters | None]
"""Returns the LoRA adapter of each of some table rows; None when no row has one."""


@dataclasses.dataclass(frozen=True)
class NativeDecode:
    """Decode steps of a `NativeDecoder` in one call: its `decode`, `max_native_rows` and `tapped`."""

    decode: Decode
    max_rows: int
    tapped: Callable[[int], Tensor]


class NativeDecodePath:
    """Computes greedy decode steps of at most `native.max_rows` tokens, rows with drafts included.

    `tokens` int32 `[table rows, context]`: known tokens of each row, on the host. `has_state`: the model has recurrent
    layers, whose rows with drafts it cannot compute. `adapters_of` None: no row has a LoRA adapter.
    """

    def __init__(
        self,
        native: NativeDecode,
        tokens: npt.NDArray[np.int32],
        table: PageTable,
        params: SamplingMetadata,
        *,
        has_state: bool = False,
        adapters_of: AdaptersOf | None = None,
    ) -> None:
        self._adapters_of = adapters_of
        self._decode, self._most_rows = native.decode, native.max_rows
        self.tapped = native.tapped
        """Returns the tapped layers' outputs of the step just computed, by its number of rows."""
        self._tokens = tokens
        self._table = table
        self._window = table.window if table.window.shape[1] else None
        self._params = params
        self._has_state = has_state

    def computation(self, plan: BatchPlan) -> Compute | None:
        """Return the computation of `plan`; None: the plan is no small greedy decode step.

        It must run at once, not later: it reads the page table.
        """
        rows = plan.rows
        if not 0 < len(rows) <= self._most_rows or self._params.prompt_logprob_params:
            return None
        has_drafts = False
        for row in rows:
            if not row.sample or row.end - row.start != 1:
                if not row.drafts:
                    return None
                has_drafts = True
            assert row.end < self._tokens.shape[1], "the next token has its place"
        if has_drafts:
            return self._verification(plan)
        facts = np.array([[row.row for row in rows], [row.start for row in rows]])
        if not self._is_greedy(facts):
            return None
        return partial(self._compute, plan.step, facts)

    def _is_greedy(self, facts: IntArray) -> bool:
        """Whether tokens at the table rows and positions `facts` are decoded greedily, without results besides."""
        params = self._params.pick(facts[0], facts[1] + 1)
        return params.all_greedy and not (facts[1] < params.columns["num_prompt"]).any()

    def _verification(self, plan: BatchPlan) -> Compute | None:
        """Return the computation of a step with drafts. Each token is a row of its own.

        The kernels write the KV of all tokens of a layer before they read it.
        """
        drafts = StepDrafts.of(plan)
        if drafts is None or self._has_state or len(drafts.positions) + len(plan.rows) > self._most_rows:
            return None
        pairs = [(row.row, at) for row in plan.rows for at in range(row.start, row.end)]
        facts = np.array(pairs).T.copy()
        return partial(self._verify, plan, facts, drafts) if self._is_greedy(facts) else None

    def _compute(self, step: int, facts: IntArray, on_layer: OnLayer | None) -> Collect:
        assert on_layer is None, "the fast path reports no layer events"
        tokens = self._decoded(facts)
        return lambda: StepResult(step, tuple(map(SampledToken, tokens)))

    def _decoded(self, facts: IntArray) -> list[int]:
        """Compute the tokens behind table rows and positions `facts`."""
        adapters = None if self._adapters_of is None else self._adapters_of(facts[0].tolist())
        table = self._table
        return self._decode(facts, self._tokens, table.pages, self._window, table.slots, None, adapters)

    def _verify(self, plan: BatchPlan, facts: IntArray, drafts: StepDrafts, on_layer: OnLayer | None) -> Collect:
        assert on_layer is None, "the fast path reports no layer events"
        self._tokens[drafts.table_rows, drafts.positions] = drafts.token_ids
        tokens = self._decoded(facts)

        def collect() -> StepResult:
            found = take_apart(plan, list(map(SampledToken, tokens)), None)
            return StepResult(plan.step, found.tokens, more=found.more)

        return collect


def choose_runner(device: torch.device, overlap: bool, own_layers: range) -> StepRunner:
    """Return the runner of steps on `device`."""
    if device.type == "cuda":
        return StreamRunner(device, own_layers)
    return ThreadedRunner(own_layers) if overlap else SyncRunner(own_layers)
