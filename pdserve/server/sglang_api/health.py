"""Health endpoints: liveness, readiness, generation of a token, and probes of pairs. Routes in `app`.

    /health            the engine has started, its schedulers run, no step is stuck, and
                       the server is not shutting down                                      liveness, routers' checks
    /ready             as /health; prefill is registered at its bootstrap server, a peer
                       answers, and the role is not being changed                           readiness
    /health_generate   as /health, and scheduler and device generate a token                start-up, deep checks

A long step does not fail `/health`, because schedulers send heartbeats from a thread beside the loop. A server that has
never had a peer is ready: decode connects to a prefill server only when a request names one, so a router that waited
for the connection would wait forever. For the same reason silent peers fail `/ready` for a minute only. By then a
silent peer is dead or replaced, and the next request connects to its replacement.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import MEMORY_RELEASED, ROLE_HEADER
from pdserve.config.groups import DisaggConfig
from pdserve.errors import RequestError
from pdserve.protocol.engine_state import EngineState, PeerLoad, WaitsFor
from pdserve.protocol.messages import FAKE_BOOTSTRAP_HOST, MAX_ROOM, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.engine_queries import ReplicaVitals
from pdserve.server.engine_client.live_requests import QUEUE_FULL, TOO_MANY, RequestState
from pdserve.server.generation import Generation, GenerationUpdate
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.http.json_http import collect, convert, json_response, read_json_object, until_disconnect
from pdserve.server.http.middleware import CLIENT_OF_SCOPE
from pdserve.server.request.intake import rooms_of
from pdserve.server.request.schemas import PairProbeBody

STATE_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 20.0
SECOND_LOOK_S = 1.5
"""Seconds to wait for a heartbeat before a scheduler counts as dead, because this process may have been delayed."""
PARTNER_MEMORY_S = 60.0
"""Seconds after which a silent peer no longer fails `/ready`."""


async def health(context: ServerContext, drain_gate: DrainGate) -> Response:
    """200 while the server is alive; 503 while the engine starts or the server shuts down, or if the engine is dead or
    stuck.

    The header `ROLE_HEADER` names the role in which the server takes new requests.
    """
    drain_gate.require_staying()
    await require_alive(context)
    status = MEMORY_RELEASED if is_released(drain_gate) else "ok"
    return json_response({"status": status}, headers={ROLE_HEADER: drain_gate.accepted_role})


def is_released(drain_gate: DrainGate) -> bool:
    """Whether requests are refused because memory is released; see `memory.py`."""
    refusal = drain_gate.refusal(None)
    return refusal is not None and refusal.code == MEMORY_RELEASED


async def ready(context: ServerContext, drain_gate: DrainGate) -> Response:
    """200 when the server can take requests and its peer answers; see the file's docstring."""
    await require_alive(context)
    drain_gate.require_open()
    if not context.registered():
        raise RequestError(
            "not registered at the bootstrap server yet", status=503, code="not_registered", retry_after_s=1
        )
    state = await context.client.state(STATE_TIMEOUT_S)
    peers = [] if state is None else state.peers
    why = partners_missing(peers)
    if why is not None:
        raise RequestError(why, status=503, code="no_partner", retry_after_s=1)
    return json_response({"status": "ready", "partners": {peer.endpoint: peer.state for peer in peers}})


def partners_missing(peers: Sequence[PeerLoad]) -> str | None:
    """Return the reason for which a server with these peers is not ready; None when it is ready."""
    if any(peer.state == "ready" for peer in peers):
        return None
    silent = [peer for peer in peers if peer.silent_s is not None and peer.silent_s < PARTNER_MEMORY_S]
    if not silent:
        return None
    return "no peer answers: " + ", ".join(
        f"{peer.endpoint} is silent for {peer.heartbeat_age_s:.0f} s" for peer in silent
    )


