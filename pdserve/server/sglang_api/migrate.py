"""`POST /migrate`, `/migrate_in` and `/migrate_stream`: a running request moves to another decode server.

    client of S ──> S: /migrate {"rid", "to"}
                    S: SendPrefix, S ──> D: /migrate_in      stages: whole pages move while the request runs
                    S: MigrateOut ──> the request stops, and is a value
                    S ──> D: /migrate_in ──> D receives the KV from S and computes the request
                    S: EndMigration(commit) ──> the request is forgotten
                    S ──> D: /migrate_stream, and S's client gets the rest; or, with `attach`, S's stream ends

Where a step before the commit fails, the request goes on at S, and D ends its copy, which has no reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from yarl import URL

from pdserve.base.stream_state import STATE_HEADER
from pdserve.errors import EngineDeadError, RequestError
from pdserve.protocol.messages import EndMigration, GenerateRequest, MigrateOut, MigrationOffer, SendPrefix
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.engine_client.migration import IncomingRequest
from pdserve.server.generation import to_wire
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.http.json_http import convert, event, json_response, read_json_object, stream_response
from pdserve.server.migration_client import FAILED, NO_CACHE, MigrateStreamBody, MigrationClient, TakeInBody, base_url
from pdserve.server.request.incoming import check_incoming
from pdserve.server.request.intake import with_salts
from pdserve.server.request.restored import identity_of
from pdserve.server.request.schemas import MigrateBody, ReplicateBody
from pdserve.server.sglang_api.commands import COMMAND_TIMEOUT_S

MAX_TAKE_IN_S = 120.0
MAX_STAGES = 4
"""Each stage sends what was generated during the one before, so few are needed."""


class MigratedError(RequestError):
    """Ends the stream of a request that another server has taken; the error event says where it goes on."""

    def __init__(self, to: str, rid: str, num_tokens: int) -> None:
        super().__init__(f"the request goes on at {to} as {rid}", status=503, code="migrated", retry_after_s=1)
        self.details: dict[str, Any] = {"to": to, "migrated_rid": rid, "next_token_index": num_tokens}


class Migrations:
    """The endpoints. `client` calls other servers; the application closes it.

    `gate`: a server that drains takes no requests of others, and waits for those that it has taken.
    """

    def __init__(self, context: ServerContext, client: MigrationClient, gate: DrainGate) -> None:
        self._context = context
        self._client = client
        self._gate = gate
        self._moving: dict[str, asyncio.Task[dict[str, Any]]] = {}
        """Migrations from here that have not ended, by the rid of the request in the scheduler."""
        self._name = secrets.token_hex(16)

    async def migrate(self, request: Request) -> Response:
        """`POST /migrate`: answer when the other server has the request, or it goes on here."""
        body = convert(await read_json_object(request, self._context.max_body_bytes), MigrateBody)
        if body.rid is None:
            raise RequestError("rid is missing", field="rid")
        url = base_url(body.to)
        state = self._context.client.find_one(body.rid)
        if state is None:
            message = f"rid {body.rid!r} names no single running request of this server"
            raise RequestError(message, field="rid", status=404, code="no_such_request")
        if state.request.rid in self._context.client.moved:
            raise RequestError("the request has moved already", field="rid", status=409, code="not_migratable")
        if body.attach and not state.has_resume_state:
            message = f"attach needs a stream of one sequence that was requested with {STATE_HEADER}"
            raise RequestError(message, field="attach", status=409, code="not_migratable")
        rid = state.request.rid
        if rid in self._moving:  # its failure would end the other one, which has stopped the request
            message = "another migration of the request has not ended"
            raise RequestError(message, field="rid", status=409, code="migration_under_way")
        task = asyncio.create_task(self._move(state, url, attach=bool(body.attach)))
        self._moving[rid] = task  # it ends also when its caller has gone
        task.add_done_callback(lambda done: self._moved(rid, done))
        return json_response({"success": True, "rid": body.rid, "to": str(url), **await asyncio.shield(task)})

    def _moved(self, rid: str, done: asyncio.Task[dict[str, Any]]) -> None:
        self._moving.pop(rid, None)
        if not done.cancelled():
            done.exception()  # a caller that has gone does not take it

    async def replicate(self, request: Request) -> Response:
        """`POST /replicate`: send the cached prefix of a prompt to another server, whose prefix cache then has it.

        Without `to` it answers with the length of the prefix in tokens.
        """
        context = self._context
        body = convert(await read_json_object(request, context.max_body_bytes), ReplicateBody)
        url = None if body.to is None else base_url(body.to)
        field = "disaggregation_mode" if context.mode != "decode" else "dp_size"
        if context.config.parallel.dp_size > 1 or context.mode != "decode":
            message = f"{field}: only decode servers with one replica send prefixes"
            raise RequestError(message, field=field, status=409, code="not_migratable")
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("exactly one of text and input_ids must be given", field="text")
        field = "input_ids" if body.text is None else "text"
        (tokens,) = await context.token_ids([body.text or body.input_ids or []], field, batch=False)
        if body.lora_path is not None and body.lora_path not in context.adapters:
            raise context.no_such_model(body.lora_path, field="lora_path")
        sampling = CoreSamplingParams(max_new_tokens=0)
        rid = f"replicate {secrets.token_hex(8)}"
        prompt = GenerateRequest(rid=rid, input_ids=tokens, sampling=sampling, lora=body.lora_path)
        (prompt,) = with_salts([prompt], body)
        if url is None:
            return json_response({"success": True, "to": None, "num_tokens": await self._count_prefix(rid, prompt)})
        num_tokens = await self._send_prefix(rid, url, 0, prompt)
        if num_tokens is None:
            message = f"{field}: this server has no cached pages of it, or the other one has no prefix cache"
            raise RequestError(message, field=field, status=404, code="no_prefix")
        return json_response({"success": True, "to": str(url), "num_tokens": num_tokens})

    async def migrate_in(self, request: Request) -> Response:
        """`POST /migrate_in`: take a request; answer when it is computed here."""
        context = self._context
        body = convert(await read_json_object(request, context.max_body_bytes), TakeInBody, text_keys=True)
        spec = body.request
        if context.mode != "decode":
            message = f"this is a {context.mode} server; requests move between decode servers"
            raise RequestError(message, field="disaggregation_mode", status=409, code="not_migratable")
        if body.source == self._name:
            raise RequestError("this server has the request itself", field="to", status=409, code="not_migratable")
        if not 0 < body.timeout_s <= MAX_TAKE_IN_S:
            raise RequestError(f"timeout_s must be in (0, {MAX_TAKE_IN_S:g}]", field="timeout_s")
        check_incoming(spec, context.limits(), context.config.grammar)
        if spec.taken_over:
            self._check_recomputed(body)
        if spec.sampling.max_new_tokens == 0 and not context.config.wants_prefix_cache:
            raise RequestError("this server has no prefix cache to take a prefix", status=409, code=NO_CACHE)
        if spec.lora is not None and spec.lora not in context.adapters:
            raise context.no_such_model(spec.lora, field="lora_path")
        self._gate.require_open()
        with contextlib.ExitStack() as held:
            held.enter_context(self._gate.call())
            entry = await context.client.take_in(spec, body.timeout_s)
            if entry is not None and spec.rid in context.client.incoming:  # a drain waits for it without a reader too
                entry.held = held.pop_all()
        return json_response({"success": True, "rid": spec.rid})

    def _check_recomputed(self, body: TakeInBody) -> None:
        """Check the sender of a request that comes without its KV: no handshake compares the servers.

        Raises:
            RequestError: 409 naming the field in which the servers differ.
        """
        ours = identity_of(self._context.client.require_ready())
        for field in ("weights", "model", "dtype"):
            theirs, own = getattr(body, field), getattr(ours, field)
            if theirs != own:
                message = f"{field}: this server has {own}, the other one has {theirs}"
                raise RequestError(message, field=field, status=409, code="not_migratable")

    async def migrate_stream(self, request: Request) -> Response:
        """`POST /migrate_stream`: the output of a request that `/migrate_in` took, as events."""
        body = convert(await read_json_object(request, self._context.max_body_bytes), MigrateStreamBody)
        entry = self._context.client.incoming.attach(body.rid, "rid")
        return await stream_response(request, self._events(entry))

    async def _events(self, entry: IncomingRequest) -> AsyncGenerator[bytes, None]:
        with self._gate.call():
            async for output in self._context.client.incoming.read(entry):
                if output.logprobs is not None:
                    output = msgspec.structs.replace(output, logprobs=to_wire(output.logprobs))
                yield event(msgspec.to_builtins(output))

    async def _move(self, state: RequestState, url: URL, *, attach: bool) -> dict[str, Any]:
        """Move a request. Raises RequestError when it goes on here."""
        client, rid, room = self._context.client, state.request.rid, secrets.randbits(62)
        name = secrets.token_hex(8)
        num_stages = await self._send_stages(rid, url, name)
        if not num_stages:  # a server that hangs is not waited for while the request stands still
            await self._client.reach(url)
        stopped = await self._stop(rid, room)
        stopped_s = time.monotonic()
        offer = msgspec.msgpack.decode(stopped, type=MigrationOffer)
        new_rid = f"m{room:x}"
        committed = False
        try:
            await self._take_in(url, msgspec.structs.replace(offer.request, rid=new_rid, migration_id=name))
            reply = await client.command(lambda i: EndMigration(query_id=i, rid=rid, commit=True), COMMAND_TIMEOUT_S)
            committed = reply.ok
            if not committed:
                raise RequestError(reply.message, field="rid", status=502, code=FAILED)
        finally:
            if not committed:
                await self._go_on(rid)
        pause_s = time.monotonic() - stopped_s
        if attach:
            client.hand_over(rid, MigratedError(str(url), new_rid, offer.num_output_tokens))
        elif client.find_one(state.name) is state:
            client.moved.follow(rid, self._client.outputs(url, new_rid))
        return {
            "migrated_rid": new_rid,
            "num_tokens": offer.num_output_tokens,
            "pause_s": pause_s,
            "num_stages": num_stages,
        }

    async def _send_stages(self, rid: str, url: URL, name: str) -> int:
        """Send whole pages while the request runs, until few are left; returns the number of stages.

        `name`: of the migration.

        Raises:
            RequestError: the other server cannot take the request at all; it has not stopped.
        """
        after = 0
        for number in range(MAX_STAGES):
            num_tokens = await self._send_prefix(rid, url, after, name=name)
            if num_tokens is None:
                return number
            after = num_tokens
        return MAX_STAGES

    async def _count_prefix(self, rid: str, prompt: GenerateRequest) -> int:
        """Return the tokens of a prompt that the prefix cache has; 0 where prefixes of the model do not move."""
        reply = await self._context.client.command(
            lambda i: SendPrefix(query_id=i, rid=rid, room=0, prompt=prompt, count_only=True), COMMAND_TIMEOUT_S
        )
        return msgspec.msgpack.decode(reply.payload, type=int) if reply.ok else 0

    async def _send_prefix(
        self, rid: str, url: URL, after: int, prompt: GenerateRequest | None = None, *, name: str = ""
    ) -> int | None:
        """Send a prefix to the server at `url`; returns its tokens, None when there is nothing to send, or no cache.

        `name`: of the migration that it is a stage of; empty: none.

        Raises:
            RequestError: the other server does not take it.
        """
        room = secrets.randbits(62)
        reply = await self._context.client.command(
            lambda i: SendPrefix(query_id=i, rid=rid, room=room, after=after, prompt=prompt), COMMAND_TIMEOUT_S
        )
        if not reply.ok:
            return None
        request = msgspec.msgpack.decode(reply.payload, type=MigrationOffer).request
        try:
            await self._take_in(url, msgspec.structs.replace(request, rid=f"p{room:x}", migration_id=name))
        except RequestError as error:
            await self._go_on(rid)
            if error.code == NO_CACHE:
                return None
            raise
        return len(request.input_ids)

    async def _take_in(self, url: URL, request: GenerateRequest) -> None:
        ours = identity_of(self._context.client.require_ready())
        weights, dtype, model = ours.weights, ours.dtype, ours.model
        await self._client.take_in(
            url, TakeInBody(request, source=self._name, weights=weights, dtype=dtype, model=model)
        )

    async def _stop(self, rid: str, room: int) -> bytes:
        """Stop the request; returns the encoded offer. Raises RequestError when it goes on."""
        try:
            reply = await self._context.client.command(
                lambda i: MigrateOut(query_id=i, rid=rid, room=room), COMMAND_TIMEOUT_S
            )
        except RequestError:
            await self._go_on(rid)
            raise
        if not reply.ok:
            raise RequestError(reply.message) if reply.failure is None else reply.failure.error()
        return reply.payload

    async def _go_on(self, rid: str) -> None:
        """Let the request go on here. Without an answer it goes on after the scheduler's own timeout."""
        try:
            await self._context.client.command(
                lambda i: EndMigration(query_id=i, rid=rid, commit=False), COMMAND_TIMEOUT_S
            )
        except (RequestError, EngineDeadError):
            return
