"""`/update_weights_from_disk` and `/update_weight_version`: other weights in a running server. Fields are SGLang's.

The weights are loaded beside those in use while requests go on. Then requests are held, the last running one ends or is
aborted, all ranks of all replicas swap, and the held requests start. No answer comes from both. A failure leaves the
weights in use. `scheduler/weights_update.py` is the engine's side.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.config.validate import wrong_version
from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.protocol.messages import CommandReply, PauseGeneration
from pdserve.protocol.weights import EndWeightsUpdate, HoldRequests, InstallWeights, PrepareWeights, WeightsCommand
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.schemas import WeightsFromDiskBody, WeightVersionBody
from pdserve.server.sglang_api.commands import COMMAND_TIMEOUT_S

LOAD_TIMEOUT_S = 3600.0
"""Seconds for all ranks to load."""
DRAIN_S = 300.0
"""Seconds that running requests have to end, when the body names no other."""
MAX_DRAIN_S = 86_400.0
REPLY_S = 60.0
"""Seconds for a command that waits for nothing but the present step."""
PREPARATIONS = Callable[[str], WeightsCommand]
"""Makes the command that prepares weights, from a query id."""


async def update_weights_from_disk(context: ServerContext, request: Request) -> Response:
    """Change to the weights of the checkpoint `model_path`; 400 when they cannot be used, and the present ones stay."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightsFromDiskBody)
    if not body.model_path.strip() or "\0" in body.model_path:
        raise RequestError("model_path must be the path of a model", field="model_path")
    if body.flush_cache is False:
        raise RequestError(
            "flush_cache: false is not supported: cached KV belongs to the former weights", field="flush_cache"
        )
    if body.load_format not in (None, "auto", "dummy"):
        raise RequestError(f"load_format must be auto or dummy, got {body.load_format!r}", field="load_format")
    if body.manifest is not None:
        raise RequestError("manifest is not supported: the files of model_path are read", field="manifest")
    load_format: Any = body.load_format
    return await run_update(
        context,
        lambda i: PrepareWeights(query_id=i, model_path=body.model_path, load_format=load_format),
        body.weight_version,
        abort_all=body.abort_all_requests,
        keep_pause=body.keep_pause,
        drain_s=body.drain_timeout_secs,
    )


async def update_weight_version(context: ServerContext, request: Request) -> Response:
    """Name the weights in use anew; requests so far are aborted, or with `abort_all_requests` false end first."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightVersionBody)
    version = checked_version(body.new_version, "new_version")
    answer = await _shielded(_update(context, None, version, body.abort_all_requests, False, DRAIN_S))
    if answer.ok:
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})
    return _failed(answer.message)


async def run_update(
    context: ServerContext,
    prepare: PREPARATIONS | None,
    version: str | None,
    *,
    abort_all: bool,
    keep_pause: bool = False,
    drain_s: float | None = None,
) -> Response:
    """Prepare, hold, install, and go on; the answer has SGLang's fields.

    `prepare` None: the weights stay. `version`: name of the new version; None: it stays. `drain_s`: seconds that
    running requests have to end; None: `DRAIN_S`. The update goes on when the client leaves.

    Raises:
        RequestError: 400 naming the field; 409 while another update runs; 503 while the engine starts.
    """
    version = None if version is None else checked_version(version, "weight_version")
    drain_s = DRAIN_S if drain_s is None else drain_s
    if not (math.isfinite(drain_s) and 0 < drain_s <= MAX_DRAIN_S):
        message = f"drain_timeout_secs must be above 0 and at most {MAX_DRAIN_S:g} seconds, got {drain_s}"
        raise RequestError(message, field="drain_timeout_secs")
    answer = await _shielded(_update(context, prepare, version, abort_all, keep_pause, drain_s))
    if not answer.ok:
        return _failed(answer.message)
    body = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    return json_response({**body, "weight_version": context.weight_version})


def checked_version(version: str, field: str) -> str:
    """Return a name of a version. Raises RequestError naming `field`."""
    wrong = wrong_version(version)
    if wrong is not None:
        raise RequestError(f"{field} {wrong}", field=field)
    return version


async def _update(
    context: ServerContext,
    prepare: PREPARATIONS | None,
    version: str | None,
    abort_all: bool,
    keep_pause: bool,
    drain_s: float,
) -> CommandReply:
    """Carry out an update; returns the first reply that is no success, else that of the install."""
    client = context.client
    client.require_ready()
    if context.changing_weights.locked():
        raise RequestError("another update of the weights is running", status=409, code="weights_busy")
    async with context.changing_weights:
        try:
            if prepare is not None:
                reply = await client.command(prepare, LOAD_TIMEOUT_S)
                if not reply.ok:
                    return reply
            reply = await client.command(
                lambda i: HoldRequests(query_id=i, abort_all=abort_all, timeout_s=drain_s), drain_s + REPLY_S
            )
            if not reply.ok:
                return reply
            reply = await client.command(
                lambda i: InstallWeights(query_id=i, weight_version=version), drain_s + REPLY_S
            )
            if reply.ok and keep_pause:
                await client.command(lambda i: PauseGeneration(query_id=i, mode="in_place"), COMMAND_TIMEOUT_S)
            return reply
        finally:
            await client.command(lambda i: EndWeightsUpdate(query_id=i), REPLY_S)


async def _shielded(update: Any) -> CommandReply:
    """Wait for an update, which goes on when this call is cancelled."""
    task = asyncio.ensure_future(update)
    _RUNNING.add(task)
    task.add_done_callback(_ended)
    found: CommandReply = await asyncio.shield(task)
    return found


_RUNNING: set[asyncio.Future[CommandReply]] = set()
"""Updates under way: the event loop keeps no reference to a task."""


def _ended(task: asyncio.Future[CommandReply]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        task.exception()  # it is raised where somebody waits


def _failed(message: str) -> Response:
    fields = {"success": False, "message": message, "num_paused_requests": 0}
    return json_response({**error_object(message, 400, code="weights"), **fields}, status=400)
