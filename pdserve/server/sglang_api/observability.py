"""Observability of a server beside `/metrics`: `GET /observe`, the request log, traces.

`create_app` calls `install`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

import pdserve
from pdserve.errors import PdserveError
from pdserve.observe.engine_metrics import pages_by_state
from pdserve.observe.json_lines import JsonLines
from pdserve.observe.metrics import RecentRequests
from pdserve.observe.request_log import RequestLog
from pdserve.observe.tracing import Tracing, open_tracing
from pdserve.protocol.engine_state import EngineState, Flow
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import json_response
from pdserve.server.http.middleware import CallMiddleware
from pdserve.server.sglang_api.health import STATE_TIMEOUT_S, replica_health

KINDS = {"null": "unified", "prefill": "prefill", "decode": "decode"}


class ServerObservability:
    """Registers the request listeners with the engine client of `context`.

    Raises:
        ConfigError: traces are enabled and OpenTelemetry is not installed, or the log cannot be written.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._recent = RecentRequests()
        config = context.config.observe
        self.tracing: Tracing | None = None
        self._log: RequestLog | None = None
        context.client.add_listener(self._recent)
        if config.enable_trace:
            self.tracing = open_tracing(KINDS[context.mode], context.model_name, config.otlp_traces_endpoint)
            context.client.add_listener(self.tracing)
        if config.log_requests:
            lines = JsonLines(config.log_requests_target, f"requests-{KINDS[context.mode]}", "log_requests_target")
            context.metrics.show(lambda: {"log_lines_dropped": lines.num_dropped})
            text_of = None if context.tokenizer is None else context.tokenizer.decode
            self._log = RequestLog(lines, config.log_requests_level, text_of)
            context.client.add_listener(self._log)

    async def observe(self) -> Response:
        """Return a snapshot of this server, from one state query; docs/observability.md lists the fields."""
        context = self._context
        state = await context.client.state(STATE_TIMEOUT_S)
        context.metrics.speculation.add(state)
        acceptance = context.metrics.speculation.whole()
        states = [] if state is None else state.replicas or [state]
        body = {
            "server": self._server(),
            "replicas": [
                health | _replica(states[rank] if rank < len(states) else None)
                for rank, health in enumerate(replica_health(context))
            ],
            "edges": [edge for one in states for edge in _edges(one)],
            "rates": {
                "generation_tokens_per_s": context.metrics.tokens_per_s,
                "cache_hit_rate": context.metrics.cache_hit_rate,
                "spec_accept_length": None if acceptance is None else acceptance.accept_length or 0.0,
                "spec_accept_rate": None if acceptance is None else acceptance.accept_rate or 0.0,
            },
            "requests": self._recent.as_json(),
        }
        return json_response(body)

    def close(self) -> None:
        """Write the buffered log lines and export the buffered spans."""
        if self._log is not None:
            self._log.close()
        if self.tracing is not None:
            self.tracing.close()

    def _server(self) -> dict[str, Any]:
        context = self._context
        try:
            context.client.require_ready()
            status, trouble = "ready", None
        except PdserveError as error:
            status, trouble = "not_ready", str(error)
        return {
            "model": context.model_name,
            "mode": context.mode,
            "version": pdserve.__version__,
            "started_at": context.started_s,
            "status": status,
            "trouble": trouble,
            "state_age_s": context.client.state_age_s,
            "live_requests": context.client.num_live,
        }


def _replica(state: EngineState | None) -> dict[str, Any]:
    if state is None:
        return {"state": None}
    pages = pages_by_state(state)
    held = {name: state.memory.get(f"pages_held_{name}", 0) for name in ("remote", "send")}
    return {
        "state": {
            "instance": state.facts.get("instance"),
            "endpoint": state.facts.get("control_endpoint"),
            "transfer_backend": state.facts.get("transfer_backend"),
            "queues": state.queues,
            "running": state.num_running_reqs,
            "waiting": state.num_queue_reqs,
            "tokens": {"used": state.num_used_tokens, "max": state.max_total_tokens},
            "pages": {"total": state.memory.get("pages_total", 0), **pages},
            "pages_held": held,
            "tiers": _tiers(state),
            "failures": state.failures,
            "audit": state.audit,
        }
    }


def _tiers(state: EngineState) -> dict[str, Any]:
    """Return the KV tiers below the device; None without a tier. Traffic of the store is in bytes since the start."""
    return {
        "host_used": state.memory.get("hicache_host_used_tokens"),
        "host_max": state.memory.get("hicache_host_total_tokens"),
        "store": state.facts.get("hicache_storage_backend"),
        "store_read_bytes": state.facts.get("hicache_storage_bytes_read"),
        "store_written_bytes": state.facts.get("hicache_storage_bytes_written"),
    }


def _edges(state: EngineState) -> list[dict[str, Any]]:
    """Build an entry per peer and direction. KV is sent from prefill to decode.

    The other direction has an entry only if it has transferred bytes or failed.
    """
    here = state.facts.get("control_endpoint")
    prefills = state.facts.get("disaggregation_mode") == "prefill"
    found = []
    for peer in state.peers:
        for sends, flow in ((True, peer.sent), (False, peer.received)):
            if sends is prefills or flow.bytes or flow.failures:
                ends = {"from": here, "to": peer.endpoint} if sends else {"from": peer.endpoint, "to": here}
                session = {"peer_state": peer.state, "heartbeat_age_s": peer.heartbeat_age_s}
                found.append(ends | session | _flow(flow))
    return found


def _flow(flow: Flow) -> dict[str, Any]:
    return {
        "in_flight": flow.in_flight,
        "gb_per_s": flow.recent_bytes_s / 1e9,
        "gb_per_s_writing": flow.bytes / flow.write_s / 1e9 if flow.write_s else None,
        "bytes": flow.bytes,
        "transfers": flow.transfers,
        "failures": flow.failures,
    }


def install(app: FastAPI, context: ServerContext) -> ServerObservability:
    """Add routes and middleware to `app`, which closes the returned object."""
    observer = ServerObservability(context)
    tracing = observer.tracing
    app.add_middleware(CallMiddleware, open_span=None if tracing is None else tracing.call)

    @app.get("/observe", response_model=None)
    async def get_observe() -> Response:
        return await observer.observe()

    return observer
