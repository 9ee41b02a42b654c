"""`/update_weights_from_disk` and `/update_weight_version`: other weights in a running server. Fields are SGLang's.

The weights are loaded beside those in use while requests go on. Then requests are held, the last running one ends or is
aborted, all ranks of all replicas swap, and the held requests start. No answer comes from both. A failure leaves the
weights in use. `scheduler/weights_update.py` is the engine's side.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.config.validate import wrong_version
from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import CommandReply, PauseGeneration
from pdserve.protocol.weights import EndWeightsUpdate, HoldRequests, InstallWeights, PrepareWeights, WeightsCommand
from pdserve.server.context import ServerContext, WeightsChange
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.weights_bodies import WeightsFromDiskBody, WeightsUpdateBody, WeightVersionBody
from pdserve.server.sglang_api.commands import COMMAND_TIMEOUT_S

CODE = "weights"
"""Code of errors about weights that cannot be used."""
LOAD_TIMEOUT_S = 3600.0
"""Seconds for all ranks to load."""
DRAIN_S = 300.0
"""Seconds that running requests have to end, when the body names no other."""
MAX_DRAIN_S = 86_400.0
REPLY_S = 60.0
"""Seconds for a command that waits for nothing but the present step."""
PREPARED_S = 600.0
"""Seconds that prepared weights are kept for the update that installs them."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """`make` makes the command that prepares weights, from a query id. Equal `key`: the same weights.

    `field`: of the body; where an error names one of `fields` instead, it is that one.
    """

    key: object
    make: Callable[[str], WeightsCommand]
    field: str
    fields: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _Update:
    """See `run_update`."""

    preparation: Preparation | None
    version: str | None
    abort_all: bool
    drain_s: float = DRAIN_S
    keep_pause: bool = False
    prepare_only: bool = False


async def update_weights_from_disk(context: ServerContext, request: Request) -> Response:
    """Change to the weights of the checkpoint `model_path`; 400 when they cannot be used, and the present ones stay."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightsFromDiskBody)
    if not body.model_path.strip() or "\0" in body.model_path:
        raise RequestError("model_path must be the path of a model", field="model_path")
    if body.load_format not in (None, "auto", "dummy"):
        raise RequestError(f"load_format must be auto or dummy, got {body.load_format!r}", field="load_format")
    if body.manifest is not None:
        raise RequestError("manifest is not supported: the files of model_path are read", field="manifest")
    load_format: Any = body.load_format
    return await run_update(
        context,
        Preparation(
            (body.model_path, load_format),
            lambda i: PrepareWeights(query_id=i, model_path=body.model_path, load_format=load_format),
            "model_path",
        ),
        body,
        prepare_only=body.prepare_only,
    )


async def update_weight_version(context: ServerContext, request: Request) -> Response:
    """Name the weights in use anew; requests so far are aborted, or with `abort_all_requests` false end first."""
    body = convert(await read_json_object(request, context.max_body_bytes), WeightVersionBody)
    version = checked_version(body.new_version, "new_version")
    answer = await _shielded(context, _Update(None, version, body.abort_all_requests))
    if answer.ok:
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})
    return _failed(answer)


async def run_update(
    context: ServerContext,
    preparation: Preparation,
    body: WeightsUpdateBody,
    *,
    prepare_only: bool = False,
) -> Response:
    """Prepare, hold, install, and go on; the answer has SGLang's fields.

    `prepare_only`: what is prepared is kept for the next update. The update goes on when the client leaves.

    Raises:
        RequestError: 400 naming the field; 409 while another update runs; 503 while the engine starts.
    """
    if body.flush_cache is False:
        raise RequestError(
            "flush_cache: false is not supported: cached KV belongs to the former weights", field="flush_cache"
        )
    version = None if body.weight_version is None else checked_version(body.weight_version, "weight_version")
    drain_s = DRAIN_S if body.drain_timeout_secs is None else body.drain_timeout_secs
    if not (math.isfinite(drain_s) and 0 < drain_s <= MAX_DRAIN_S):
        message = f"drain_timeout_secs must be above 0 and at most {MAX_DRAIN_S:g} seconds, got {drain_s}"
        raise RequestError(message, field="drain_timeout_secs")
    update = _Update(preparation, version, body.abort_all_requests, drain_s, body.keep_pause, prepare_only)
    answer = await _shielded(context, update)
    if not answer.ok:
        return _failed(answer)
    message = "Model weights are prepared." if prepare_only else "Succeeded to update model weights."
    fields = {"success": True, "message": message, "num_paused_requests": 0}
    return json_response({**fields, "weight_version": context.weight_version})


