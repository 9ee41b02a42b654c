"""Commands to a running engine: pause, continue, profile, `/declare_peer_dead`; and the load of every replica."""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

import pdserve
from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.messages import (
    CommandReply,
    ContinueGeneration,
    DeclarePeerDead,
    PauseGeneration,
    StartProfile,
    StopProfile,
)
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object
from pdserve.server.request.schemas import PauseBody, PeerBody, ProfileBody
from pdserve.server.sglang_api.health import STATE_TIMEOUT_S

COMMAND_TIMEOUT_S = 60.0
"""Seconds. A command waits for the current step, and writing a profile takes time."""
MAX_PROFILE_STEPS = 1_000_000
MAX_PROFILE_ID_BYTES = 200
PROFILE_DIR_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"


async def pause_generation(context: ServerContext, request: Request) -> Response:
    """Stop computation until `/continue_generation`; new requests are queued."""
    body = convert(await _body(context, request), PauseBody)
    mode = body.mode or "abort"
    reply = await context.client.command(lambda i: PauseGeneration(query_id=i, mode=mode), COMMAND_TIMEOUT_S)
    return json_response({"status": "ok", "message": reply.message})


async def continue_generation(context: ServerContext, request: Request) -> Response:
    """Resume computation."""
    await _body(context, request)
    reply = await context.client.command(lambda i: ContinueGeneration(query_id=i), COMMAND_TIMEOUT_S)
    return json_response({"status": "ok", "message": reply.message})


async def declare_peer_dead(context: ServerContext, request: Request) -> Response:
    """End the session with a peer and free the pages it could write to.

    Unsafe if the peer still runs: its writes then corrupt pages of other requests.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), PeerBody)
    order = DeclarePeerDead(query_id="", instance=body.instance)
    reply = await context.client.command(lambda i: msgspec.structs.replace(order, query_id=i), COMMAND_TIMEOUT_S)
    if not reply.ok:
        raise RequestError(reply.message, field="instance", status=404, code="no_such_peer")
    return json_response({"status": "ok", "message": reply.message})


async def start_profile(context: ServerContext, request: Request) -> Response:
    """Start torch's profiler, which writes one file per replica."""
    body = convert(await _body(context, request), ProfileBody)
    if body.num_steps is not None and not 1 <= body.num_steps <= MAX_PROFILE_STEPS:
        raise RequestError(f"num_steps must be in [1, {MAX_PROFILE_STEPS}], got {body.num_steps}", field="num_steps")
    profile_id, output_dir = body.profile_id, body.output_dir
    if profile_id is not None and (
        Path(profile_id).name != profile_id or "\0" in profile_id or len(profile_id.encode()) > MAX_PROFILE_ID_BYTES
    ):
        message = f"profile_id must be valid in a file name and have at most {MAX_PROFILE_ID_BYTES} bytes"
        raise RequestError(message, field="profile_id")
    if output_dir is not None and "\0" in output_dir:
        raise RequestError("output_dir must be the path of a directory", field="output_dir")
    order = StartProfile(
        query_id="",
        output_dir=output_dir or os.environ.get(PROFILE_DIR_VARIABLE) or tempfile.gettempdir(),
        profile_id=profile_id,
        num_steps=body.num_steps,
        activities=_activities(body.activities),
        record_shapes=bool(body.record_shapes),
        with_stack=bool(body.with_stack),
    )
    reply = await context.client.command(lambda i: msgspec.structs.replace(order, query_id=i), COMMAND_TIMEOUT_S)
    return _profile_answer(reply, "Start profiling.\n")


async def stop_profile(context: ServerContext, request: Request) -> Response:
    """Stop the profiler and write its file."""
    await _body(context, request)
    reply = await context.client.command(lambda i: StopProfile(query_id=i), COMMAND_TIMEOUT_S)
    return _profile_answer(reply, "Stop profiling.\n")


def _profile_answer(reply: CommandReply, done: str) -> Response:
    if not reply.ok:
        return json_response(error_object(reply.message, 400, code="profile"), status=400)
    return PlainTextResponse(f"{done}{reply.message}\n")


def _activities(names: list[str] | None) -> tuple[Literal["CPU", "GPU"], ...]:
    known: tuple[Literal["CPU", "GPU"], ...] = ("CPU", "GPU")
    if names is None:
        return known
    unknown = set(names) - set(known)
    if unknown or not names:
        raise RequestError(f"activities must be a list from {', '.join(known)}, got {names}", field="activities")
    return tuple(name for name in known if name in names)


async def _body(context: ServerContext, request: Request) -> dict[str, Any]:
    """The JSON body; an empty dict if the request has no body."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    return await read_json_object(request, context.max_body_bytes)


async def loads(context: ServerContext, request: Request) -> Response:
    """Return the load of every replica, or of the query's `dp_rank`, and the aggregate over these replicas."""
    context.client.require_ready()
    state = await context.client.state(STATE_TIMEOUT_S)
    states = [] if state is None else (state.replicas or [state])
    ranks = range(len(states))
    wanted = request.query_params.get("dp_rank")
    if wanted is not None:
        known = {str(rank) for rank in range(context.config.parallel.dp_size)}
        if wanted not in known:
            message = f"dp_rank must be in [0, {context.config.parallel.dp_size}), got {wanted!r}"
            raise RequestError(message, field="dp_rank")
        ranks = range(int(wanted), min(int(wanted) + 1, len(states)))
    entries = [_load(rank, states[rank], context) for rank in ranks]
    return json_response(
        {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": pdserve.__version__,
            "dp_rank_count": context.config.parallel.dp_size,
            "loads": entries,
            "aggregate": _aggregate(entries),
        }
    )


def _load(dp_rank: int, state: EngineState, context: ServerContext) -> dict[str, Any]:
    total = max(state.max_total_tokens, 1)
    counters = state.counters
    prompt, cached = counters.get("prompt_tokens", 0.0), counters.get("cached_tokens", 0.0)
    rows = state.memory.get("rows_total", 0)
    return {
        "dp_rank": dp_rank,
        "num_running_reqs": state.num_running_reqs,
        "num_waiting_reqs": state.num_queue_reqs,
        "num_total_reqs": state.num_running_reqs + state.num_queue_reqs,
        "num_used_tokens": state.num_used_tokens,
        "num_total_tokens": state.num_used_tokens,
        "max_total_num_tokens": state.max_total_tokens,
        "token_usage": state.num_used_tokens / total,
        "gen_throughput": round(state.gen_throughput, 2),
        "cache_hit_rate": cached / prompt if prompt else 0.0,
        "max_running_requests": rows,
        "utilization": state.num_running_reqs / rows if rows else 0.0,
        "disaggregation": {"mode": context.mode, **state.queues},
    }


def _aggregate(entries: list[dict[str, Any]]) -> dict[str, Any]:
    count = max(len(entries), 1)
    return {
        "total_running_reqs": sum(entry["num_running_reqs"] for entry in entries),
        "total_waiting_reqs": sum(entry["num_waiting_reqs"] for entry in entries),
        "total_reqs": sum(entry["num_total_reqs"] for entry in entries),
        "total_used_tokens": sum(entry["num_used_tokens"] for entry in entries),
        "avg_token_usage": sum(entry["token_usage"] for entry in entries) / count,
        "avg_utilization": sum(entry["utilization"] for entry in entries) / count,
    }
