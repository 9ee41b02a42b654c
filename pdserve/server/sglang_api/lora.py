"""`/load_lora_adapter` and `/unload_lora_adapter`: LoRA adapters that come and go while the server runs.

The command goes to the schedulers of all replicas; a router sends it to all servers. A request whose servers have
adapters of different contents fails with `lora_mismatch`.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.protocol.messages import LoadLora, UnloadLora
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.schemas import LoadLoraBody, UnloadLoraBody
from pdserve.server.sglang_api.commands import COMMAND_TIMEOUT_S


async def load_lora_adapter(context: ServerContext, request: Request) -> Response:
    """Load an adapter; 400 when its name is taken, or it is not one that this model can have."""
    body = convert(await read_json_object(request, context.max_body_bytes), LoadLoraBody)
    return _answer(context, await load_adapter(context, body.lora_name, body.lora_path))


async def unload_lora_adapter(context: ServerContext, request: Request) -> Response:
    """Unload an adapter once its running requests have ended; new ones get a 404 at once."""
    body = convert(await read_json_object(request, context.max_body_bytes), UnloadLoraBody)
    return _answer(context, await unload_adapter(context, body.lora_name))


async def load_adapter(context: ServerContext, name: str, path: str) -> str | None:
    """Load the adapter in the directory `path` as `name` on all replicas. Returns why it is not loaded, or None.

    Raises:
        RequestError: the server takes no adapters, or `name` is the model's name.
    """
    _require_lora(context)
    if context.is_model(name):
        raise RequestError(f"lora_name: {name!r} is the model's name", field="lora_name")
    async with context.changing_adapters:
        if name in context.adapters:
            return f"an adapter {name!r} is loaded already; unload it first"
        reply = await context.client.command(lambda i: LoadLora(query_id=i, name=name, path=path), COMMAND_TIMEOUT_S)
        if not reply.ok:
            if context.config.parallel.dp_size > 1:  # some replicas may have it
                await context.client.command(lambda i: UnloadLora(query_id=i, name=name), COMMAND_TIMEOUT_S)
            return reply.message
        context.adapters[name] = path
        return None


async def unload_adapter(context: ServerContext, name: str) -> str | None:
    """Refuse new requests with the adapter `name`, wait for those that run, and unload it on all replicas.

    Returns why it is not unloaded, or None. Raises RequestError when the server takes no adapters.
    """
    _require_lora(context)
    async with context.changing_adapters:
        context.adapters.pop(name, None)
        await context.client.wait_for_adapter(name)
        reply = await context.client.command(lambda i: UnloadLora(query_id=i, name=name), COMMAND_TIMEOUT_S)
        return None if reply.ok else reply.message


def _require_lora(context: ServerContext) -> None:
    context.client.require_ready()
    if not context.config.lora.is_on:
        raise RequestError("this server takes no LoRA adapters; start it with --enable-lora", code="lora_off")


def _answer(context: ServerContext, problem: str | None) -> Response:
    """The answer, with SGLang's fields; a `problem` is a 400."""
    body = {"success": problem is None, "loaded_adapters": dict(context.adapters)}
    if problem is None:
        return json_response(body)
    return json_response({**error_object(problem, 400, code="lora"), **body, "error_message": problem}, status=400)
