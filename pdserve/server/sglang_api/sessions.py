"""Endpoints of SGLang's sessions: `/open_session`, `/close_session`, and `session_params` of `/generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.credentials import authorization_of
from pdserve.http.session_store import (
    CloseSessionBody,
    OpenSessionBody,
    OpenSessions,
    SessionFields,
    SessionTurn,
    check_alone,
    required,
)
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object


async def open_session(context: ServerContext, request: Request) -> Response:
    """Serve `POST /open_session`: the answer is the session's id.

    Raises:
        RequestError: 400 naming the field, also on a server of a pair; 503: see `OpenSessions.open`.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), OpenSessionBody)
    store = _store(context, "session_id")
    return json_response(store.open(body, _owner(context, request), lambda node: context.client.abort(node.rid)))


async def close_session(context: ServerContext, request: Request) -> Response:
    """Serve `POST /close_session`. Raises RequestError: see `OpenSessions.close`."""
    body = convert(await read_json_object(request, context.max_body_bytes), CloseSessionBody)
    _store(context, "session_id").close(required(body.session_id, "session_id"), _owner(context, request))
    return Response()


def begin_turn(
    context: ServerContext, request: Request | None, given: Any, rid: Any, prompts: Sequence[list[int]], n: int
) -> SessionTurn:
    """Return the turn of a `/generate` body: `given` are its `session_params`, `rid` its id, `prompts` its prompts.

    Raises:
        RequestError: 400, 404 or 503 naming the field.
    """
    field = "session_params"
    store = _store(context, field)
    params = convert(given, SessionFields, prefix=field)
    check_alone(len(prompts), n)
    if rid is not None and not isinstance(rid, str):
        raise RequestError("rid must be text for a request of a session", field="rid")
    owner = "" if request is None else _owner(context, request)
    session = store.find(required(params.id, f"{field}.id"), owner, f"{field}.id")
    tokenizer = context.tokenizer
    bos = None if tokenizer is None else tokenizer.bos_token_id
    turn = session.begin(params, rid or secrets.token_hex(16), prompts[0], bos)
    prompt = turn.prompt
    num_chars = len(prompt) if tokenizer is None else len(tokenizer.decode(prompt, skip_special=False))
    session.check_chars(num_chars)
    store.check_room(len(prompt))
    return turn


def _store(context: ServerContext, field: str) -> OpenSessions:
    """Return the sessions of this server. Raises RequestError, 400 naming `field`, if it has none."""
    if context.sessions is None or (context.mode != "null" and context.prefill_servers is None):
        raise no_sessions(context, field)
    return context.sessions


def no_sessions(context: ServerContext, field: str) -> RequestError:
    """Return the error of a request for a session of a server that has none, or of the wrong half of a pair."""
    message = f"{field}: a {context.mode} server has no sessions; open them at pdserve's router"
    return RequestError(message, field=field, code="unsupported")


def _owner(context: ServerContext, request: Request) -> str:
    """Return the valid API key of a request; empty on a server without keys."""
    return context.config.access.keys.find(authorization_of(request.headers)) or ""
