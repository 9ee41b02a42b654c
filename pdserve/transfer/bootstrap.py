"""The bootstrap server of a prefill server: where decode servers learn who serves, and at which address each rank is.

    PUT /route                                    a rank registers (`RankRoute` as JSON)
    GET /route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1      the server's facts (`RouteFacts`)
    GET /route?engine_rank=R&target_dp_group=D&target_pp_rank=P         that rank (`RankRoute`)
    GET /health

503 until every rank has registered, 404 for a rank that does not exist, 400 naming the field for junk, 401 without
the cluster's token where one is set. SGLang's names prefill_dp_rank, prefill_cp_rank, target_tp_rank are understood.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections import Counter

import msgspec
import requests
from aiohttp import web

from pdserve.errors import ConfigError, TransferError

MAX_BODY_BYTES = 1 << 20


class RankRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefill rank. `facts` are what the handshake will compare."""

    instance: str
    host: str
    port: int
    page_size: int
    kv_cache_dtype: str
    model: str
    engine_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    facts: dict[str, str | int] = {}

    def problem(self) -> str | None:
        """What is out of range, or None."""
        if not self.host or not 0 < self.port < 65536:
            return f"port must be in [1, 65535] and host not empty, got {self.host!r} and {self.port}"
        for axis, rank, size in (
            ("engine_rank", self.engine_rank, self.tp_size),
            ("dp_rank", self.dp_rank, self.dp_size),
            ("pp_rank", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                return f"{axis} must be in [0, {size}), got {rank}"
        return None if 1 <= self.page_size else f"page_size must be positive, got {self.page_size}"


class RouteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all ranks of a prefill server."""

    tp_size: int
    dp_size: int
    pp_size: int
    page_size: int
    kv_cache_dtype: str
    model: str


class BootstrapServer:
    """Serves in a thread of its own from construction to `close`."""

    def __init__(self, host: str, port: int, *, token: str) -> None:
        """Raises ConfigError when the port cannot be bound."""
        self._host = host
        self._token = token
        self._routes: dict[tuple[int, int, int], RankRoute] = {}
        self.counters: Counter[str] = Counter()
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="bootstrap", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {self._error}", field="disaggregation_bootstrap_port"
            )

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_put("/route", self._put_route)
        app.router.add_get("/route", self._get_route)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None)
        try:
            self._loop.run_until_complete(self._listen(runner))
        except OSError as error:
            self._error = error
            self._started.set()
            return
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, self._host, self.port).start()
        self.port = int(runner.addresses[0][1])

    def _refuse(self, status: int, message: str) -> web.Response:
        self.counters["refused"] += 1
        return web.json_response({"error": {"message": message}}, status=status)

    def _allowed(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return not self._token or hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    async def _put_route(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return self._refuse(401, "the cluster's token is missing or wrong")
        try:
            route = msgspec.json.decode(await request.read(), type=RankRoute)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return self._refuse(400, str(error))
        if (problem := route.problem()) is not None:
            return self._refuse(400, problem)
        for field in ("tp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "model"):
            for other in self._routes.values():
                same_rank = (other.engine_rank, other.dp_rank, other.pp_rank) == _rank(route)
                if not same_rank and getattr(other, field) != getattr(route, field):
                    ours, theirs = getattr(other, field), getattr(route, field)
                    return self._refuse(400, f"{field} is {theirs!r}, another rank of this server said {ours!r}")
        self._routes[_rank(route)] = route
        return web.json_response({"ok": True})

    async def _get_route(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return self._refuse(401, "the cluster's token is missing or wrong")
        query = request.query
        try:
            rank = int(query.get("engine_rank", query.get("target_tp_rank", "-1")))
            dp = int(query.get("target_dp_group", query.get("prefill_dp_rank", "-1")))
            pp = int(query.get("target_pp_rank", "-1"))
            int(query.get("prefill_cp_rank", "-1"))
        except ValueError as error:
            return self._refuse(400, f"ranks must be integers: {error}")
        first = next(iter(self._routes.values()), None)
        if first is None or len(self._routes) < first.tp_size * first.dp_size * first.pp_size:
            return web.json_response({"error": {"message": "not all ranks have registered yet"}}, status=503)
        if (rank, dp, pp) == (-1, -1, -1):
            facts = RouteFacts(
                tp_size=first.tp_size,
                dp_size=first.dp_size,
                pp_size=first.pp_size,
                page_size=first.page_size,
                kv_cache_dtype=first.kv_cache_dtype,
                model=first.model,
            )
            return web.Response(body=msgspec.json.encode(facts), content_type="application/json")
        route = self._routes.get((rank, dp, pp))
        if route is None:
            return self._refuse(404, f"no rank engine_rank={rank} target_dp_group={dp} target_pp_rank={pp}")
        return web.Response(body=msgspec.json.encode(route), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "num_ranks": len(self._routes), "counters": dict(self.counters)})


def _rank(route: RankRoute) -> tuple[int, int, int]:
    return route.engine_rank, route.dp_rank, route.pp_rank


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}/route"


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def register_route(host: str, port: int, route: RankRoute, token: str, timeout_s: float = 10.0) -> None:
    """Register a rank with its bootstrap server. Raises TransferError."""
    body = msgspec.json.encode(route)
    try:
        answer = requests.put(_url(host, port), data=body, headers=_headers(token), timeout=timeout_s)
    except requests.RequestException as error:
        raise TransferError(f"cannot register at {host}:{port}: {error}", code="bootstrap_unreachable") from error
    if answer.status_code != 200:
        raise TransferError(f"registration at {host}:{port} refused: {answer.text}", code="bootstrap_refused")


def fetch_rank(
    host: str, port: int, token: str, *, engine_rank: int = 0, dp_rank: int = 0, pp_rank: int = 0, timeout_s: float = 5.0
) -> RankRoute:
    """A prefill rank's address, asked of its bootstrap server.

    Raises:
        TransferError: nobody answers, not ready yet (`bootstrap_unready`), refused, or the answer is junk.
    """
    ranks = {"engine_rank": engine_rank, "target_dp_group": dp_rank, "target_pp_rank": pp_rank}
    try:
        answer = requests.get(_url(host, port), params=ranks, headers=_headers(token), timeout=timeout_s)
    except requests.RequestException as error:
        raise TransferError(f"bootstrap server {host}:{port}: {error}", code="bootstrap_unreachable") from error
    if answer.status_code != 200:
        code = "bootstrap_unready" if answer.status_code == 503 else "bootstrap_refused"
        raise TransferError(f"bootstrap server {host}:{port} said {answer.status_code}: {answer.text[:200]}", code=code)
    try:
        return msgspec.json.decode(answer.content, type=RankRoute)
    except msgspec.MsgspecError as error:
        raise TransferError(f"bootstrap server {host}:{port} sent junk: {error}", code="bootstrap_refused") from error
