"""The API process's client of its scheduler: submits requests and routes their outputs by request id.

Owned by the application, used on its event loop only. It alone reads the API end of the channel. `engine_queries` and
`server/lifecycle/instance.py` (`Shutdown`) write to the channel as well.

    submit ──> GenerateRequest per sequence          OutputBatch ──> detokenize ──> Generation of that sequence
    a stop string in the text ──> AbortRequest(reason="stop"), the sequence ends as finished
    a Generation that is closed early ──> AbortRequest for each unfinished sequence
    the channel has closed or the process has exited ──> every Generation fails with EngineDeadError
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from pdserve.errors import EngineDeadError, PdserveError, ProtocolError, RequestError
from pdserve.observe.metrics import RequestListener, RequestMetrics
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.engine_state import EngineReady, EngineState, SchedulerHeartbeat
from pdserve.protocol.failure import ABORTED_STATUS, CLIENT_ABORT, MIGRATED, MIXED_WEIGHTS, Failure
from pdserve.protocol.messages import (
    AbortRequest,
    Command,
    CommandReply,
    EngineCoreOutput,
    ExtractReply,
    GenerateRequest,
    KVPart,
    OutputBatch,
    StateReply,
    SwitchRole,
    ToApi,
    ToScheduler,
)
from pdserve.server.engine_client.engine_queries import (
    EngineQueries,
    Extracted,
    SchedulerWatchdog,
    log_startup,
    weights_of,
)
from pdserve.server.engine_client.live_requests import (
    Detokenizers,
    NewPrefill,
    RequestState,
    RequestStates,
    RequestStatsRecorder,
    WaitingRequests,
)
from pdserve.server.engine_client.migration import IncomingRequest, IncomingRequests, MovedRequests
from pdserve.server.generation import ATTACH_FIELD, Generation
from pdserve.server.http.middleware import current_call
from pdserve.server.text.detokenizer import detokenize_output
from pdserve.server.text.stop_regex import SLOW_LOOKS
from pdserve.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EngineClient:
    """`EngineClient` submits requests and routes their outputs by rid.

    Call `start` inside the event loop and `stop` at shutdown.
    """

    def __init__(
        self,
        channel: ApiChannel,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        *,
        match_stops: bool = True,
        new_prefill: NewPrefill | None = None,
        waiting: WaitingRequests | None = None,
        former: EngineClient | None = None,
    ) -> None:
        """Create a client of `channel`, which the caller owns.

        `tokenizer` None: outputs have no text. `match_stops` False: stop strings are not matched, as on a prefill
        server, whose first token the decode server matches. `new_prefill` None: requests may name any number of new
        bootstrap addresses. `waiting` None: the number of waiting requests is not bounded. `former`: the client of the
        channel before this one, whose engine is ready; None: the engine starts.

        Raises:
            EngineDeadError: the engine of `former` is dead.
        """
        self._channel = channel
        self._new_prefill = new_prefill
        self._waiting = waiting
        self._detokenizers = Detokenizers(tokenizer, match_stops=match_stops)
        self._stats = RequestStatsRecorder(metrics)
        self._live = RequestStates()
        self.incoming = IncomingRequests(lambda rid: self._send_soon(AbortRequest(rid=rid)))
        self.moved = MovedRequests(self._on_output)
        self._ended = asyncio.Event()
        self._queries = EngineQueries(channel)
        self.watchdog = SchedulerWatchdog()
        self._ready = None if former is None else former.require_ready()
        self.weights = None if self._ready is None else weights_of(self._ready)
        self._became_ready = asyncio.Event()
        if former is not None:
            self._queries.paused = former.paused
            self.watchdog.begin()
            self._became_ready.set()
        self._dead: EngineDeadError | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that reads the channel."""
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read())

    async def stop(self, reason: str = "the server is shutting down") -> None:
        """Stop reading and fail every stream with `EngineDeadError(reason)`. The caller closes the channel."""
        self._stopping = self._stopping or self._dead is None
        self.fail(EngineDeadError(reason))
        tasks = [*self._tasks, *([self._reader] if self._reader is not None else [])]
        if self._reader is not None:
            self._reader.cancel()
        await self.moved.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail(self, error: EngineDeadError) -> None:
        """Mark the engine as dead: fail every stream and query with `error`, and refuse new requests."""
        if self._dead is not None:
            return
        self._dead = error
        self._became_ready.set()
        for rid in self._live.find(None):
            self._drop(rid, "abort").generation.fail(error)
        self._queries.fail(error)

    @property
    def alive(self) -> bool:
        """False once the engine is dead or this client was stopped."""
        return self._dead is None

    @property
    def weight_version(self) -> str | None:
        """Name of the version of the weights in use; None while the engine starts."""
        return None if self.weights is None else self.weights[0]

    @property
    def engine_lost(self) -> bool:
        """True when the engine died; False when this client was stopped first."""
        return self._dead is not None and not self._stopping

    @property
    def ready(self) -> EngineReady | None:
        """The scheduler's `EngineReady`; None before it can take requests and after the engine died."""
        return self._ready if self._dead is None else None

    def add_listener(self, listener: RequestListener) -> None:
        """Notify `listener` of the start and end of every sequence from now on."""
        self._stats.listeners.append(listener)

    @property
    def num_live(self) -> int:
        """Number of live sequences."""
        return len(self._live)

    async def wait_ready(self, timeout_s: float | None = None) -> EngineReady:
        """Wait until the scheduler can take requests.

        `timeout_s` None: wait without a limit.

        Raises:
            EngineDeadError: the engine is dead.
            TimeoutError: the scheduler was not ready within `timeout_s` seconds.
        """
        await asyncio.wait_for(self._became_ready.wait(), timeout_s)
        return self.require_ready()

    def require_ready(self) -> EngineReady:
        """Return the scheduler's `EngineReady`.

        Raises:
            EngineDeadError: the engine is dead.
            RequestError: 503 while the engine is starting.
        """
        if self._dead is not None:
            raise self._dead
        if self._ready is None:
            raise RequestError("the engine is starting", status=503, code="engine_starting", retry_after_s=1)
        return self._ready

    # requests --------------------------------------------------------------------------------------------------------

    async def submit(self, states: Sequence[RequestState], client: str | None = None) -> Generation:
        """Send the sequences of one body to the scheduler and return their stream of updates.

        The `rid`s of the requests are unique. `client` None: the client of the current HTTP call.

        Raises:
            RequestError: 400 when a name belongs to a live request. 503 while the engine is starting, or when too many
                requests wait. 503 also when the client names too many bootstrap addresses that have never served.
            EngineDeadError: the engine is dead.
        """
        call = current_call()
        if client is None:
            client = "" if call is None else call.client
        await self._detokenizers.add_to(states, client)
        prior_text = {
            state.index: await state.detokenizer.replay(state.request.prior_output_ids)
            for state in states
            if state.request.prior_output_ids
        }
        ready = self.require_ready()
        requests = [state.request for state in states]
        if states[0].attaches:
            return self._attach(states[0], prior_text)
        if self._waiting is not None:
            self._waiting.check(requests, min(ready.context_length, ready.max_total_tokens))
        in_use = self._live.in_use(name for state in states for name in state.names)
        if in_use is not None:
            raise RequestError(f"rid {in_use!r} belongs to a request that is still running", field="rid")
        generation = Generation(len(states), self._close, call)
        generation.prior_text.update(prior_text)
        if self._new_prefill is not None:
            for state, address in zip(states, self._new_prefill.take(client, requests), strict=True):
                state.new_address = address
        for state in states:
            state.generation = generation
            self._stats.started(state, call)
            self._live.add(state)
        try:
            for state in states:
                await self._send(state)
        except BaseException:
            generation.close()
            raise
        return generation

    def _attach(self, state: RequestState, prior_text: dict[int, str]) -> Generation:
        """Take over a request of another server, which the scheduler computes already."""
        in_use = self._live.in_use(state.names)
        if in_use is not None:
            raise RequestError(f"rid {in_use!r} belongs to a request that is still running", field="rid")
        entry = self.incoming.take(state.request.rid, ATTACH_FIELD, len(state.request.prior_output_ids))
        call = current_call()
        generation = state.generation = Generation(1, self._close, call)
        generation.prior_text.update(prior_text)
        self._stats.started(state, call)
        self._live.add(state)
        for output in entry.outputs:
            self._on_output(output)
        return generation

    async def take_in(self, request: GenerateRequest, timeout_s: float) -> IncomingRequest | None:
        """Send a request of another server to the scheduler; return it once it is computed here and waits for a reader.

        The result is None for a prefix, which has ended.

        Raises:
            RequestError: it is refused, its KV does not arrive, or `timeout_s` seconds have passed.
            EngineDeadError: the engine is dead.
        """
        self.require_ready()
        if self._live.get(request.rid) is not None:
            raise RequestError(f"rid {request.rid!r} is in use", field="rid", status=409, code="rid_in_use")
        entry = self.incoming.add(request)
        try:
            await self._channel.send(request)
            await asyncio.wait_for(entry.runs.wait(), timeout_s)
        except BaseException as error:
            self.incoming.drop(request.rid)
            if not isinstance(error, TimeoutError):
                raise
            message = f"the KV did not arrive within {timeout_s:g} s"
            raise RequestError(message, status=504, code="migration_timeout") from error
        if not entry.has_begun:
            self.incoming.drop(request.rid)
        if entry.failure is not None:
            raise entry.failure.error()
        if entry.has_ended:
            return None
        self.incoming.wait_for_reader(entry)
        return entry

    def find_one(self, name: str) -> RequestState | None:
        """Return the live sequence whose client id is `name`; None without one, or with several."""
        found = [state for rid in self._live.find(name) if (state := self._live.get(rid)) is not None]
        return found[0] if len(found) == 1 else None

    def hand_over(self, rid: str, error: RequestError) -> None:
        """End a sequence that another server computes: its reader gets all tokens so far, then `error`."""
        if self._live.get(rid) is None:
            return
        state = self._drop(rid, "abort")
        held = state.held.flush()
        if held is not None:
            state.generation.put(held)
        state.generation.end_with(error)

    async def _send(self, state: RequestState) -> None:
        request = state.request
        for part in state.kv_parts():
            await self._channel.send(part)
        state.kv = None
        if self._waiting is None:
            await self._channel.send(request)
            return
        self._waiting.add(request)
        try:
            await self._channel.send(request)
        except BaseException:
            self._waiting.discard(request.rid)  # the scheduler never received it
            raise

    def abort(self, name: str | None) -> int:
        """Abort the sequences whose client id, or whose batch's id, is `name`; None: all. Return their number.

        Their streams end as aborted.
        """
        rids = self._live.find(name)
        for rid in rids:
            if not self.moved.abort(rid, CLIENT_ABORT):
                self._send_soon(AbortRequest(rid=rid))
        return len(rids)

    def count(self, name: str) -> int:
        """Return the number of live sequences whose client id, or whose batch's id, is `name`."""
        return len(self._live.find(name))

    def single_names(self) -> list[str]:
        """Return the client ids of all requests of one live sequence."""
        return self._live.single_names()

    async def extract(self, rid: str, *, with_kv: bool, keep: bool) -> Extracted:
        """See `EngineQueries.extract`."""
        self.require_ready()
        return await self._queries.extract(rid, with_kv=with_kv, keep=keep)

    async def wait_for_adapter(self, name: str) -> None:
        """Wait until no live sequence has the LoRA adapter `name`. One caller at a time."""
        while self._live.has_adapter(name):
            self._ended.clear()
            await self._ended.wait()

    def abort_all(self, error: PdserveError) -> None:
        """Fail every stream with `error` and abort every sequence at the scheduler."""
        for rid in self._live.find(None):
            self._drop(rid, "abort").generation.fail(error)
            self._send_soon(AbortRequest(rid=rid))
        self.incoming.end_all(error)

    def _close(self, generation: Generation) -> None:
        for rid in self._live.of(generation):
            self._drop(rid, "abort")
            self._send_soon(AbortRequest(rid=rid))

    def _drop(self, rid: str, outcome: str) -> RequestState:
        sequence = self._live.pop(rid)
        if self._new_prefill is not None and sequence.new_address is not None:
            self._new_prefill.release(sequence.new_address)
        self._stats.ended(sequence, outcome)
        self.moved.ended(rid)
        self._ended.set()
        return sequence

    # queries ---------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True from `/pause_generation` until `/continue_generation`."""
        return self._queries.paused

    @property
    def last_state(self) -> EngineState | None:
        """The newest state received; None before the first."""
        return self._queries.last_state

    @property
    def state_age_s(self) -> float | None:
        """Age of the newest state in seconds; None before the first."""
        at = self._queries.last_state_at
        return None if at is None else time.monotonic() - at

    async def state(self, timeout_s: float, *, audit: bool = False) -> EngineState | None:
        """Query the scheduler's state. `audit`: after a self-audit.

        Returns the last state received when no reply arrives within `timeout_s` seconds (a long step), or the engine is
        dead; None if there is none.
        """
        if self.ready is None:
            return self.last_state
        return await self._queries.state(timeout_s, audit=audit)

    async def command(self, make: Callable[[str], Command | SwitchRole], timeout_s: float) -> CommandReply:
        """Send the command that `make` builds from a query id, and return the scheduler's reply.

        Raises:
            RequestError: 503 when no reply arrives within `timeout_s` seconds, or the engine is starting.
            EngineDeadError: the engine is dead.
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
            case ExtractReply() | KVPart():
                self._queries.on_extracted(message)
            case SchedulerHeartbeat():
                self.watchdog.on_beat(message)
            case EngineReady():
                self._take_ready(message)

    def _take_ready(self, message: EngineReady) -> None:
        """Take the facts of an engine that has started, changed its role, or changed its weights."""
        self._ready, self.weights = message, weights_of(message)
        self.watchdog.begin()
        if not self._became_ready.is_set():
            self._became_ready.set()
            log_startup(message)

    def _on_output(self, output: EngineCoreOutput) -> None:
        if self._waiting is not None:
            self._waiting.discard(output.rid)
        sequence = self._live.get(output.rid)
        if sequence is not None and sequence.request.logprobs is not None:
            sequence.output_logprobs += output.logprobs or ()
            sequence.prompt_parts += () if output.prompt_logprobs is None else (output.prompt_logprobs,)
        if sequence is None:
            self.incoming.on_output(output)  # else it was aborted or stopped here while this output was in flight
            return
        if self._new_prefill is not None and sequence.new_address is not None:
            self._new_prefill.on_output(sequence.new_address, output)
        finish = output.finish
        failure = None if finish is None else finish.failure
        if failure is not None and failure.code == MIGRATED.code:
            self.moved.expect(output.rid, lambda: self._live.get(output.rid) is sequence)
            return  # another server sends the rest
        if failure is not None and failure.status != ABORTED_STATUS:  # an aborted sequence keeps its text
            self._fail(sequence, failure)
            return
        if not sequence.generation.computed_with(self.weights) and output.token_ids:
            self._fail(sequence, MIXED_WEIGHTS)
            return
        try:
            update = detokenize_output(
                sequence.index, sequence.detokenizer, output, keep_stop=sequence.request.sampling.no_stop_trim
            )
        except RequestError as error:  # the stop patterns took too long
            self._fail(sequence, Failure.from_error(error))
            if finish is None:
                self._send_soon(AbortRequest(rid=output.rid))
            return
        sequence.timing = update.timing = output.timing or sequence.timing
        sequence.speculation = update.speculation = output.speculation or sequence.speculation
        self._stats.tokens(sequence, output, update)
        if update.finish is not None:
            self._drop(output.rid, update.finish.type)
            if finish is None:
                self._send_soon(AbortRequest(rid=output.rid, reason="stop"))
        ready = sequence.held.add(update)
        if ready is not None:
            sequence.generation.put(ready)

    def _fail(self, sequence: RequestState, failure: Failure) -> None:
        sequence.failure = failure
        self._drop(sequence.request.rid, "abort")
        sequence.generation.fail(failure.error())

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
