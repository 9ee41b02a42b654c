"""Server and model info, load, metrics, `/flush_cache`, `/abort_request`, `/logs`."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

import pdserve
from pdserve.base.host_facts import host_facts
from pdserve.base.log_ring import last_lines, parse_num_lines
from pdserve.base.process_use import own_processes
from pdserve.base.redaction import Redactor, secrets_of
from pdserve.config.access_group import shown
from pdserve.errors import RequestError
from pdserve.http.errors import error_object
from pdserve.observe.load_events import TOPIC as LOAD_TOPIC
from pdserve.observe.speculation import Acceptance
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.messages import ClearStorage, CommandReply, FlushCache
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert, json_response, read_json_object, until_disconnect
from pdserve.server.request.sampling_fields import RequestLimits
from pdserve.server.request.schemas import AbortBody
from pdserve.server.sglang_api.health import STATE_TIMEOUT_S, replica_health

FLUSH_TIMEOUT_S = 10.0
FLUSH_RETRY_S = 0.02
MAX_FLUSH_WAIT_S = 600.0


async def model_info(context: ServerContext, _: Request) -> Response:
    """Return the model info."""
    return json_response(_model_facts(context))


async def version(_: ServerContext, __: Request) -> Response:
    """Return the server's version."""
    return json_response({"version": pdserve.__version__})


async def weight_version(context: ServerContext, _: Request) -> Response:
    """Return the name of the version of the weights in use."""
    context.client.require_ready()
    return json_response({"weight_version": context.weight_version})


def _model_facts(context: ServerContext) -> dict[str, Any]:
    config, ready = context.config.model, context.client.ready
    return {
        "model_path": context.weights_path,
        "served_model_name": context.model_name,
        "tokenizer_path": config.tokenizer_path or config.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "weight_version": context.weight_version,
        "model_type": ready.model_type if ready else None,
        "architectures": ready.architectures if ready else None,
        "vocab_size": ready.vocab_size if ready else None,
        "max_context_length": ready.context_length if ready else None,
    }


def _flags(context: ServerContext) -> dict[str, Any]:
    """All flags by name, without secrets. No two groups share a name."""
    config = context.config
    groups = (getattr(config, field.name) for field in dataclasses.fields(config))
    return {name: value for group in groups for name, value in shown(group).items()}


def _state_fields(state: EngineState | None) -> dict[str, Any]:
    if state is None:
        return {"internal_states": []}
    fields = msgspec.to_builtins(state)
    assert isinstance(fields, dict)
    del fields["replicas"]
    return {**fields, "internal_states": [_internal_state(one) for one in state.replicas or [state]]}


def _internal_state(state: EngineState) -> dict[str, Any]:
    """One entry of `internal_states`: the state of a replica, with SGLang's names beside ours."""
    fields = msgspec.to_builtins(state)
    assert isinstance(fields, dict)
    del fields["replicas"]
    token_bytes = state.facts.get("kv_token_bytes")
    kv_gb = state.max_total_tokens * token_bytes / 1e9 if isinstance(token_bytes, int) else None
    acceptance = Acceptance.of_state(state)
    accept_length = None if acceptance is None else acceptance.accept_length
    return {
        **fields,
        "max_total_num_tokens": state.max_total_tokens,
        "effective_max_running_requests_per_dp": state.memory.get("rows_total"),
        "last_gen_throughput": state.gen_throughput,
        **({} if accept_length is None else {"avg_spec_accept_length": accept_length}),
        "load": state.num_running_reqs + state.num_queue_reqs,
        "memory_usage": {"kvcache": kv_gb, "token_capacity": state.max_total_tokens},
    }


