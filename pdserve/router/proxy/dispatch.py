"""Dispatch of a request: choose a pair, send the same body to both workers, return decode's answer.

    attempt 1..max_tries:  slots at a pair (maybe after a wait in the queue), a new bootstrap room
                           prefill POST ----- read whole ----->|
                           decode  POST ----- first bytes ---->| decode answered -> relay; one failed -> cancel both
                           a worker found dead, the router's shutdown ------> as a failure (`attempts`)

A request is not retried after its first byte, nor when the last remaining worker answered with `Retry-After`. With
--retry-streams a broken stream continues at another pair (`stream_retry`).

Any end of an attempt (a failed half, the client's disconnect, the deadline) closes both connections, on which the
workers abort the request. Called by `generate`, which relays the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson
from multidict import CIMultiDict

from pdserve.base.log import SparingLog
from pdserve.base.stream_state import ROLE_HEADER, STATE_HEADER
from pdserve.protocol.failure import Failure
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http import CallTrace, half_of
from pdserve.router.policies import RoutedRequest
from pdserve.router.policies.routing_keys import conversation_key, prompt_of
from pdserve.router.proxy.attempts import (
    SHUTTING_DOWN,
    Attempt,
    Drain,
    WeightsPatience,
    batch_size,
    merges_prefill,
    num_sequences,
    with_rooms,
)
from pdserve.router.proxy.merge import event_merger, merged_body, prefill_metas
from pdserve.router.proxy.stream_retry import MIGRATED, Moved, StreamProgress, can_go_on, stream_form, with_seed
from pdserve.router.workers.admission import Admission, PairSlots, rids_of
from pdserve.router.workers.health import LOAD_FAILURE_POLICY, HealthMonitor
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import (
    ConnectionFailed,
    HalfOutcome,
    Outcome,
    WorkerResponse,
    WorkerStream,
    asked_to_retry_later,
    counts_as_failure,
    describe,
    ends_both,
    failed,
    open_stream,
    own_headers,
    read_response,
    resolve_outcome,
    retryable,
    weights_differ,
)
from pdserve.router.workers.workers import Pair, Registry, Worker

log = logging.getLogger(__name__)

PREFILL_GRACE_S = 1.0
"""Seconds to wait for prefill's answer after decode's answer has ended; the KV cache was transferred long before."""


@dataclasses.dataclass(frozen=True)
class ProxiedCall:
    """A client's request: path, JSON object, headers for the workers, and its properties that policies use.

    `deadline`, in the event loop's time, holds for all attempts together.
    """

    path: str
    body: dict[str, Any]
    data: bytes | None
    """The JSON of `body`, which each attempt sends; None: `body` is small, and each attempt serializes it."""
    headers: CIMultiDict[str]
    routed: RoutedRequest
    deadline: float
    trace: CallTrace | None = None
    continued: bool = False
    """True: another pair may continue the stream, so that decode is requested to send resume state."""
    turn: str | None = None
    """Name of a session's request, by which another one that replaces it ends it; None: it has no session."""


EVENT_STREAM = "text/event-stream"
STREAM_TYPES = (EVENT_STREAM, "application/x-ndjson")
"""Content types of streams that another pair can continue."""
SHOWN_BYTES = 500
"""Bytes of a worker's error that are logged."""