async def health_generate(context: ServerContext, request: Request) -> Response:
    """200 when every replica generated a token for its probe, or is busy with other requests; else 503.

    Probes the engine, not the peer of a pair.
    """
    heartbeats = await require_alive(context)
    _require_going(context)
    probes = _probes(context)
    try:
        updates = await _probed(context, request, probes)
    except TimeoutError as error:
        now = await require_alive(context)
        _require_going(context)
        if _all_busy(heartbeats, now):
            return json_response({"status": "busy"})
        message = f"no token came within {PROBE_TIMEOUT_S} s"
        raise RequestError(message, status=503, code="engine_busy") from error
    except RequestError as error:
        if error.code == QUEUE_FULL:
            await asyncio.sleep(SECOND_LOOK_S)  # the refusal is immediate, so wait for the next heartbeat
            if _all_busy(heartbeats, await require_alive(context)):
                return json_response({"status": "busy"})
        message = f"the probe failed: {error.message}"
        raise RequestError(message, status=503, code=error.code, retry_after_s=error.retry_after_s) from error
    _check(updates)
    return json_response({"status": "ok"})


async def _probed(
    context: ServerContext, request: Request, probes: Sequence[GenerateRequest]
) -> Sequence[GenerationUpdate]:
    """Submit the probes and return their outputs.

    Raises:
        TimeoutError: not all probes have ended within `PROBE_TIMEOUT_S`.
        RequestError: a probe was refused.
    """
    generation = await context.client.submit(
        [RequestState(request=probe, name=probe.rid, index=index) for index, probe in enumerate(probes)]
    )
    with generation.closed_on_error():
        work = asyncio.wait_for(collect(generation, len(probes)), PROBE_TIMEOUT_S)
        return await until_disconnect(request, work)


def _require_going(context: ServerContext) -> None:
    """Raise 503 while generation is paused, because no probe would get a token."""
    if context.client.paused:
        raise RequestError("generation is paused until /continue_generation", status=503, code="paused")


def _probes(context: ServerContext) -> list[GenerateRequest]:
    vocab_size = context.client.require_ready().vocab_size
    return [
        GenerateRequest(
            rid=f"health-{uuid.uuid4().hex}",
            input_ids=[min(1, vocab_size - 1)],
            sampling=CoreSamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            room=None
            if context.mode == "null"
            else RoomAddress(host=FAKE_BOOTSTRAP_HOST, port=None, room=secrets.randbelow(MAX_ROOM)),
            replica=replica,
            probe=True,
        )
        for replica in range(context.config.parallel.dp_size)
    ]


def _check(updates: Sequence[GenerationUpdate]) -> None:
    if not all(update.token_ids for update in updates):
        raise RequestError("the probe was aborted", status=503, code="aborted")


def _all_busy(before: Sequence[ReplicaVitals], now: Sequence[ReplicaVitals]) -> bool:
    """Whether every replica has computed a step since `before`, or computes one now."""
    return all(new.num_turns > old.num_turns or new.turn_s is not None for old, new in zip(before, now, strict=True))


async def require_alive(context: ServerContext) -> list[ReplicaVitals]:
    """Check the heartbeats of all schedulers and return them, by data-parallel rank.

    Raises:
        EngineDeadError: the engine is dead.
        RequestError: 503 while the engine starts, or naming the replica that is silent or stuck.
    """
    context.client.require_ready()
    deadline_s = time.monotonic() + SECOND_LOOK_S
    while True:
        heartbeats = context.client.watchdog.heartbeats(context.config.parallel.dp_size)
        troubles = [why for each in heartbeats if (why := each.trouble(context.config.observe.watchdog_timeout))]
        if not troubles:
            return heartbeats
        if time.monotonic() >= deadline_s:
            raise RequestError("; ".join(troubles), status=503, code="engine_stuck")
        await asyncio.sleep(0.05)


def replica_health(context: ServerContext) -> list[dict[str, object]]:
    """Return the health of each replica, for `/get_server_info`, `/observe` and `/metrics`."""
    limit_s = context.config.observe.watchdog_timeout
    return [
        {
            "dp_rank": each.dp_rank,
            "alive": each.trouble(limit_s) is None,
            "silent": each.silent,
            "beat_age_s": round(each.age_s, 3),
            "turn_s": None if each.turn_s is None else round(each.turn_s, 3),
            "num_turns": each.num_turns,
            "trouble": each.trouble(limit_s),
        }
        for each in context.client.watchdog.heartbeats(context.config.parallel.dp_size)
    ]


