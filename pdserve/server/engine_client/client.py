"""The API process's view of its scheduler: streams of outputs by request id.

Owned by the application, used on its event loop only. It is the only reader and writer of the API end of the channel.

    submit ──> GenerateRequest per sequence          OutputBatch ──> detokenize ──> Generation of that sequence
    a stop string in the text ──> AbortRequest(reason="stop"), the sequence ends as finished
    a Generation that is closed early ──> AbortRequest for each unfinished sequence
    the channel or the process is gone ──> every Generation fails with EngineDeadError
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from pdserve.errors import EngineDeadError, PdserveError, ProtocolError, RequestError
from pdserve.observe.metrics import RequestMetrics
from pdserve.observe.record import RequestListener
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import (
    AbortRequest,
    Command,
    CommandReply,
    EngineCoreOutput,
    EngineReady,
    EngineState,
    GenerateRequest,
    OutputBatch,
    SchedulerBeat,
    StateReply,
    ToApi,
    ToScheduler,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client.engine_queries import EngineQueries, Watchdogs
from pdserve.server.engine_client.new_prefill import NewPrefill
from pdserve.server.engine_client.request_states import RequestState, RequestStates
from pdserve.server.engine_client.request_stats import RequestStatsRecorder
from pdserve.server.engine_client.startup_line import log_startup
from pdserve.server.engine_client.waiting import WaitingRequests
from pdserve.server.generation import Generation
from pdserve.server.http.request_context import current_call
from pdserve.server.text.detokenizer import Detokenizer, NoText, detokenize_output, refusal
from pdserve.server.text.stop_regex import SLOW_LOOKS, PatternThread
from pdserve.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineClient:
    """See the file's docstring. `start` it inside the event loop, `stop` it at the end."""

    def __init__(
        self,
        channel: ApiChannel,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        *,
        match_stops: bool = True,
        new_prefill: NewPrefill | None = None,
        waiting: WaitingRequests | None = None,
    ) -> None:
        """`match_stops` False leaves stop strings alone: a prefill server's first token is decode's to judge.
        `new_prefill` None: requests may name any number of new bootstrap addresses. `waiting` None: no bound of what
        waits.
        """
        self._channel = channel
        self._new_prefill = new_prefill
        self._waiting = waiting
        self._tokenizer = tokenizer
        self._match_stops = match_stops
        self._pattern_thread = PatternThread()
        self._watch = RequestStatsRecorder(metrics)
        self._live = RequestStates()
        self._queries = EngineQueries(channel)
        self.pulses = Watchdogs()
        self._ready: EngineReady | None = None
        self._became_ready = asyncio.Event()
        self._dead: EngineDeadError | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read the channel."""
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def stop(self, reason: str = "the server is shutting down") -> None:
        """Stop reading; every stream fails. The channel stays open and belongs to the caller."""
        self._stopping = self._stopping or self._dead is None
        self.fail(EngineDeadError(reason))
        tasks = [*self._tasks, *([self._reader] if self._reader is not None else [])]
        if self._reader is not None:
            self._reader.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail(self, error: EngineDeadError) -> None:
        """The engine is gone: every stream and query ends with `error`, and nothing more is taken."""
        if self._dead is not None:
            return
        self._dead = error
        self._became_ready.set()
        for rid in self._live.called(None):
            self._drop(rid, "abort").generation.fail(error)
        self._queries.fail(error)

    @property
    def alive(self) -> bool:
        """False once the engine is known to be gone."""
        return self._dead is None

    @property
    def engine_lost(self) -> bool:
        """True when the engine went away by itself, not because this client was stopped."""
        return self._dead is not None and not self._stopping

    @property
    def ready(self) -> EngineReady | None:
        """What the scheduler announced, once it can take requests and as long as it is there."""
        return self._ready if self._dead is None else None

    def tell(self, listener: RequestListener) -> None:
        """`listener` hears of every sequence from now on."""
        self._watch.listeners.append(listener)

    @property
    def num_live(self) -> int:
        """Sequences in progress."""
        return len(self._live)

    async def wait_ready(self, timeout_s: float | None = None) -> EngineReady:
        """Wait until the scheduler can take requests.

        Raises:
            EngineDeadError: the engine is gone.
            TimeoutError: it was not ready in time.
        """
        await asyncio.wait_for(self._became_ready.wait(), timeout_s)
        return self.require_ready()

    def require_ready(self) -> EngineReady:
        """What the scheduler announced.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: 503 while it is starting.
        """
        if self._dead is not None:
            raise self._dead
        if self._ready is None:
            raise RequestError("the engine is starting", status=503, code="engine_starting", retry_after_s=1)
        return self._ready

    # requests --------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        requests: Sequence[GenerateRequest],
        names: Sequence[str],
        batch: str | None = None,
        client: str | None = None,
    ) -> Generation:
        """Send the sequences of one body; `names[i]` is the id the client knows sequence i by, `batch` the one it knows
        all by; `rid`s are unique. `client` None: the client of the current call.

        Raises:
            RequestError: 400 when a name belongs to a live request, 503 while the engine is starting, when too much
                waits already, or when the client names too many bootstrap addresses that have never served.
            EngineDeadError: the engine is gone.
        """
        call = current_call()
        if client is None:
            client = "" if call is None else call.client
        detokenizers = await self._detokenizers([request.sampling for request in requests], client)
        prior_text = {
            index: await detokenizers[index].replay(request.prior_output_ids)
            for index, request in enumerate(requests)
            if request.prior_output_ids
        }
        ready = self.require_ready()
        if self._waiting is not None:
            self._waiting.check(requests, min(ready.context_length, ready.max_total_tokens))
        also = () if batch is None else (batch,)
        taken = self._live.taken((*names, *also))
        if taken is not None:
            raise RequestError(f"rid {taken!r} belongs to a request that is still running", field="rid")
        generation = Generation(len(requests), self._close)
        generation.prior_text.update(prior_text)
        new = [None] * len(requests) if self._new_prefill is None else self._new_prefill.take(client, requests)
        for index, (request, name, detokenizer) in enumerate(zip(requests, names, detokenizers, strict=True)):
            progress = self._watch.started(request, name, call)
            sequence = RequestState(
                index, (name, *also), generation, request.sampling, detokenizer, progress, new_address=new[index]
            )
            self._live.add(request.rid, sequence)
        try:
            for request in map(self._watch.traced(call), requests):
                await self._send(request)
        except BaseException:
            generation.close()
            raise
        return generation

    async def _send(self, request: GenerateRequest) -> None:
        if self._waiting is None:
            await self._channel.send(request)
            return
        self._waiting.add(request)
        try:
            await self._channel.send(request)
        except BaseException:
            self._waiting.heard(request.rid)  # the scheduler will say nothing of it
            raise

    def abort(self, name: str | None) -> int:
        """Abort the sequences the client knows as `name`, their own or that of their batch, all for None; how many.

        Their streams end as aborted.
        """
        rids = self._live.called(name)
        for rid in rids:
            self._send_soon(AbortRequest(rid=rid))
        return len(rids)

    def cut(self, error: PdserveError) -> None:
        """End every sequence with `error`, here and at the scheduler."""
        for rid in self._live.called(None):
            self._drop(rid, "abort").generation.fail(error)
            self._send_soon(AbortRequest(rid=rid))

    async def _detokenizers(self, samplings: Sequence[CoreSamplingParams], client: str) -> list[Detokenizer]:
        """One for each sequence. Stop patterns are compiled in a thread."""
        if self._match_stops and (patterns := {text for sampling in samplings for text in sampling.stop_regex}):
            await self._pattern_thread.compile(patterns, client)
        return [self._detokenizer(sampling) for sampling in samplings]

    def _detokenizer(self, sampling: CoreSamplingParams) -> Detokenizer:
        if not self._match_stops:
            sampling = msgspec.structs.replace(sampling, stop=(), stop_regex=())
        if self._tokenizer is None:
            return Detokenizer(NoText(), sampling)
        return Detokenizer(self._tokenizer.text_decoder(skip_special=sampling.skip_special_tokens), sampling)

    def _close(self, generation: Generation) -> None:
        for rid in self._live.of(generation):
            self._drop(rid, "abort")
            self._send_soon(AbortRequest(rid=rid))

    def _drop(self, rid: str, outcome: str) -> RequestState:
        sequence = self._live.pop(rid)
        if self._new_prefill is not None and sequence.new_address is not None:
            self._new_prefill.release(sequence.new_address)
        self._watch.ended(sequence.progress, outcome, sequence.timing)
        return sequence

    # queries ---------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Nothing is computed until it is told to go on."""
        return self._queries.paused

    @property
    def last_state(self) -> EngineState | None:
        """The newest state seen."""
        return self._queries.last_state

    @property
    def state_age_s(self) -> float | None:
        """How old the newest state is."""
        at = self._queries.last_state_at
        return None if at is None else time.monotonic() - at

    async def state(self, timeout_s: float, *, audit: bool = False) -> EngineState | None:
        """The scheduler's state now; the last one seen when it does not answer in time (a long step), or is gone."""
        if self.ready is None:
            return self.last_state
        return await self._queries.state(timeout_s, audit=audit)

    async def command(self, make: Callable[[str], Command], timeout_s: float) -> CommandReply:
        """Have the scheduler obey what `make` makes of a query id.

        Raises:
            RequestError: 503 when it does not answer in time.
            EngineDeadError: the engine is gone.
        """
        self.require_ready()
        return await self._queries.command(make, timeout_s)

    # messages --------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while self._dead is None:
            try:
                await self._handle(await self._channel.recv())
            except ProtocolError as error:
                log.error("a message of the scheduler was dropped: %s", error)
            except EngineDeadError as error:
                self.fail(error)

    async def _handle(self, message: ToApi) -> None:
        match message:
            case OutputBatch():
                for output in message.outputs:
                    self._on_output(output)
                    if SLOW_LOOKS.must_yield:
                        await SLOW_LOOKS.yield_to_loop()
            case StateReply() | CommandReply():
                self._queries.on_reply(message)
            case SchedulerBeat():
                self.pulses.heard(message)
            case EngineReady():
                self._ready = message
                self.pulses.begin()
                self._became_ready.set()
                log_startup(message)

    def _on_output(self, output: EngineCoreOutput) -> None:
        if self._waiting is not None:
            self._waiting.heard(output.rid)
        sequence = self._live.get(output.rid)
        if sequence is None:
            return  # it was aborted or stopped here, and this was under way
        if self._new_prefill is not None and sequence.new_address is not None:
            self._new_prefill.heard(sequence.new_address, output)
        finish = output.finish
        refused = refusal(finish)
        if refused is not None:
            sequence.progress.refused = refused
            self._drop(output.rid, "abort")
            sequence.generation.fail(refused)
            return
        try:
            update = detokenize_output(
                sequence.index, sequence.detokenizer, output, keep_stop=sequence.sampling.no_stop_trim
            )
        except RequestError as error:  # its stop patterns take too long
            sequence.progress.refused = error
            self._drop(output.rid, "abort").generation.fail(error)
            if finish is None:
                self._send_soon(AbortRequest(rid=output.rid))
            return
        sequence.timing = update.timing = output.timing or sequence.timing
        self._watch.tokens(sequence.progress, output, update)
        if update.finish is not None:
            self._drop(output.rid, update.finish.type)
            if finish is None:
                self._send_soon(AbortRequest(rid=output.rid, reason="stop"))
        sequence.generation.put(update)

    def _send_soon(self, message: ToScheduler) -> None:
        if self._dead is None:
            self._spawn(self._send_quietly(message))

    async def _send_quietly(self, message: ToScheduler) -> None:
        try:
            await self._channel.send(message)
        except EngineDeadError as error:
            self.fail(error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