class Dispatcher:
    """Sends requests to pairs; one per app."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        admission: Admission,
        health: HealthMonitor,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        rng: random.Random,
        drain: Drain,
    ) -> None:
        self._drain = drain
        self._config = config
        self._registry = registry
        self._admission = admission
        self._health = health
        self._session = session
        self._metrics = metrics
        self._rng = rng
        self._not_asked = SparingLog(log)
        self._uses_key = any(policy.uses_key for policy in admission.policies.values())
        self._uses_prompt = any(policy.uses_prompt for policy in admission.policies.values())

    def routed(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> RoutedRequest:
        """Return the properties of a request that the policies use."""
        return RoutedRequest(
            key=conversation_key(path, body, headers) if self._uses_key else None,
            prompt=prompt_of(path, body) if self._uses_prompt else None,
        )

    def answer(self, call: ProxiedCall) -> AbstractAsyncContextManager[Outcome]:
        """Return a context manager with the final outcome, after retries; its end closes all open connections."""
        if self._config.drain_migrate:
            call = self._named(call)
        if (self._config.retry.stream_retries or self._config.drain_migrate) and can_go_on(call.path, call.body):
            return self._continued(call)
        return self._with_retries(call, set())

    @contextlib.asynccontextmanager
    async def _continued(self, call: ProxiedCall) -> AsyncIterator[Outcome]:
        """Like `_with_retries`; a broken stream goes on at another pair."""
        body = with_seed(call.path, call.body, self._rng)
        data = call.data if body is call.body else _json_of(call, body)
        call = dataclasses.replace(call, body=body, data=data, continued=True)
        avoid: set[Worker] = set()
        async with contextlib.AsyncExitStack() as stack:
            outcome = await stack.enter_async_context(self._with_retries(call, avoid))
            if isinstance(outcome, WorkerStream) and outcome.response.content_type in STREAM_TYPES:
                worker = outcome.worker

                async def again(body: dict[str, Any], failure: Failure) -> WorkerStream | None:
                    nonlocal worker
                    await stack.aclose()
                    spec = worker.spec
                    log.info("a stream of %s %s moves to another pair: %s", spec.role, spec.url, failure.message)
                    avoid.add(worker)
                    if failure.code == MIGRATED:
                        self._metrics.attached.labels("recomputed").inc()
                    else:
                        self._metrics.stream_retries.inc()
                        await self._after_failure(ConnectionFailed(worker, failure.message), 1)
                    resumed = dataclasses.replace(call, body=body, data=_json_of(call, body))
                    found = await stack.enter_async_context(self._with_retries(resumed, avoid))
                    worker = found.worker if isinstance(found, WorkerStream) else worker
                    return (
                        found
                        if isinstance(found, WorkerStream) and found.response.content_type in STREAM_TYPES
                        else None
                    )

                async def attach(body: dict[str, Any], moved: Moved) -> WorkerStream | None:
                    nonlocal worker
                    target = self._registry.find(moved.to)
                    slots = None if target is None else self._admission.enter_at(target)
                    if slots is None:
                        return None
                    await stack.aclose()
                    resumed = dataclasses.replace(call, body=body, data=_json_of(call, body))
                    found = await stack.enter_async_context(self._attached(slots, resumed, moved))
                    if not isinstance(found, WorkerStream) or found.response.content_type not in STREAM_TYPES:
                        return None
                    worker = found.worker
                    self._metrics.attached.labels("attached").inc()
                    return found

                form = stream_form(call.path)
                stream = StreamProgress(body, self._config.retry.stream_retries, again, attach, form)
                outcome = dataclasses.replace(outcome, stream=stream)
            yield outcome

    @contextlib.asynccontextmanager
    async def _with_retries(self, call: ProxiedCall, avoid: set[Worker]) -> AsyncIterator[Outcome]:
        """Yield the outcome of the last attempt; retries failed attempts. Failed workers are added to `avoid`."""
        rids = rids_of(call.body) | (set() if call.turn is None else {call.turn})
        outcome: Outcome | None = None
        attempt = 1
        patience = WeightsPatience(asyncio.get_running_loop().time)
        while attempt <= self._config.retry.max_tries:
            entered = await self._admission.enter(call.routed, avoid, again=outcome is not None, rids=rids)
            if isinstance(entered, Failure):
                outcome = outcome or entered
                break
            if outcome is not None:
                self._metrics.retries.inc()
            rids_alone = alone_rids(call.path, call.body)
            attaches, turn = call.continued, call.turn
            with Attempt(
                entered.pair, self._drain, self._can_recompute, rids_alone, attaches=attaches, turn=turn
            ) as this:
                async with self._attempt(entered, call, this) as result:
                    if isinstance(result, Failure) or not retryable(result):
                        yield result
                        return
            outcome = result
            if weights_differ(result) and not self._drain.is_aborted and await patience.wait():
                continue
            avoid.add(result.worker)
            if isinstance(result, WorkerResponse) and ROLE_HEADER in result.headers:
                await self._health.on_reported_role(result.worker, result.headers[ROLE_HEADER])
            if asked_to_retry_later(result) and not set(self._registry.usable(result.worker.spec.role)) - avoid:
                break
            await self._after_failure(result, attempt)
            attempt += 1
            if self._drain.is_aborted:
                outcome = SHUTTING_DOWN
                break
        assert outcome is not None, "there is at least one attempt"
        if isinstance(outcome, Failure):
            self._metrics.refused.labels(outcome.code).inc()
        yield outcome

    @contextlib.asynccontextmanager
    async def _attached(self, slots: PairSlots, call: ProxiedCall, moved: Moved) -> AsyncIterator[Outcome]:
        """Yield the answer of the worker that has the moved request."""
        rids = (*alone_rids(call.path, call.body), moved.rid)
        with Attempt(slots.pair, self._drain, rids=rids, attaches=True, turn=call.turn) as this:
            async with self._attempt(slots, call, this) as result:
                yield result

    def _named(self, call: ProxiedCall) -> ProxiedCall:
        """Give a request of one sequence a `rid`, if it has none, so that the router can name it to the worker."""
        if call.body.get("rid") is not None or num_sequences(call.body) != 1 or batch_size(call.path, call.body):
            return call
        body = call.body | {"rid": f"{self._rng.getrandbits(128):032x}"}
        return dataclasses.replace(call, body=body, data=_json_of(call, body))

    @contextlib.asynccontextmanager
    async def _attempt(self, slots: PairSlots, call: ProxiedCall, this: Attempt) -> AsyncIterator[Outcome]:
        """Run one attempt. On leaving, both connections are closed and both slots released."""
        prefill: asyncio.Task[WorkerResponse | ConnectionFailed] | None = None
        decode: asyncio.Task[HalfOutcome] | None = None
        outcome: Outcome | None = None
        try:
            data = self._body_for(call, slots.pair)
            decode = asyncio.create_task(self._decode_half(slots.pair.decode, call, data))
            if slots.prefill is not None:
                prefill = asyncio.create_task(self._prefill_half(slots, call, data))
            outcome = await self._wait(prefill, decode, this, slots.pair)
            self._note(slots, outcome)
            if prefill is not None and isinstance(outcome, WorkerStream) and merges_prefill(call.path, call.body):
                while not prefill.done() and this.reason is None:
                    await this.change()
                this.answers(outcome)
                outcome = await _with_prefill_answer(outcome, prefill) if prefill.done() else this.reason
                assert outcome is not None, "prefill has answered, or the attempt was ended"
                if failed(outcome):
                    self._note(slots, outcome)
            if isinstance(outcome, WorkerStream):
                this.answers(outcome)
            yield outcome
            if prefill is not None and not prefill.done() and not failed(outcome):
                await asyncio.wait({prefill}, timeout=PREFILL_GRACE_S)
        finally:
            try:
                self._report_attempt_end(slots, prefill, outcome, call)
            finally:
                try:
                    await close_halves(prefill, decode)
                finally:
                    slots.close()

    def _body_for(self, call: ProxiedCall, pair: Pair) -> bytes:
        """Return the body for both halves, with a new bootstrap room for a pair."""
        if pair.prefill is None:
            return orjson.dumps(call.body) if call.data is None else call.data
        host, port = pair.prefill.spec.host, pair.prefill.bootstrap_port
        return with_rooms(call.path, call.body, call.data, host, port, self._rng)

    async def _wait(
        self,
        prefill: asyncio.Task[WorkerResponse | ConnectionFailed] | None,
        decode: asyncio.Task[HalfOutcome],
        this: Attempt,
        pair: Pair,
    ) -> Outcome:
        """Wait until decode has answered, a half has failed, or the attempt was ended.

        A failed prefill is ignored if decode computes the prompt itself.
        """
        decode.add_done_callback(this.wake)
        if prefill is not None:
            prefill.add_done_callback(this.wake)
        while True:
            prefilled = prefill.result() if prefill is not None and prefill.done() else None
            if prefilled is not None and not decode.done() and not ends_both(prefilled) and self._can_recompute(pair):
                prefilled = None
            outcome = resolve_outcome(prefilled, decode.result() if decode.done() else None)
            if outcome is not None:
                return outcome
            if this.reason is not None:
                return this.reason
            assert not decode.done(), "a finished decode half is an answer or a failure"
            await this.change()

    def _can_recompute(self, pair: Pair) -> bool:
        """Whether the pair's decode server computes the prompt when its prefill server fails.

        True if its load failure policy is recompute and no other prefill server is usable.
        """
        others = set(self._registry.usable(WorkerRole.PREFILL)) - {pair.prefill}
        return pair.decode.facts.get(LOAD_FAILURE_POLICY) == "recompute" and not others

    async def _prefill_half(
        self, slots: PairSlots, call: ProxiedCall, data: bytes
    ) -> WorkerResponse | ConnectionFailed:
        """Send the prefill half; a good answer releases prefill's slot and is reported to its breaker."""
        slot = slots.prefill
        assert slot is not None
        spec = slot.worker.spec
        with half_of(call.trace, spec.role, spec.url) as more:
            headers = self._headers(slot.worker, call, more)
            answer = await read_response(self._session, slot.worker, call.path, data, headers)
        if not failed(answer):
            slot.completed()
            slot.close()
            slot.worker.ended_bytes += 1
        return answer

    async def _decode_half(self, worker: Worker, call: ProxiedCall, data: bytes) -> HalfOutcome:
        with half_of(call.trace, worker.spec.role, worker.spec.url) as more:
            return await open_stream(self._session, worker, call.path, data, self._headers(worker, call, more))

    def _headers(self, worker: Worker, call: ProxiedCall, more: Mapping[str, str]) -> CIMultiDict[str]:
        """Return the client's headers plus the expected role; a key for the worker replaces the client's key."""
        headers = call.headers.copy()
        headers[ROLE_HEADER] = worker.spec.role.mode
        headers.update(more)
        headers.update(own_headers(worker, self._config.access.key_for_workers))
        if call.continued or merges_prefill(call.path, call.body):
            headers.popall("Accept-Encoding", None)
        if call.continued:
            headers[STATE_HEADER] = "1"
        worker.num_sent += 1
        return headers

    async def _after_failure(self, outcome: HalfOutcome, attempt: int) -> None:
        """Run before the next attempt: check the health of a worker whose connection failed, and back off."""
        if counts_as_failure(outcome) and isinstance(outcome, ConnectionFailed):
            self._health.connection_broke(outcome.worker, outcome.message)
            await self._health.check(outcome.worker)
        if attempt < self._config.retry.max_tries:
            await asyncio.sleep(self._config.retry.backoff_s(attempt, self._rng))

    def _note(self, slots: PairSlots, outcome: Outcome) -> None:
        """Report the outcome of an attempt to breaker, pair state, metrics and log."""
        if isinstance(outcome, Failure):
            return
        if isinstance(outcome, ConnectionFailed) and outcome.out_of_descriptors:
            self._not_asked.warning("no request was sent to %s: %s", outcome.worker.spec.url, outcome.message)
            return
        slot = slots.at(outcome.worker)
        if not isinstance(outcome, WorkerStream):
            spec = outcome.worker.spec
            kind = "connection" if isinstance(outcome, ConnectionFailed) else str(outcome.status)
            self._metrics.failed_at(outcome.worker, kind)
            said = outcome.message.encode() if isinstance(outcome, ConnectionFailed) else outcome.body
            text = said[:SHOWN_BYTES].decode(errors="replace")
            ours = counts_as_failure(outcome) or asked_to_retry_later(outcome)  # errors of clients are debug messages
            log.log(logging.INFO if ours else logging.DEBUG, "%s %s failed: %s: %s", spec.role, spec.url, kind, text)
        if counts_as_failure(outcome):
            slot.failed()
            if slots.is_pair:
                self._admission.pairs.suspect(slots.pair)
        elif isinstance(outcome, WorkerStream):
            slot.answered()
            if slots.is_pair:
                self._admission.pairs.served(slots.pair, self._admission.now())
        elif not asked_to_retry_later(outcome):
            slot.completed()

    def _report_attempt_end(
        self,
        slots: PairSlots,
        prefill: asyncio.Task[WorkerResponse | ConnectionFailed] | None,
        outcome: Outcome | None,
        call: ProxiedCall,
    ) -> None:
        """Report the end of an attempt to the breakers; nothing if the client disconnected.

        If the deadline passed without an answer, the failure is prefill's if prefill has not answered, else decode's.
        """
        ended = prefill.result() if prefill is not None and prefill.done() and not prefill.cancelled() else None
        if isinstance(outcome, WorkerStream):
            if ended is not None and counts_as_failure(ended) and slots.prefill is not None:
                slots.prefill.failed()
            if outcome.is_truncated and not outcome.was_ended:
                slots.decode.failed()
            elif outcome.ended:
                slots.decode.completed()
        elif isinstance(outcome, WorkerResponse) and not failed(outcome):
            slots.decode.completed()
        elif outcome is None and self._admission.now() >= call.deadline:
            late = slots.decode if prefill is None or prefill.done() else slots.prefill
            assert late is not None
            late.failed()


