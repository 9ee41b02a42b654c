"""HTTP API that lists, adds, drains and removes workers while the router runs. Paths and schemas are sglang-router's.

    GET    /workers                 all workers          POST /workers  {"url", "worker_type", "bootstrap_port"} -> 202
    GET    /workers/{id or URL}     one worker
    PUT    /workers/{id or URL}     {"draining": true}: no new requests; false: new requests again
    DELETE /workers/{id or URL}     drain, then remove when the last request has ended; ?force=true: remove now

Also the older paths: POST /add_worker?url=, POST /remove_worker?url=, GET /list_workers. Called by `app`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from pdserve.base.hosts import server_url
from pdserve.errors import ConfigError
from pdserve.router.config.config import RouterConfig, WorkerRole, WorkerSpec
from pdserve.router.http import BODY, error_response, json_response
from pdserve.router.workers.workers import Registry, Worker

FOREIGN = frozenset(
    {
        *("chat_template", "connection_mode", "cost", "disable_health_check", "dp_rank", "dp_size", "health"),
        *("health_check_interval_secs", "health_check_timeout_secs", "health_failure_threshold"),
        *("health_success_threshold", "kv_connector", "kv_role", "labels", "max_connection_attempts", "model_id"),
        *("model_type", "priority", "reasoning_parser", "runtime", "runtime_type", "tokenizer_path", "tool_parser"),
    }
)
"""Fields of sglang-router's API that this router does not support."""
MAX_PORT_DIGITS = 5


class AddBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /workers`. Without a `bootstrap_port` the router reads it from a prefill worker's `/get_server_info`."""

    url: str
    worker_type: Literal["prefill", "decode", "regular"] | None = None
    bootstrap_port: int | None = None
    api_key: str | None = None


class ChangeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`PUT /workers/{id}`."""

    draining: bool


Body = TypeVar("Body", bound=msgspec.Struct)


class BadBody(Exception):
    """An invalid request, with the message and the invalid field."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class WorkersApi:
    """The handlers."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        on_change: Callable[[], None],
        now: Callable[[], float],
        describe_events: Callable[[Worker], dict[str, Any] | None],
    ) -> None:
        """`describe_events`: the state of a worker's KV events; None if they are not used."""
        self._config = config
        self._describe_events = describe_events
        self._registry = registry
        self._on_change = on_change
        self._now = now

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of this API."""
        one = "/workers/{name:.+}"
        return [
            web.get("/workers", self.list_all),
            web.post("/workers", self.add),
            web.get(one, self.show),
            web.put(one, self.change),
            web.delete(one, self.remove),
            web.get("/list_workers", self.list_urls),
            web.post("/add_worker", self.add_by_query),
            web.post("/remove_worker", self.remove_by_query),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """List the state of all workers."""
        workers = self._registry.workers
        stats = {f"{role.value}_count": sum(worker.spec.role is role for worker in workers) for role in WorkerRole}
        return json_response(
            {"workers": [self._described(worker) for worker in workers], "total": len(workers), "stats": stats}
        )

    async def list_urls(self, request: web.Request) -> web.Response:
        """List the URLs of all workers."""
        return json_response({"urls": [worker.spec.url for worker in self._registry.workers]})

    async def show(self, request: web.Request) -> web.Response:
        """Return one worker's state."""
        worker = self._find(request)
        return _not_found(request) if worker is None else json_response(self._described(worker))

    async def add(self, request: web.Request) -> web.Response:
        """Add a worker (202), which gets requests as soon as it is healthy."""
        try:
            body = parse_body(request[BODY], AddBody)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        return self._add(body)

    async def add_by_query(self, request: web.Request) -> web.Response:
        """Add a worker given by query parameters."""
        fields: dict[str, Any] = dict(request.query)
        port = fields.get("bootstrap_port", "")
        if port.isdecimal() and len(port) <= MAX_PORT_DIGITS:
            fields["bootstrap_port"] = int(port)
        try:
            body = parse_body(msgspec.json.encode(fields), AddBody)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        return self._add(body)

    async def change(self, request: web.Request) -> web.Response:
        """Drain a worker, or resume it."""
        worker = self._find(request)
        if worker is None:
            return _not_found(request)
        try:
            body = parse_body(request[BODY], ChangeBody)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        (self._registry.drain if body.draining else self._registry.resume)(worker)
        self._on_change()
        return _accepted(worker, "draining" if body.draining else "in use")

    async def remove(self, request: web.Request) -> web.Response:
        """Drain a worker and remove it when its last request has ended (202)."""
        return self._remove(request, self._find(request))

    async def remove_by_query(self, request: web.Request) -> web.Response:
        """Drain and remove the worker with the URL `?url=`."""
        return self._remove(request, self._registry.find(request.query.get("url", "")))

    def _add(self, body: AddBody) -> web.Response:
        try:
            spec = self._spec(body)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        known = self._registry.find(spec.url)
        if known is None:
            worker = self._registry.add(spec)
            return _accepted(worker, "added; gets requests as soon as it is healthy", location=True)
        if known.spec != spec:
            message = f"{spec.url} exists as a {known.spec.role} worker with other settings; remove it first"
            return error_response(409, message, "worker_exists", param="url")
        self._registry.resume(known)
        self._on_change()
        return _accepted(known, "exists already", location=True)

    def _spec(self, body: AddBody) -> WorkerSpec:
        try:
            url = server_url(body.url, field="url")
        except ConfigError as error:
            raise BadBody(str(error).removeprefix("--"), "url") from error
        names = [role.value for role in self._config.roles]
        role = body.worker_type or (names[0] if len(names) == 1 else None)
        if role not in names:
            raise BadBody(f"worker_type must be {' or '.join(names)} here, got {role!r}", "worker_type")
        port = body.bootstrap_port
        if port is not None and (role != WorkerRole.PREFILL or not 1 <= port <= 65535):
            raise BadBody("bootstrap_port must be 1 to 65535, and is for prefill workers only", "bootstrap_port")
        if body.api_key is not None and not (body.api_key.isascii() and body.api_key.isprintable()):
            raise BadBody("api_key must be printable ASCII", "api_key")
        ask = role == WorkerRole.PREFILL and port is None
        return WorkerSpec(
            role=WorkerRole(role), url=url, bootstrap_port=port, ask_bootstrap_port=ask, api_key=body.api_key
        )

    def _remove(self, request: web.Request, worker: Worker | None) -> web.Response:
        if worker is None:
            return _not_found(request)
        running = worker.inflight
        if request.query.get("force", "").lower() in ("true", "1"):
            self._registry.forget(worker)
        else:
            self._registry.remove(worker)
        self._on_change()
        return _accepted(worker, f"no new requests; {running} requests still run there")

    def _described(self, worker: Worker) -> dict[str, Any]:
        events = self._describe_events(worker)
        return describe(worker, self._now()) | ({} if events is None else {"kv_events": events})

    def _find(self, request: web.Request) -> Worker | None:
        return self._registry.find(request.match_info["name"])


def describe(worker: Worker, now: float) -> dict[str, Any]:
    """Return a worker's state at the time `now`: sglang-router's fields, then fields of this router."""
    report = worker.report
    return {
        "id": worker.id,
        "url": worker.spec.url,
        "model_id": worker.facts.get("served_model_name") or worker.facts.get("model_path") or "unknown",
        "worker_type": worker.spec.role.value,
        "bootstrap_port": worker.bootstrap_port,
        "is_healthy": worker.healthy,
        "load": worker.inflight,
        "connection_mode": "HTTP",
        "metadata": dict(worker.facts),
        "draining": worker.draining,
        "pod_ready": worker.pod_ready,
        "num_moving": worker.num_moving,
        "num_moved_away": worker.num_moved_away,
        "breaker": worker.breaker.state(now).value,
        "reported": None if report is None else {"num_reqs": report.requests, "num_tokens": report.tokens},
        "last_error": worker.last_error,
    }


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Parse a JSON object as `kind`; BadBody names the invalid field."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        for name, value in fields.items():
            if name in FOREIGN and value is not None:
                raise BadBody(f"{name} is a field of sglang-router that is not supported here", name)
        given = {name: value for name, value in fields.items() if name not in FOREIGN}
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadBody(str(error), _field_of(str(error))) from error
    except msgspec.DecodeError as error:
        raise BadBody(f"the body is not JSON: {error}", None) from error


def _field_of(message: str) -> str | None:
    """Return the field in an error message of msgspec: `$.field` for an invalid value, else in backquotes."""
    found = re.search(r"\$\.(\w+)", message) or re.search(r"field `(\w+)`", message)
    return None if found is None else found.group(1)


def _accepted(worker: Worker, message: str, *, location: bool = False) -> web.Response:
    path = f"/workers/{worker.id}"
    body = {"status": "accepted", "worker_id": worker.id, "url": worker.spec.url, "message": message}
    headers = {"Location": path} if location else None
    return json_response(body | ({"location": path} if location else {}), status=202, headers=headers)


def _not_found(request: web.Request) -> web.Response:
    name = request.match_info.get("name", request.query.get("url", ""))
    return error_response(404, f"no worker has the id or URL {name!r}", "worker_not_found")