MAX_PROBES = 64
"""Maximum number of concurrent probes; further probes are answered with the status busy."""
PROBE_STATE_TIMEOUT_S = 1.0
"""Limit for the timeout of each of a probe's two state queries, in seconds."""
BUSY: dict[WaitsFor, str] = {"memory": "waits for KV memory", "compute": "waits for its turn to be computed"}
"""Resources for which a probe may wait on a server that progresses."""
WORK = ("num_queue_reqs", "num_running_reqs")
"""Queues of requests that the next steps could compute."""
ARRIVING = "num_decode_transfer_queue_reqs"
STALLED = "stalled"


class _Addressed(msgspec.Struct):
    """The probe's address in the form that `rooms_of` takes."""

    bootstrap_host: Any
    bootstrap_port: Any
    bootstrap_room: Any
    rid: Any = None
    priority: int | None = None
    data_parallel_rank: int | None = None


class PairProbes:
    """`POST /health_pair`: probes a prefill/decode pair with one token. Routers call it on both servers at once.

        {"bootstrap_host", "bootstrap_port", "bootstrap_room", "timeout"}     as in a request; a monolith needs none

        200 {"status": "ok"}      the token was generated: HTTP, handshake, KV transfer and scheduler work for this pair
        200 {"status": "busy"}    no token yet: the probe waits for a resource that other requests use, and the engine
                                  progresses; no verdict
        503 code stalled          the engine has work and does not progress while the probe waits
        503 code no_token         the probe waits for the peer, or for KV that does not arrive
        503 another code          the probe was refused, or has failed

    The engine progresses if `EngineState.progress` grows between two states, or while one step takes long. A prefill
    server may compute a prompt for longer than a probe waits. A decode server is therefore also busy while its memory
    is held by requests whose KV is arriving; if no KV arrives, the prefill server is stalled.

    Probes are excluded from request statistics, request log and prefix cache, and take no slot of a client's request.
    Their cost is bounded: one prompt token, one output token, `MAX_PROBES` at a time. One per application; event loop
    only.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._num_running = 0

    async def post(self, request: Request) -> Response:
        """Answer one probe; see the class."""
        context = self._context
        body = convert(await read_json_object(request, context.max_body_bytes), PairProbeBody)
        await require_alive(context)
        probe = make_probe(body, context.client.require_ready().vocab_size, context.config.disagg)
        if context.client.paused:
            return _busy("generation is paused")
        if self._num_running >= MAX_PROBES:
            return _busy(f"{MAX_PROBES} probes run already")
        self._num_running += 1
        try:
            return await self._run(request, probe, body.timeout)
        finally:
            self._num_running -= 1

    async def _run(self, request: Request, probe: GenerateRequest, timeout_s: float) -> Response:
        client = request.scope.get(CLIENT_OF_SCOPE, "")
        try:
            generation = await self._context.client.submit([RequestState(request=probe, name=probe.rid)], client=client)
        except RequestError as error:
            if error.code == TOO_MANY:
                return _busy(error.message)
            if error.code == QUEUE_FULL:
                return await until_disconnect(request, self._queue_full(error, timeout_s))
            raise
        with generation.closed_on_error():
            return await until_disconnect(request, self._outcome(generation, probe, timeout_s))

    async def _outcome(self, generation: Generation, probe: GenerateRequest, timeout_s: float) -> Response:
        reading = asyncio.create_task(collect(generation, 1))
        deadline, state_s = time.monotonic() + timeout_s, _state_timeout_s(timeout_s)
        try:
            done, _ = await asyncio.wait({reading}, timeout=state_s)
            if not done:
                before = await self._context.client.state(state_s)
                done, _ = await asyncio.wait({reading}, timeout=deadline - state_s - time.monotonic())
                if not done:
                    return await self._late(probe.rid, before, state_s)
            (update,) = reading.result()
        except RequestError as error:
            if error.code == QUEUE_FULL:
                return await self._queue_full(error, deadline - time.monotonic())
            raise RequestError(f"the probe failed: {error.message}", status=503, code=error.code) from error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if not update.token_ids:
            raise RequestError("the probe was aborted", status=503, code="aborted")
        return json_response({"status": "ok"})

    async def _late(self, rid: str, before: EngineState | None, timeout_s: float) -> Response:
        """Respond to a probe without a token within its timeout, by what it waits for in the scheduler.

        Raises:
            RequestError: 503 `stalled` or `no_token`, unless the probe waits for a busy resource.
        """
        after = await self._state_now(timeout_s)
        if before is None or after is None:
            return _busy("the scheduler is in a long step")
        if self._context.client.paused:
            return _busy("generation is paused")
        waits_for = after.probes.get(rid)
        why = f"the probe {BUSY[waits_for]}" if waits_for in BUSY else None
        old, own = _replica_states(before, after, rid)
        has_work = any(own.queues.get(name) for name in WORK)
        if own.progress == old.progress and (has_work or (why is not None and not own.queues.get(ARRIVING))):
            raise _stalled(why or "requests wait to be computed")
        if why is not None:
            return _busy(why)
        what = {"peer": "the peer has not sent its half", "transfer": "its KV has not arrived"}
        why = what.get(waits_for or "", "the probe has just ended")
        raise RequestError(f"no token came in time: {why}", status=503, code="no_token")

    async def _queue_full(self, error: RequestError, timeout_s: float) -> Response:
        """Respond to a probe that a full queue has refused with `error`, at the end of its timeout.

        Raises:
            RequestError: 503 `stalled`, the engine does not progress meanwhile.
        """
        deadline, state_s = time.monotonic() + timeout_s, _state_timeout_s(timeout_s)
        before = await self._context.client.state(state_s)
        await asyncio.sleep(deadline - state_s - time.monotonic())
        after = await self._state_now(state_s)
        if before is None or after is None or after.progress > before.progress:
            return _busy(error.message)
        raise _stalled(error.message)

    async def _state_now(self, timeout_s: float) -> EngineState | None:
        """Return the scheduler's present state; None if it does not answer within `timeout_s`."""
        client = self._context.client
        asked_s = time.monotonic()
        state = await client.state(timeout_s)
        age_s = client.state_age_s
        return None if age_s is None or age_s > time.monotonic() - asked_s else state