def alone_rids(path: str, body: dict[str, Any]) -> tuple[str, ...]:
    """Return the `rid` of a request of one sequence; empty for several sequences, and without a `rid`."""
    rid = body.get("rid")
    if isinstance(rid, str) and num_sequences(body) == 1 and batch_size(path, body) is None:
        return (rid,)
    return ()


def _json_of(call: ProxiedCall, body: dict[str, Any]) -> bytes | None:
    """Return the JSON of `body`, which replaces the body of `call`; None if each attempt serializes it."""
    return None if call.data is None else orjson.dumps(body)


async def _with_prefill_answer(
    upstream: WorkerStream, prefill: asyncio.Task[WorkerResponse | ConnectionFailed]
) -> HalfOutcome:
    """Return decode's answer merged with what prefill's has of the prompt, or prefill's failure."""
    answer = await prefill
    if isinstance(answer, ConnectionFailed) or failed(answer):
        return answer
    metas = prefill_metas(answer.body)
    headers = upstream.headers.copy()
    headers.popall("Content-Length", None)
    if upstream.response.content_type == EVENT_STREAM:
        return dataclasses.replace(upstream, headers=headers, change=event_merger(metas))
    try:
        body = upstream.first + await upstream.response.read()
    except (aiohttp.ClientError, OSError) as error:
        return ConnectionFailed(upstream.worker, describe(error))
    return WorkerResponse(upstream.worker, upstream.response.status, headers, merged_body(body, metas))


async def close_halves(
    prefill: asyncio.Task[WorkerResponse | ConnectionFailed] | None,
    decode: asyncio.Task[HalfOutcome] | None,
) -> None:
    """Cancel both halves; closes decode's connection unless its answer was read to the end."""
    running: list[asyncio.Task[Any]] = []
    for half in (prefill, decode):
        if half is None:
            continue
        if half.done():
            _close_finished(half)
            continue
        half.add_done_callback(_close_finished)  # runs also if the wait below is cancelled
        half.cancel()
        running.append(half)
    if running:
        await asyncio.gather(*running, return_exceptions=True)


def _close_finished(half: asyncio.Task[Any]) -> None:
    """Close the connection of a finished half."""
    if half.cancelled():
        return
    error = half.exception()
    if error is not None:
        log.error("a call to a worker raised an unexpected error", exc_info=error)
    elif isinstance(half.result(), WorkerStream):
        half.result().response.close()


def _why(outcome: Outcome) -> str:
    """Return why an outcome is no stream, for the log."""
    if isinstance(outcome, WorkerResponse):
        return f"status {outcome.status}: {outcome.body[:500].decode(errors='replace')}"
    return f"a {outcome.response.content_type} answer" if isinstance(outcome, WorkerStream) else outcome.message
