"""Requests that a decode server got without `bootstrap_room`: it draws a room, and sends the prefill half itself.

    read the body ─> choose a prefill server, draw a room ─┬─> POST the same body to it          (`_half`)
                                                           └─> answer the request here, as usual (`_mine`)
    the first token is here           ─> the response begins; the prefill half ends on its own
    prefill answers an error, or dies ─> the half here is cancelled; another server, another room; then the error
    the half here fails               ─> the prefill half is cancelled; the same
    the client disconnects            ─> both are cancelled

A stream's response begins with its first token (`stream_response`), so a request is tried again only while its client
has received nothing. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.log import current_request_id
from pdserve.config.groups import ServerConfig
from pdserve.errors import RequestError
from pdserve.http.access import GENERATE_PATH
from pdserve.observe.metrics import ServerMetrics
from pdserve.protocol.failure import ABORTED_STATUS, RUNNING_TIMEOUT
from pdserve.protocol.messages import MAX_ROOM
from pdserve.server.http.json_http import PARSED_BODY, read_json_object
from pdserve.server.pairing.prefill_servers import UNREACHABLE, PrefillServer, PrefillServers
from pdserve.server.request.intake import MAX_SEQUENCES

log = logging.getLogger(__name__)

Handle = Callable[[Request], Awaitable[Response]]
MAX_TRIES = 3
GRACE_S = 1.0
"""Seconds that the other half gets to report the error that has caused an abort or a failed transfer."""
REST_S = 60.0
"""Seconds after the first token in which the prefill half must end; then it is cancelled."""
RETRIED = frozenset({429, 502, 503})
"""Statuses of a prefill half after which another prefill server is tried."""
TRANSFER_FAILED = 502
"""Status of the half here when the KV of the prefill server did not arrive."""
FORWARDED = ("traceparent", "tracestate")


class HalfError(Exception):
    """An attempt failed with `error`. `may_retry`: another prefill server, or another room, may serve the request."""

    def __init__(self, error: RequestError, *, may_retry: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.may_retry = may_retry and error.code != RUNNING_TIMEOUT

    @property
    def is_busy(self) -> bool:
        """True when a server has asked to be tried later."""
        return self.error.status in (429, 503)


class SingleRequests:
    """See the file's docstring. `max_body_bytes`: largest request body.

    `recomputes`: decode computes the prompt itself when the KV does not come (`--disaggregation-load-failure-policy`).
    """

    def __init__(self, servers: PrefillServers, max_body_bytes: int, *, recomputes: bool = False) -> None:
        self.servers = servers
        self._recomputes = recomputes
        self._max_body_bytes = max_body_bytes
        self._random = random.SystemRandom()
        self._rest: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, config: ServerConfig, metrics: ServerMetrics, control_token: str) -> SingleRequests | None:
        """Make the object of a server with this configuration; None on a server that refuses requests without a room.

        `control_token`: empty without one. The prefill servers' metrics are added to `metrics`.
        """
        pairing, access = config.pairing, config.access
        if config.disagg.disaggregation_mode != "decode" or not pairing.prefill_urls:
            return None
        servers = PrefillServers(
            pairing.prefill_urls,
            choice=pairing.disaggregation_prefill_choice,
            api_key=pairing.disaggregation_prefill_api_key or next(iter(access.keys.api), None),
            control_token=control_token,
            ca_certs=access.ssl_ca_certs,
            labels=metrics.labels,
        )
        metrics.add(servers)
        recomputes = config.disagg.disaggregation_load_failure_policy == "recompute"
        return cls(servers, config.serving.max_request_bytes, recomputes=recomputes)

    def wrap(self, path: str, handle: Handle) -> Handle:
        """Return a handler of `path` that gives `handle` requests with a room; those that have one pass through."""

        async def answer(request: Request) -> Response:
            body = await read_json_object(request, self._max_body_bytes)
            request.scope[PARSED_BODY] = body
            if body.get("bootstrap_room") is not None:
                return await handle(request)
            return await self._answer(path, handle, request, body)

        return answer

    async def close(self) -> None:
        """Cancel the prefill halves that still run, and close the connections."""
        for task in self._rest:
            task.cancel()
        await asyncio.gather(*self._rest, return_exceptions=True)
        await self.servers.close()

    # ------------------------------------------------------------------ inside

    async def _answer(self, path: str, handle: Handle, request: Request, body: dict[str, Any]) -> Response:
        tried: list[PrefillServer] = []
        failures: list[HalfError] = []
        for _ in range(MAX_TRIES):
            try:
                server = await self.servers.choose(tried)
            except RequestError as none_left:
                raise _joined(failures) if failures else none_left from none_left
            if failures and failures[-1].is_busy and server in tried:
                break
            tried.append(server)
            try:
                return await self._try(server, path, handle, request, body)
            except HalfError as failure:
                failures.append(failure)
                if not failure.may_retry:
                    break
                log.info("the attempt at %s with %s failed: %s", path, server.url, failure.error.message)
        raise _joined(failures)

    async def _try(
        self, server: PrefillServer, path: str, handle: Handle, request: Request, body: dict[str, Any]
    ) -> Response:
        """Run both halves. Raises HalfError with the error of the half that is the cause."""
        room = self._random.randrange(MAX_ROOM - MAX_SEQUENCES)
        whole = body | {"bootstrap_host": server.host, "bootstrap_port": server.bootstrap_port, "bootstrap_room": room}
        if path == GENERATE_PATH:
            whole["pdserve_single_request"] = True
        request.scope[PARSED_BODY] = whole
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        headers |= {"Content-Type": "application/json", "X-Request-Id": current_request_id() or ""}
        half = asyncio.create_task(self.servers.call(server, path, orjson.dumps(whole), headers))
        mine = asyncio.create_task(_as_coroutine(handle(request)))
        try:
            await asyncio.wait({half, mine}, return_when=asyncio.FIRST_COMPLETED)
            if not mine.done() and (refusal := half.result()) is not None:
                await asyncio.wait({mine}, timeout=GRACE_S if refusal.status == ABORTED_STATUS else 0)
                if mine.done() and mine.exception() is not None:
                    raise _cause(mine, refusal)
                if not mine.done() and not self._is_left_to_decode(server, refusal):
                    raise _cause(mine, refusal)
            try:
                response = await mine
            except RequestError as error:
                if error.status == TRANSFER_FAILED:
                    server.is_stale = True
                    await asyncio.wait({half}, timeout=GRACE_S)
                raise _cause(mine, half.result() if half.done() else None) from error
            self._let_end(half)
            return response
        except BaseException:
            half.cancel()
            raise
        finally:
            mine.cancel()
            await asyncio.gather(mine, return_exceptions=True)

    def _is_left_to_decode(self, server: PrefillServer, refusal: RequestError) -> bool:
        """True when the server of a request is lost, no other one is up, and decode can compute the prompt."""
        return self._recomputes and refusal.code == UNREACHABLE and not self.servers.has_other(server)

    def _let_end(self, half: asyncio.Task[RequestError | None]) -> None:
        """Let the prefill half of an answered request end, for at most `REST_S` seconds."""

        async def wait() -> None:
            try:
                await asyncio.wait({half}, timeout=REST_S)
            finally:
                half.cancel()

        task = asyncio.create_task(wait())
        self._rest.add(task)
        task.add_done_callback(self._rest.discard)


def _joined(failures: Sequence[HalfError]) -> RequestError:
    """Return the error of the last attempt, with the messages of all: each may name another prefill server."""
    last = failures[-1].error
    messages = dict.fromkeys(failure.error.message for failure in failures)
    return last if len(messages) == 1 else last.renamed("; ".join(messages), last.field)


async def _as_coroutine(work: Awaitable[Response]) -> Response:
    return await work


def _cause(mine: asyncio.Task[Response], theirs: RequestError | None) -> Exception:
    """Return the failure of a request, one of whose halves has failed.

    The half here is the cause when it was refused, as for a wrong field, or when prefill reports no error of its own.
    An abort (499) on prefill is none: the half here has caused it.
    """
    own = mine.exception() if mine.done() and not mine.cancelled() else None
    if own is not None and not isinstance(own, RequestError):
        return own if isinstance(own, Exception) else RuntimeError(repr(own))
    if own is not None and (own.status < ABORTED_STATUS or theirs is None or theirs.status == ABORTED_STATUS):
        return HalfError(own, may_retry=own.status == TRANSFER_FAILED or own.code == "room_in_use")
    assert theirs is not None, "one half has failed"
    return HalfError(theirs, may_retry=theirs.status in RETRIED or theirs.code == "room_in_use")
