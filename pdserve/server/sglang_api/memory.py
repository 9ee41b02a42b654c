"""`/release_memory_occupation`, `/resume_memory_occupation` and `/get_weights_by_name`. Paths and fields are SGLang's.

    release ──> the drain gate refuses new requests with 503 `memory_released` ──> a request runs: 400, the gate opens
        ──> the schedulers of all replicas release ──> one cannot: all resume, and the gate opens
    resume ──> the schedulers take the memory again ──> nothing is released any more: the gate opens

The server's process and port stay, and `/health` answers 200 with the status `memory_released`. A trainer on the same
machine uses the memory meanwhile.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import MEMORY_RELEASED
from pdserve.errors import RequestError
from pdserve.protocol.engine_memory import MEMORY_TAGS, GetWeights, ReleaseMemory, ResumeMemory, WeightRows
from pdserve.protocol.messages import CommandReply
from pdserve.server.context import ServerContext
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.weights_bodies import MemoryTagsBody, WeightNameBody
from pdserve.server.sglang_api.commands import COMMAND_TIMEOUT_S
from pdserve.server.sglang_api.health import is_released

MOVE_TIMEOUT_S = 600.0
"""Seconds that the engine may take to write or read the copy of the weights."""
QUIET_S = 5.0
"""Seconds in which transfers of ended requests must have ended."""
NO_TENSOR = ("has no tensor", "does not use the tensor")
BUSY_CODE = "busy"
LIVE = "requests are live"


def memory_released() -> RequestError:
    """Return the refusal of requests while memory is released."""
    return RequestError(
        "the memory of this server is released until /resume_memory_occupation",
        status=503,
        code=MEMORY_RELEASED,
        retry_after_s=5,
    )


class MemoryEndpoints:
    """The endpoints of one server. Event loop only; one change of memory or weights at a time."""

    def __init__(self, context: ServerContext, drain_gate: DrainGate) -> None:
        self._context, self._gate = context, drain_gate
        self._released: tuple[str, ...] = ()

    async def release_memory_occupation(self, request: Request) -> Response:
        """Give memory back to the system; 400 while requests run."""
        tags = await self._tags(request)
        async with self._exclusive():
            self._context.client.require_ready()
            if not is_released(self._gate):
                self._gate.require_open()
                self._gate.close(memory_released())
            try:
                await self._release(tags)
            except BaseException:
                self._open_gate()
                raise
        return self._answer()

    async def resume_memory_occupation(self, request: Request) -> Response:
        """Take memory again."""
        tags = await self._tags(request)
        async with self._exclusive():
            self._context.client.require_ready()
            if self._released:
                reply = await self._command_resume(tags)
                if not reply.ok:
                    raise RequestError(reply.message, status=500, code="resume_failed")
                self._released = tuple(tag for tag in self._released if tag not in tags)
                self._open_gate()
        return self._answer()

    async def get_weights_by_name(self, request: Request) -> Response:
        """Return the first rows of a tensor, by its name in the checkpoint, as nested lists of numbers."""
        body = convert(await self._body(request), WeightNameBody)
        if body.truncate_size < 1:
            raise RequestError(f"truncate_size must be at least 1, got {body.truncate_size}", field="truncate_size")
        reply = await self._context.client.command(
            lambda i: GetWeights(query_id=i, name=body.name, max_rows=body.truncate_size), COMMAND_TIMEOUT_S
        )
        if not reply.ok:
            unknown = any(text in reply.message for text in NO_TENSOR)
            status, code = (404, "no_such_tensor") if unknown else (400, "weights_not_readable")
            raise RequestError(reply.message, field="name", status=status, code=code)
        data = await asyncio.to_thread(_as_json, reply.payload)
        return Response(data, media_type="application/json")

    # ------------------------------------------------------------------ inside

    def _exclusive(self) -> asyncio.Lock:
        """Return the lock under which memory and weights change. Raises a 409 while they do."""
        lock = self._context.changing_weights.lock
        if lock.locked():
            raise RequestError("weights or memory of this server are changing", status=409, code="weights_busy")
        return lock

    async def _release(self, tags: Sequence[str]) -> None:
        if self._gate.num_inside:
            raise RequestError(
                f"{self._gate.num_inside} requests are running; memory is released when none is", code=BUSY_CODE
            )
        make = ReleaseMemory(query_id="", tags=tuple(tags), timeout_s=QUIET_S)
        reply = await self._context.client.command(lambda i: msgspec.structs.replace(make, query_id=i), MOVE_TIMEOUT_S)
        if not reply.ok:
            if self._context.config.parallel.dp_size > 1:
                await self._command_resume([tag for tag in tags if tag not in self._released])
            raise RequestError(reply.message, code=BUSY_CODE if LIVE in reply.message else "release_failed")
        self._released = tuple(tag for tag in MEMORY_TAGS if tag in (*self._released, *tags))

    async def _command_resume(self, tags: Sequence[str]) -> CommandReply:
        make = ResumeMemory(query_id="", tags=tuple(tags), server=uuid.uuid4().hex)
        return await self._context.client.command(lambda i: msgspec.structs.replace(make, query_id=i), MOVE_TIMEOUT_S)

    def _open_gate(self) -> None:
        """Admit requests again if nothing is released; not when the server shuts down meanwhile."""
        if not self._released and is_released(self._gate):
            self._gate.reopen()

    def _answer(self) -> Response:
        return json_response({"success": True, "released": list(self._released)})

    async def _tags(self, request: Request) -> tuple[str, ...]:
        """Return the tags of the body; all of them without any, as in SGLang."""
        body = convert(await self._body(request), MemoryTagsBody)
        unknown = set(body.tags or ()) - set(MEMORY_TAGS)
        if unknown:
            names = ", ".join(MEMORY_TAGS)
            raise RequestError(f"tags must be a list from {names}, got {body.tags}", field="tags")
        return tuple(tag for tag in MEMORY_TAGS if not body.tags or tag in body.tags)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON body and the query parameters `name` and `truncate_size`."""
        query: dict[str, Any] = {name: value for name, value in request.query_params.items() if name == "name"}
        size = request.query_params.get("truncate_size")
        if size is not None:
            query["truncate_size"] = int(size) if size.isascii() and size.isdigit() and len(size) < 10 else size
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return query
        return query | await read_json_object(request, self._context.max_body_bytes)


def _as_json(payload: bytes) -> bytes:
    """Return the values of a `WeightRows` as JSON; NaN and infinities are null."""
    rows = msgspec.msgpack.decode(payload, type=WeightRows)
    values = np.frombuffer(rows.values, np.float32).reshape(rows.shape).astype(np.float64)  # as SGLang writes them
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
