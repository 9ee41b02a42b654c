"""`GET /v1/models` and `/v1/models/{name}`: the model and its LoRA adapters, in OpenAI's or in Anthropic's form.

Clients of Anthropic's API send the header `anthropic-version` with every request; they get Anthropic's form, in pages.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.base.log import current_request_id
from pdserve.errors import RequestError
from pdserve.http.error_forms import anthropic_error
from pdserve.http.errors import HttpRefusal
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import json_response

ANTHROPIC_VERSION = "anthropic-version"
"""Header by which a client of Anthropic's API is recognized."""
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
"""Models in one page of Anthropic's form."""


async def list_models(context: ServerContext, request: Request) -> Response:
    """Return the list of models: the model, and then its LoRA adapters."""
    if ANTHROPIC_VERSION not in request.headers:
        cards = [_openai_card(context, name) for name in _names(context)]
        return json_response({"object": "list", "data": cards})
    try:
        names, has_more = _page(_names(context), request)
    except RequestError as error:
        return _anthropic_refusal(error)
    found = [_anthropic_card(context, name) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return json_response({"data": found, "has_more": has_more, **ends})


async def get_model(context: ServerContext, request: Request) -> Response:
    """Return the card of one model.

    Raises:
        RequestError: 404 when the path names another model than the served one.
    """
    name = request.path_params["name"]
    is_known = name in context.adapters or context.is_model(name)
    if ANTHROPIC_VERSION in request.headers:
        if not is_known:
            return _anthropic_refusal(context.no_such_model(name))
        return json_response(_anthropic_card(context, name if name in context.adapters else context.model_name))
    if not is_known:
        raise context.no_such_model(name)
    return json_response(_openai_card(context, name if name in context.adapters else context.model_name))


def _names(context: ServerContext) -> list[str]:
    return [context.model_name, *context.adapters]


def _page(names: list[str], request: Request) -> tuple[list[str], bool]:
    """Return the names of one page by `limit`, `after_id` and `before_id`, and whether more follow in its direction.

    An id that is not served, such as that of an unloaded adapter, gives an empty page.

    Raises:
        RequestError: 400 naming `limit`.
    """
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT)) else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise RequestError(f"limit must be 1 to {MAX_LIMIT}, got {text[:64]!r}", field="limit")
    after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
    if before is not None:
        left = names[: names.index(before)] if before in names else []
        return left[-limit:], len(left) > limit
    left = names if after is None else names[names.index(after) + 1 :] if after in names else []
    return left[:limit], len(left) > limit


def _openai_card(context: ServerContext, name: str) -> dict[str, Any]:
    ready, is_adapter = context.client.ready, name in context.adapters
    return {
        "id": name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "pdserve",
        "root": context.adapters[name] if is_adapter else context.config.model.model_path,
        "parent": context.model_name if is_adapter else None,
        "max_model_len": ready.context_length if ready else None,
    }


def _anthropic_card(context: ServerContext, name: str) -> dict[str, Any]:
    ready = context.client.ready
    length = ready.context_length if ready else None
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.started_s, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def _anthropic_refusal(error: RequestError) -> Response:
    body = anthropic_error(HttpRefusal.of(error).body, current_request_id())
    return json_response(body, status=error.status)
