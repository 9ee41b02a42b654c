"""`POST /health_pair`: probes a prefill/decode pair with one token. Routers call it on both servers at once.

    {"bootstrap_host", "bootstrap_port", "bootstrap_room", "timeout"}       as in a request; a monolith needs none

    200 {"status": "ok"}      the token was generated: HTTP, handshake, KV transfer and scheduler work for this pair
    200 {"status": "busy"}    no token yet: the probe waits for a resource that other requests use; no verdict
    503 code no_token         the probe waits for the peer, or for KV that does not arrive
    503 another code          the probe was refused, or has failed

Probes are excluded from request statistics, request log and prefix cache, and take no slot of a client's request.
Their cost is bounded: one prompt token, one output token, `MAX_PROBES` at a time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.hosts import HostPatterns
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.protocol.messages import GenerateRequest, WaitsFor
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import QUEUE_FULL, TOO_MANY, RequestState
from pdserve.server.generation import Generation
from pdserve.server.http.calls import CLIENT_OF_SCOPE
from pdserve.server.http.json_http import collect, convert, json_response, read_json_object, until_disconnect
from pdserve.server.native.health import require_alive
from pdserve.server.request.intake import rooms_of
from pdserve.server.request.schemas import PairProbeBody

MAX_PROBES = 64
"""Maximum number of concurrent probes; further probes are answered with the status busy."""
STATE_S = 1.0
"""Seconds of a probe's timeout that are reserved for the state query."""
BUSY: dict[WaitsFor, str] = {"memory": "waits for KV memory", "compute": "waits for its turn to be computed"}
"""Resources for which a probe may wait on a healthy server, without a time limit."""


class _Addressed(msgspec.Struct):
    """The probe's address in the form that `rooms_of` takes."""

    bootstrap_host: Any
    bootstrap_port: Any
    bootstrap_room: Any
    rid: Any = None
    priority: int | None = None
    data_parallel_rank: int | None = None


class PairProbes:
    """The endpoint and its count of running probes. One per application; event loop only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._num_running = 0

    async def post(self, request: Request) -> Response:
        """See the file's docstring."""
        context = self._context
        body = convert(await read_json_object(request, context.max_body_bytes), PairProbeBody)
        await require_alive(context)
        probe = make_probe(
            body, context.mode, context.client.require_ready().vocab_size, context.config.disagg.allowed_prefill
        )
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
            if error.code in (TOO_MANY, QUEUE_FULL):
                return _busy(error.message)
            raise
        with generation.closed_on_error():
            return await until_disconnect(request, self._outcome(generation, probe, timeout_s))

    async def _outcome(self, generation: Generation, probe: GenerateRequest, timeout_s: float) -> Response:
        reading = asyncio.create_task(collect(generation, 1))
        try:
            done, _ = await asyncio.wait({reading}, timeout=max(timeout_s / 2, timeout_s - STATE_S))
            if not done:
                return await self._late(probe.rid, min(STATE_S, timeout_s / 2))
            (update,) = reading.result()
        except RequestError as error:
            if error.code == QUEUE_FULL:
                return _busy(error.message)
            raise RequestError(f"the probe failed: {error.message}", status=503, code=error.code) from error
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if not update.token_ids:
            raise RequestError("the probe was aborted", status=503, code="aborted")
        return json_response({"status": "ok"})

    async def _late(self, rid: str, timeout_s: float) -> Response:
        """Respond to a probe without a token within its timeout, by what it waits for in the scheduler.

        Raises:
            RequestError: 503 `no_token`, unless the probe waits for a busy resource.
        """
        client = self._context.client
        asked_s = time.monotonic()
        state = await client.state(timeout_s)
        age_s = client.state_age_s
        if state is None or age_s is None or age_s > time.monotonic() - asked_s:
            return _busy("the scheduler is in a long step")
        waits_for = state.probes.get(rid)
        if waits_for in BUSY:
            return _busy(f"the probe {BUSY[waits_for]}")
        what = {"peer": "the peer has not sent its half", "transfer": "its KV has not arrived"}
        why = what.get(waits_for or "", "the probe has just ended")
        raise RequestError(f"no token came in time: {why}", status=503, code="no_token")


def make_probe(
    body: PairProbeBody, mode: DisaggMode, vocab_size: int, allowed_prefill: HostPatterns | None = None
) -> GenerateRequest:
    """Create the request of a probe. Prefill and decode derive the same prompt from the same room.

    Raises:
        RequestError: 400 naming the field of the address that is missing or wrong.
    """
    address = _Addressed(body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
    (room,) = rooms_of(address, mode, 1, 1, allowed_prefill)
    return GenerateRequest(
        rid=f"health-{uuid.uuid4().hex}",
        input_ids=[0 if room is None else room.room % vocab_size],
        sampling=CoreSamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        room=room,
        probe=True,
    )


def _busy(why: str) -> Response:
    return json_response({"status": "busy", "why": why})
