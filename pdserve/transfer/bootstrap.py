"""Where decode servers find the replicas of a prefill server: a small HTTP server next to it, and the clients.

    PUT /route                    a prefill replica registers a `ReplicaRoute` (JSON)
    GET /route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1
                                  the facts that all replicas share
    GET /route?engine_rank=R&target_dp_group=D&target_pp_rank=P
                                  the route to replica D, whose leader speaks for all its ranks
    GET /health                   200 once all replicas are there, else 503

The query names are SGLang's; its newer `prefill_dp_rank`, `target_tp_rank` and `prefill_cp_rank` mean the same.
The server runs in the API process of a prefill server; `register_route` is called by its scheduler processes, the
`fetch_*` functions by the directory threads of decode servers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
from aiohttp import web

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.bootstrap_routes import ReplicaRoute, RouteTable, ServerFacts, parse_query

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
START_TIMEOUT_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")

__all__ = ["BootstrapServer", "ReplicaRoute", "ServerFacts", "fetch_facts", "fetch_replica", "register_route"]


class BootstrapServer:
    """The HTTP server, on a thread and an event loop of its own. `port` 0 picks a free one; see `.port`.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, token: str = "") -> None:
        self._token = token
        self._table = RouteTable()
        self._rejected = 0
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, port, started)), name="bootstrap", daemon=True
        )
        self._thread.start()
        try:
            self.port = started.result(START_TIMEOUT_S)
        except OSError as error:
            raise ConfigError(
                f"the bootstrap server cannot listen on {host}:{port}: {error.strerror or error}",
                field="disaggregation_bootstrap_port",
            ) from error

    @property
    def rejected(self) -> int:
        """Requests refused for what they said or for a wrong token. Any thread."""
        return self._rejected

    @property
    def complete(self) -> bool:
        """True while it serves and all replicas have registered. Any thread."""
        return self._thread.is_alive() and self._table.complete

    def close(self) -> None:
        """Stop serving and end the thread. Any thread, any number of times."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)

    async def _serve(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_put("/route", self._guarded(self._put))
        app.router.add_get("/route", self._guarded(self._get))
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            started.set_result(int(runner.addresses[0][1]))
        except OSError as error:
            started.set_exception(error)
            await runner.cleanup()
            return
        await self._stop.wait()
        await runner.cleanup()

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            sent = request.headers.get("Authorization", "")
            if self._token and not hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
                return self._refuse(401, "the control token is missing or wrong; set PDSERVE_CONTROL_TOKEN alike")
            return await handler(request)

        return guarded

    def _refuse(self, status: int, message: str) -> web.Response:
        self._rejected += 1
        log.warning("bootstrap request refused: %s", message)
        return web.json_response({"error": {"message": message}}, status=status)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            self._table.put(msgspec.json.decode(body, type=ReplicaRoute))
        except (msgspec.MsgspecError, ValueError) as error:
            return self._refuse(400, f"not a route: {error}")
        return web.json_response({"ok": True})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        try:
            ranks = parse_query(request.query)
        except ValueError as error:
            return self._refuse(400, str(error))
        facts = self._table.facts
        if facts is None or not self._table.complete:
            return web.json_response({"error": {"message": "not all prefill replicas have registered yet"}}, status=503)
        if not ranks:
            return _json(facts)
        found = self._table.find(ranks.get("tp_rank", 0), ranks.get("dp_rank", 0), ranks.get("pp_rank", 0))
        if found is None or ranks.get("cp_rank", 0) != 0:
            return web.json_response({"error": {"message": f"there is no rank {ranks}"}}, status=404)
        return _json(found)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            text="ok" if self._table.complete else "waiting", status=200 if self._table.complete else 503
        )


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def register_route(host: str, port: int, route: ReplicaRoute, token: str = "", timeout_s: float = 5.0) -> None:
    """Register a replica with the bootstrap server at `host:port`. Blocks up to `timeout_s`.

    Raises:
        TransferError: not reachable (retryable), or refused (not retryable; the text names the field).
    """
    _request("PUT", host, port, token, timeout_s, body=msgspec.json.encode(route))


def fetch_facts(host: str, port: int, token: str = "", timeout_s: float = 5.0) -> ServerFacts:
    """What all replicas of the prefill server share. Blocks up to `timeout_s`.

    Raises:
        TransferError: not reachable or not complete yet (retryable), or refused (not retryable).
    """
    query = {"engine_rank": -1, "target_dp_group": -1, "target_pp_rank": -1}
    return _decode(_request("GET", host, port, token, timeout_s, query=query), ServerFacts, host, port)


def fetch_replica(host: str, port: int, token: str = "", *, dp_rank: int = 0, timeout_s: float = 5.0) -> ReplicaRoute:
    """Where one replica is. Blocks up to `timeout_s`.

    Raises:
        TransferError: as `fetch_facts`; not retryable when there is no such replica.
    """
    query = {"engine_rank": 0, "target_dp_group": dp_rank, "target_pp_rank": 0}
    return _decode(_request("GET", host, port, token, timeout_s, query=query), ReplicaRoute, host, port)


def _url(host: str, port: int) -> str:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/route"
    try:
        sane = urlsplit(url).hostname is not None and not set(host) & set("/?#@\\ \t\r\n")
    except ValueError:
        sane = False
    if not sane:
        raise TransferError(f"not a bootstrap address: {host[:100]!r}", code="bad_address", retryable=False)
    return url


def _request(
    method: str,
    host: str,
    port: int,
    token: str,
    timeout_s: float,
    *,
    query: Mapping[str, int] | None = None,
    body: bytes | None = None,
) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = _url(host, port)
    try:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.request(
                method, url, params=query, data=body, headers=headers, timeout=timeout_s, allow_redirects=False
            )
    except requests.RequestException as error:
        message = f"no bootstrap server answers at {host}:{port}: {type(error).__name__}"
        raise TransferError(message, code="bootstrap_unreachable") from error
    if answer.status_code == 200:
        return answer.content
    raise TransferError(
        f"the bootstrap server at {host}:{port} answers {answer.status_code}: {answer.text[:500]}",
        code="bootstrap_unready" if answer.status_code >= 500 else "bootstrap_refused",
        retryable=answer.status_code >= 500,
    )


def _decode(body: bytes, kind: type[T], host: str, port: int) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        message = f"what answers at {host}:{port} is no pdserve bootstrap server: {error}"
        raise TransferError(message, code="bootstrap_refused", retryable=False) from error
