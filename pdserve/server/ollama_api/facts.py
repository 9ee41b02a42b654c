"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version` of Ollama's API: facts about the one served model and its
adapters.
"""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import Response

import pdserve
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.ollama_api.generation import require_ollama_api
from pdserve.server.ollama_api.schemas import OllamaShowBody

NEVER = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays; as far away as at Ollama with a negative `keep_alive`."""


async def ollama_tags(context: ServerContext, _: Request) -> Response:
    """Serve `GET /api/tags`: the served model, and the loaded LoRA adapters.

    Raises:
        RequestError: 404 without `--enable-ollama-api`.
    """
    require_ollama_api(context)
    return json_response({"models": [_entry(context, name) for name in (context.model_name, *context.adapters)]})


async def ollama_ps(context: ServerContext, _: Request) -> Response:
    """Serve `GET /api/ps`: the models of `/api/tags`. They stay loaded.

    Raises:
        RequestError: 404 without `--enable-ollama-api`.
    """
    require_ollama_api(context)
    loaded = {"expires_at": NEVER, "size_vram": 0, "context_length": context.client.require_ready().context_length}
    models = [_entry(context, name) | loaded for name in (context.model_name, *context.adapters)]
    return json_response({"models": models})


async def ollama_root(context: ServerContext, _: Request) -> Response:
    """Serve `GET /`, with which Ollama's clients ask whether it runs.

    Raises:
        RequestError: 404 without `--enable-ollama-api`.
    """
    require_ollama_api(context)
    return Response(b"Ollama is running", media_type="text/plain")


async def ollama_show(context: ServerContext, request: Request) -> Response:
    """Serve `POST /api/show`: format, capabilities and sizes of the model.

    Raises:
        RequestError: 404 without `--enable-ollama-api`, or for another model with `--strict-model-name`.
    """
    require_ollama_api(context)
    body = convert(await read_json_object(request, context.max_body_bytes), OllamaShowBody)
    context.check_model(body.model or body.name)
    ready = context.client.require_ready()
    capabilities = ["completion"]
    if context.formats.tools is not None:
        capabilities.append("tools")
    if context.formats.thinking is not None or context.formats.harmony:
        capabilities.append("thinking")
    model_info = {
        "general.architecture": ready.model_type,
        f"{ready.model_type}.context_length": ready.context_length,
        f"{ready.model_type}.vocab_size": ready.vocab_size,
    }
    shown = {"modelfile": "", "parameters": "", "template": "", "details": _details(context)}
    return json_response({**shown, "model_info": model_info, "capabilities": capabilities, "modified_at": _at(context)})


async def ollama_version(context: ServerContext, _: Request) -> Response:
    """Serve `GET /api/version`: pdserve's version.

    Raises:
        RequestError: 404 without `--enable-ollama-api`.
    """
    require_ollama_api(context)
    return json_response({"version": pdserve.__version__})


def _entry(context: ServerContext, name: str) -> dict[str, Any]:
    digest = f"{zlib.crc32(f'{name} {context.weight_version}'.encode()):08x}"
    entry = {"name": name, "model": name, "modified_at": _at(context), "size": 0, "digest": digest}
    return {**entry, "details": _details(context)}


def _details(context: ServerContext) -> dict[str, Any]:
    ready = context.client.ready
    family = "" if ready is None else ready.model_type
    dtype = "" if ready is None else str(ready.facts.get("dtype", ""))
    details = {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}
    return {**details, "parameter_size": "", "quantization_level": dtype}


def _at(context: ServerContext) -> str:
    """The start of the server, which is when the model was loaded."""
    return datetime.fromtimestamp(context.started_s, UTC).isoformat().replace("+00:00", "Z")