def _sglang_facts(context: ServerContext) -> dict[str, Any]:
    """Names at the top level of SGLang's `/server_info` that are no flags of this server.

    The limits are null while the engine starts.
    """
    ready = context.client.ready
    limits = None if ready is None else RequestLimits.of(ready, context.mode)
    return {
        "max_total_num_tokens": ready.max_total_tokens if ready else None,
        "max_req_input_len": limits.most_prompt_tokens if limits else None,
        "context_length": ready.context_length if ready else context.config.model.context_length,
        "skip_tokenizer_init": context.tokenizer is None,
        "is_embedding": context.config.embedding.is_embedding,
        "stream_interval": 1,
        "lora_paths": context.adapters or None,
        "kv_events": _kv_events(context),
        "suspended_requests": 0 if context.suspended is None else len(context.suspended),
        "suspended_bytes": 0 if context.suspended is None else context.suspended.num_bytes,
        "load_events": _load_events(context),
    }


def _kv_events(context: ServerContext) -> dict[str, Any] | None:
    """Where KV events are published, under SGLang's names; None when they are off. Replica n has the ports + n."""
    events, ready = context.config.kv_events, context.client.ready
    if events is None or not context.config.wants_prefix_cache:
        return None
    facts = {} if ready is None else ready.facts
    load = _load_events(context)
    bound = {name: str(facts.get(name) or "") for name in ("kv_events_endpoint", "kv_events_replay_endpoint")}
    return {
        "publisher": "zmq",
        "endpoint": bound["kv_events_endpoint"] or events.endpoint.address,
        "endpoint_host": events.endpoint.host,
        "endpoint_port_base": _port(bound["kv_events_endpoint"]) or events.endpoint.port,
        "replay_endpoint": bound["kv_events_replay_endpoint"] or None,
        "replay_endpoint_port_base": _port(bound["kv_events_replay_endpoint"]),
        "bind": events.binds,
        "topic": events.topic,
        "format": events.wire_form,
        "block_size": context.config.memory.page_size,
        "dp_size": context.config.parallel.dp_size,
        **({} if load is None else {name: load[name] for name in ("load_endpoint_port_base", "load_topic")}),
    }


def _load_events(context: ServerContext) -> dict[str, Any] | None:
    """Where load is published, under SGLang's names; None when it is not. Replica n has the ports + n."""
    endpoint, ready = context.config.load_endpoint, context.client.ready
    if endpoint is None:
        return None
    bound = str(({} if ready is None else ready.facts).get("load_endpoint") or "")
    return {
        "endpoint": bound or endpoint.address,
        "endpoint_host": endpoint.host,
        "load_endpoint_port_base": _port(bound) or endpoint.port,
        "load_topic": LOAD_TOPIC,
        "dp_size": context.config.parallel.dp_size,
    }


def _port(endpoint: str) -> int | None:
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdigit() else None


async def server_info(context: ServerContext, _: Request) -> Response:
    """Return all flags, model info, facts of engine and host, and the scheduler's present counts after a self-audit."""
    ready = context.client.ready
    state = await context.client.state(STATE_TIMEOUT_S, audit=True)
    body = {
        **_flags(context),
        **_model_facts(context),
        **_sglang_facts(context),
        **_state_fields(state),
        "state_age_s": context.client.state_age_s,
        "replica_health": replica_health(context),
        "engine_facts": ready.facts if ready else {},
        "processes": {name: dataclasses.asdict(use) for name, use in own_processes().items()},
        "host_facts": dataclasses.asdict(host_facts()),
        "status": "ready" if ready else "not_ready",
        "control_token_id": context.control_token_id,
        "version": pdserve.__version__,
        **({} if context.prefill_servers is None else {"prefill_servers": context.prefill_servers()}),
    }
    return json_response(body)


async def get_load(context: ServerContext, _: Request) -> Response:
    """Return the load: a list with one entry per data-parallel rank."""
    context.client.require_ready()
    state = await context.client.state(STATE_TIMEOUT_S)
    if state is None:
        return json_response([_load(0, None, context.client.num_live)])
    return json_response([_load(rank, one, 0) for rank, one in enumerate(state.replicas or [state])])