def checked_version(version: str, field: str) -> str:
    """Return a name of a version. Raises RequestError naming `field`."""
    wrong = wrong_version(version)
    if wrong is not None:
        raise RequestError(f"{field} {wrong}", field=field)
    return version


async def _update(context: ServerContext, update: _Update) -> CommandReply:
    """Carry out an update; returns the first reply that is no success, else the last one."""
    client, change, preparation = context.client, context.changing_weights, update.preparation
    client.require_ready()
    if change.lock.locked():
        raise RequestError("another update of the weights is running", status=409, code="weights_busy")
    async with change.lock:
        prepared = take_prepared(change)
        keeps = False
        try:
            if preparation is None and prepared is not None:
                await client.command(lambda i: EndWeightsUpdate(query_id=i), REPLY_S)
            if preparation is not None and (prepared is None or prepared != preparation.key):
                reply = await client.command(preparation.make, LOAD_TIMEOUT_S)
                check_begun(reply)
                if not reply.ok:
                    return _with_field(reply, preparation)
            if preparation is not None and update.prepare_only:
                keeps = True
                change.prepared = preparation.key
                change.expiry = asyncio.get_running_loop().call_later(PREPARED_S, _expire, context)
                return CommandReply(query_id="", ok=True, message="ok")
            hold = HoldRequests(query_id="", abort_all=update.abort_all, timeout_s=update.drain_s)
            wait_s = update.drain_s + REPLY_S
            reply = await client.command(lambda i: msgspec.structs.replace(hold, query_id=i), wait_s)
            if reply.ok:
                install = InstallWeights(query_id="", weight_version=update.version)
                reply = await client.command(lambda i: msgspec.structs.replace(install, query_id=i), wait_s)
            if reply.ok and update.keep_pause:
                await client.command(lambda i: PauseGeneration(query_id=i, mode="in_place"), COMMAND_TIMEOUT_S)
            return reply
        finally:
            if not keeps:
                await client.command(lambda i: EndWeightsUpdate(query_id=i), REPLY_S)


def check_begun(reply: CommandReply) -> None:
    """Raise RequestError, 409, if the engine has not begun a preparation: it still ends one that was given up."""
    if reply.is_final:
        raise RequestError(reply.message, status=409, code="weights_busy")


def take_prepared(change: WeightsChange) -> object:
    """Return the key of what is prepared, which this update uses or drops."""
    prepared, change.prepared = change.prepared, None
    if change.expiry is not None:
        change.expiry.cancel()
        change.expiry = None
    return prepared


def _expire(context: ServerContext) -> None:
    """Drop what is prepared: no update has used it."""
    change = context.changing_weights
    if change.lock.locked() or not context.client.alive:
        return
    change.prepared = change.expiry = None
    _keep(change, context.client.command(lambda i: EndWeightsUpdate(query_id=i), REPLY_S))


async def _shielded(context: ServerContext, update: _Update) -> CommandReply:
    """Carry out an update, which goes on when this call is cancelled."""
    return await asyncio.shield(_keep(context.changing_weights, _update(context, update)))


def _keep(change: WeightsChange, work: Coroutine[None, None, CommandReply]) -> asyncio.Task[CommandReply]:
    """Run `work` as a task that is not lost."""

    def ended(task: asyncio.Task[CommandReply]) -> None:
        change.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it is raised where somebody waits

    task = asyncio.get_running_loop().create_task(work)
    change.tasks.add(task)
    task.add_done_callback(ended)
    return task


def _with_field(reply: CommandReply, preparation: Preparation) -> CommandReply:
    """Return the reply of weights that cannot be used, with the field of the body that names them."""
    field = named_field(reply.message, preparation.fields) or preparation.field
    message = reply.message if f"{field}: " in reply.message else f"{field}: {reply.message}"
    failure = Failure(code=CODE, message=message, status=400, field=field)
    return msgspec.structs.replace(reply, message=message, failure=failure)


def named_field(message: str, fields: Sequence[str]) -> str | None:
    """Return the field of a body that an error of the engine names; None: none of `fields`."""
    return next((field for field in fields if f"{field}: " in message), None)


def _failed(reply: CommandReply) -> Response:
    field = None if reply.failure is None or not isinstance(reply.failure.field, str) else reply.failure.field
    fields = {"success": False, "message": reply.message, "num_paused_requests": 0}
    return json_response({**error_object(reply.message, 400, param=field, code=CODE), **fields}, status=400)