def make_probe(body: PairProbeBody, vocab_size: int, disagg: DisaggConfig) -> GenerateRequest:
    """Create the request of a probe. Prefill and decode derive the same prompt from the same room.

    Raises:
        RequestError: 400 naming the field of the address that is missing or wrong.
    """
    address = _Addressed(body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
    mode, default_port = disagg.disaggregation_mode, disagg.disaggregation_bootstrap_port
    (room,) = rooms_of(address, mode, 1, 1, disagg.allowed_prefill, default_port=default_port)
    return GenerateRequest(
        rid=f"health-{uuid.uuid4().hex}",
        input_ids=[0 if room is None else room.room % vocab_size],
        sampling=CoreSamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        room=room,
        probe=True,
    )


def _state_timeout_s(timeout_s: float) -> float:
    """Return the timeout of a state query of a probe with `timeout_s`."""
    return min(PROBE_STATE_TIMEOUT_S, timeout_s / 4)


def _replica_states(before: EngineState, after: EngineState, rid: str) -> tuple[EngineState, EngineState]:
    """Return both states of the replica with the probe `rid`; without such a replica those of all together."""
    pairs = zip(before.replicas, after.replicas, strict=False)
    return next((pair for pair in pairs if rid in pair[1].probes), (before, after))


def _stalled(why: str) -> RequestError:
    return RequestError(f"nothing was computed while the probe waited: {why}", status=503, code=STALLED)


def _busy(why: str) -> Response:
    return json_response({"status": "busy", "why": why})
