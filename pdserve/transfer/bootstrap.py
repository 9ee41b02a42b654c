"""Bootstrap server: a small HTTP server at which decode servers look up the replicas of a prefill server.

    GET /challenge?nonce=N        our nonce, and our proof that we know the control token; 409 where there is no token
    PUT /route                    a prefill replica registers a `ReplicaRoute` (JSON); SGLang's body is an `SGLangRank`
    GET /route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1
                                  the facts that all replicas share
    GET /route?engine_rank=R&target_dp_group=D&target_pp_rank=P
                                  the route to replica D, whose rank 0 receives the messages for all its ranks
    GET /health                   200 once all replicas are registered, else 503

With a control token, `/route` requires the client's proof over both nonces, and the answer carries ours (`base/proof`).
The query names are SGLang's; its newer `prefill_dp_rank`, `target_tp_rank` and `prefill_cp_rank` mean the same.
The server runs in the API process of a prefill server. Its clients are in `bootstrap_client`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.env import SAME_TOKEN
from pdserve.base.log import SparingLog, escaped
from pdserve.base.proof import PROOF_HEADER, ChallengeVerifier, ControlKey, check_body
from pdserve.errors import ConfigError, ProofError
from pdserve.transfer.bootstrap_routes import (
    MAX_BODY_BYTES,
    ChallengeAnswer,
    ReplicaRoute,
    RouteTable,
    parse_query,
    parse_registration,
)

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 10.0
UNPROVEN = f"a proof of the control token is missing or wrong; {SAME_TOKEN}"
NO_TOKEN = f"this server has no control token; {SAME_TOKEN}"
Handler = Callable[[web.Request, bytes], Awaitable[web.Response]]


class BootstrapServer:
    """The HTTP server, on a thread and an event loop of its own. `port` 0 picks a free one; see `.port`.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, token: str = "", clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._verifier = ChallengeVerifier(ControlKey(token)) if token else None
        self._warnings = SparingLog(log)
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
        """Number of requests that were refused for their content or a wrong token. Any thread."""
        return self._rejected

    @property
    def complete(self) -> bool:
        """True while the server runs and all replicas have registered. Any thread."""
        return self._thread.is_alive() and self._table.complete

    def close(self) -> None:
        """Stop serving and end the thread. Any thread, any number of times."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)

    async def _serve(self, host: str, port: int, started: concurrent.futures.Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/challenge", self._challenge, allow_head=False)
        app.router.add_put("/route", self._guarded(self._put))
        app.router.add_get("/route", self._guarded(self._get), allow_head=False)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, keepalive_timeout=KEEP_ALIVE_S)
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

    async def _challenge(self, request: web.Request) -> web.StreamResponse:
        if self._verifier is None:
            return self._refuse(request, 409, NO_TOKEN)
        if "mismatch" in request.query:
            return self._refuse(request, 401, "the client says that its control token is another one; " + UNPROVEN)
        try:
            nonce, proof = self._verifier.challenge(request.query.get("nonce", ""), self._clock.now())
        except ProofError as error:
            return self._refuse(request, 400, str(error))
        return _json(ChallengeAnswer(nonce, proof))

    def _guarded(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap `handler`, which gets the body. With a token, require a proof and add ours to the answer.

        The proof header is checked before the body is read, so no unproven body is kept.
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._verifier is None:
                return await handler(request, await request.read())
            header = request.headers.get(PROOF_HEADER)
            try:
                exchange = self._verifier.check(header, request.method, request.raw_path, self._clock.now())
                body = await request.read()
                check_body(body, exchange.digest)
            except ProofError as error:
                return self._refuse(request, 401, UNPROVEN, detail=f"{error}; {SAME_TOKEN}")
            answer = await handler(request, body)
            assert isinstance(answer.body, bytes)
            answer.headers[PROOF_HEADER] = exchange.answer(answer.status, answer.body)
            return answer

        async def bounded(request: web.Request) -> web.StreamResponse:
            try:
                return await guarded(request)
            except web.HTTPRequestEntityTooLarge:
                return self._refuse(request, 413, f"the body is larger than {MAX_BODY_BYTES} bytes")

        return bounded

    def _refuse(self, request: web.Request, status: int, message: str, *, detail: str = "") -> web.Response:
        self._rejected += 1
        self._warnings.warning("bootstrap request of %s refused: %s", request.remote, escaped(detail or message))
        return _error(message, status)

    async def _put(self, request: web.Request, body: bytes) -> web.Response:
        try:
            registration = parse_registration(body)
            if isinstance(registration, ReplicaRoute):
                self._table.put(registration)
            else:
                self._table.put_rank(registration)
        except (msgspec.MsgspecError, ValueError) as error:
            return self._refuse(request, 400, f"not a route: {error}")
        return web.json_response({"ok": True})

    async def _get(self, request: web.Request, body: bytes) -> web.Response:
        try:
            ranks = parse_query(request.query)
        except ValueError as error:
            return self._refuse(request, 400, str(error))
        facts = self._table.facts
        if facts is None or not self._table.complete:
            return _error("not all prefill replicas have registered yet", 503)
        if not ranks:
            return _json(facts)
        found = self._table.find(ranks)
        if found is None:
            return _error(f"there is no rank {ranks}", 404)
        return _json(found)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            text="ok" if self._table.complete else "waiting", status=200 if self._table.complete else 503
        )


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _json(value: msgspec.Struct | dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