def _load(dp_rank: int, state: EngineState | None, num_live: int) -> dict[str, int]:
    """The load of one replica. `state` None: no state was received yet, and the load is `num_live` requests."""
    return {
        "dp_rank": dp_rank,
        "num_tokens": state.num_used_tokens if state else 0,
        "num_reqs": state.num_running_reqs + state.num_queue_reqs if state else num_live,
        "num_running_reqs": state.num_running_reqs if state else 0,
        "num_waiting_reqs": state.num_queue_reqs if state else 0,
    }


async def metrics(context: ServerContext, _: Request) -> Response:
    """Return the metrics as Prometheus text.

    The scheduler's part is its last known state when it does not answer within a second.
    """
    if not context.config.observe.enable_metrics:
        raise RequestError("metrics are off (--no-enable-metrics)", status=404, code="metrics_off")
    state = await context.client.state(STATE_TIMEOUT_S)
    alive = {rank: each["alive"] is True for rank, each in enumerate(replica_health(context))}
    return Response(context.metrics.render(state, alive), media_type="text/plain; version=0.0.4; charset=utf-8")


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """Empty the prefix cache; 400 if requests still run after `timeout` seconds, a query parameter with default 0.

    A scheduler with running requests refuses, so that no request loses its pages.
    """
    reply = await until_disconnect(request, flush_when_idle(context, _flush_wait_s(request)))
    if not reply.ok:
        return json_response(error_object(reply.message, 400, code="busy"), status=400)
    return json_response({"success": True, "message": reply.message})


async def clear_storage(context: ServerContext, _: Request) -> Response:
    """Remove all pages of the store below the host tier, those of other servers too; 400 without a store."""
    reply = await context.client.command(lambda i: ClearStorage(query_id=i), FLUSH_TIMEOUT_S)
    if not reply.ok:
        return json_response(error_object(reply.message, 400, code="no_storage"), status=400)
    return json_response({"success": True, "message": reply.message})


def _flush_wait_s(request: Request) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= MAX_FLUSH_WAIT_S:
        raise RequestError(f"timeout must be 0 to {MAX_FLUSH_WAIT_S:g} seconds, got {text!r}", field="timeout")
    return wait_s


async def flush_when_idle(context: ServerContext, wait_s: float) -> CommandReply:
    """Empty the prefix cache, with retries for `wait_s` seconds. Returns the first ok reply, or the last reply."""
    deadline_s = time.monotonic() + wait_s
    while True:
        reply = await context.client.command(lambda i: FlushCache(query_id=i), FLUSH_TIMEOUT_S)
        if reply.ok or time.monotonic() >= deadline_s:
            return reply
        await asyncio.sleep(FLUSH_RETRY_S)


async def abort_request(context: ServerContext, request: Request) -> Response:
    """Abort one request by its id, or all that run. An unknown id is not an error: the request may just have ended.

    A suspended request of this id is dropped.
    """
    body = convert(await read_json_object(request, context.max_body_bytes), AbortBody)
    if body.rid is None and not body.abort_all:
        raise RequestError("rid is missing; give it, or abort_all: true", field="rid")
    num_aborted = context.client.abort(None if body.abort_all else body.rid)
    if body.rid is not None and not body.abort_all and context.suspended is not None:
        num_aborted += context.suspended.drop(body.rid)
    return json_response({"num_aborted": num_aborted})


async def logs(context: ServerContext, request: Request) -> Response:
    """Return the last `lines` log lines of each process of this server on this host, without secrets.

    Raises:
        RequestError: 400 naming `lines`.
    """
    most, access = parse_num_lines(request.query_params.get("lines")), context.config.access
    keys = [key for key in (access.api_key, access.admin_api_key) if key is not None]
    return json_response(
        {"processes": await asyncio.to_thread(last_lines, most, Redactor([*keys, *secrets_of(os.environ)]))}
    )
