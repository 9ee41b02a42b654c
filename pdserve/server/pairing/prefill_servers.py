"""The prefill servers of `--disaggregation-prefill`: which of them serve, which one is next, how calls to them ended.

    unknown ── a check succeeds ──> up ── refused connection, or `FAILED_CHECKS` failed checks in a row ──> down
                                    up ── `FAILED_CALLS` failed calls in a row ──> skipped for `SKIP_S` seconds
    down ── a check succeeds ──> up

A check asks `/health`. It asks `/get_server_info` of a server that is not up or whose KV did not come: it may have been
restarted with another bootstrap port. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.base.log import SparingLog, no_request
from pdserve.base.stream_state import ROLE_HEADER
from pdserve.config.pairing_group import PrefillChoice
from pdserve.errors import RequestError
from pdserve.http.error_forms import inner_error
from pdserve.http.session_proof import worker_key
from pdserve.http.worker_proof import WorkerProof

log = logging.getLogger(__name__)

CHECK_S = 2.0
"""Seconds between two checks of a server."""
CHECK_TIMEOUT_S = 3.0
CONNECT_S = 3.0
FIRST_CHECK_S = 5.0
"""Seconds that a request waits for the first checks after the start."""
FAILED_CHECKS = 3
FAILED_CALLS = 3
SKIP_S = 10.0
MAX_ERROR_BYTES = 65536
UNREACHABLE = "prefill_unreachable"
"""Code of the error of a call without an answer."""
RESULTS = ("ok", "refused", "busy", "failed", "unreachable", "cancelled")
"""How calls end: 200; another status below 500; 429, or 503 with Retry-After; another 5xx; no answer; given up."""


@dataclasses.dataclass(eq=False)
class PrefillServer:
    """One server. `is_up` None: no check has ended. `num_running`: calls that have not ended.

    `is_stale`: the next check reads the bootstrap port again.
    """

    url: str
    bootstrap_port: int | None = None
    is_up: bool | None = None
    is_stale: bool = False
    num_running: int = 0
    failed_checks: int = 0
    failed_calls: int = 0
    skipped_until_s: float = 0.0
    last_error: str = "no check has ended"
    results: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def host(self) -> str:
        """Host of the URL, at which the bootstrap server listens as well; IPv6 without brackets."""
        return urlsplit(self.url).hostname or ""

    def facts(self) -> dict[str, Any]:
        """The server for `/get_server_info`."""
        return {
            "url": self.url,
            "is_up": self.is_up,
            "bootstrap_port": self.bootstrap_port,
            "num_running_reqs": self.num_running,
            "last_error": self.last_error or None,
            "results": dict(self.results),
        }


class PrefillServers(Collector):
    """See the file's docstring. Also the collector of its metrics."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        choice: PrefillChoice = "least_loaded",
        api_key: str | None = None,
        control_token: str = "",
        ca_certs: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`api_key` is sent to all servers, unless a proof of `control_token` (empty: none) replaces it.

        `ca_certs`: PEM file that verifies HTTPS servers; None: the system's. `labels`: those of every sample.
        """
        self.servers = [PrefillServer(url) for url in urls]
        self._choice = choice
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._token = control_token
        self._ca_certs = ca_certs
        self._labels = dict(labels or {})
        self._turns = itertools.count()
        self._warnings = SparingLog(log)
        self._session: aiohttp.ClientSession | None = None
        self._checks: list[asyncio.Task[None]] = []
        self._checked = asyncio.Event()

    def start(self) -> None:
        """Open the HTTP session, and begin to check the servers. Call inside the event loop."""
        verify: ssl.SSLContext | bool = True
        if any(server.url.startswith("https:") for server in self.servers):
            verify = ssl.create_default_context(cafile=self._ca_certs)
        middlewares = (WorkerProof(worker_key(self._token), CONNECT_S),) if self._token else ()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=verify),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            middlewares=middlewares,
        )
        self._checks = [asyncio.create_task(self._watch(server), context=no_request()) for server in self.servers]

    async def close(self) -> None:
        """End the checks and close all connections."""
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def choose(self, tried: Iterable[PrefillServer] = ()) -> PrefillServer:
        """Return a server that is up, if possible not one of `tried`.

        Raises:
            RequestError: 503, all are down or skipped.
        """
        if all(server.is_up is None for server in self.servers):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._checked.wait(), FIRST_CHECK_S)
        now_s = asyncio.get_running_loop().time()
        good = [server for server in self.servers if server.is_up and server.skipped_until_s <= now_s]
        good = [server for server in good if server not in set(tried)] or good
        if not good:
            found = "; ".join(f"{server.url}: {server.last_error}" for server in self.servers)
            text = f"no prefill server of --disaggregation-prefill can take the request: {found}"
            raise RequestError(text, status=503, code="no_prefill_server", retry_after_s=1)
        turn = next(self._turns)
        if self._choice == "least_loaded":
            least = min(server.num_running for server in good)
            good = [server for server in good if server.num_running == least]
        return good[turn % len(good)]

    def has_other(self, server: PrefillServer) -> bool:
        """True when another server than `server` is up."""
        return any(one.is_up for one in self.servers if one is not server)

    async def call(
        self, server: PrefillServer, path: str, body: bytes, headers: Mapping[str, str]
    ) -> RequestError | None:
        """Send the prefill half of a request, and wait for the end of its answer, which is not kept.

        Returns the error that the server answered, or that it could not be reached; None: it answered 200.
        """
        server.num_running += 1
        result = "cancelled"
        try:
            error, result = await self._call(server, path, body, headers)
            return error
        finally:
            server.num_running -= 1
            server.results[result] += 1
            self._judge(server, result)

    def facts(self) -> list[dict[str, Any]]:
        """All servers for `/get_server_info`."""
        return [server.facts() for server in self.servers]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, see prometheus_client's `Collector`."""
        names = [*self._labels, "prefill"]
        values = list(self._labels.values())
        ended = CounterMetricFamily(
            "pdserve:single_requests", "prefill halves that this decode server sent, by how they ended",
            labels=[*names, "result"],
        )  # fmt: skip
        running = GaugeMetricFamily(
            "pdserve:single_requests_running", "prefill halves that have not ended", labels=names
        )
        up = GaugeMetricFamily("pdserve:prefill_server_up", "1 if a prefill server answers checks", labels=names)
        for server in self.servers:
            running.add_metric([*values, server.url], server.num_running)
            up.add_metric([*values, server.url], float(bool(server.is_up)))
            for result in RESULTS:
                ended.add_metric([*values, server.url, result], server.results[result])
        return [ended, running, up]

    # ------------------------------------------------------------------ inside

    async def _call(
        self, server: PrefillServer, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[RequestError | None, str]:
        assert self._session is not None, "start() has opened it"
        try:
            async with self._session.post(
                server.url + path, data=body, headers={**self._headers, **headers}, allow_redirects=False
            ) as response:
                if response.status == 200:
                    async for _ in response.content.iter_chunked(1 << 16):
                        pass
                    return None, "ok"
                error = _error_of(server, response, await response.content.read(MAX_ERROR_BYTES))
        except (aiohttp.ClientError, OSError) as lost:
            server.last_error = f"{type(lost).__name__}: {lost}".removesuffix(": ")
            if isinstance(lost, aiohttp.ClientConnectorError):
                server.is_up = False
            text = f"the prefill server {server.url} did not answer: {server.last_error}"
            return RequestError(text, status=502, code=UNREACHABLE), "unreachable"
        if error.status == 429 or (error.status == 503 and error.retry_after_s is not None):
            return error, "busy"
        return error, "failed" if error.status >= 500 else "refused"

    def _judge(self, server: PrefillServer, result: str) -> None:
        """Skip a server whose calls fail."""
        if result in ("ok", "refused"):
            server.failed_calls = 0
        elif result in ("failed", "unreachable"):
            server.failed_calls += 1
            server.is_stale = True
            if server.failed_calls >= FAILED_CALLS:
                server.failed_calls = 0
                server.skipped_until_s = asyncio.get_running_loop().time() + SKIP_S

    async def _watch(self, server: PrefillServer) -> None:
        while True:
            try:
                await self._check(server)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self._check_failed(server, error)
            else:
                if not server.is_up:
                    log.info("the prefill server %s is up, bootstrap port %s", server.url, server.bootstrap_port)
                server.is_up, server.failed_checks, server.last_error = True, 0, ""
            self._checked.set()
            await asyncio.sleep(CHECK_S)

    def _check_failed(self, server: PrefillServer, error: Exception) -> None:
        server.failed_checks += 1
        server.last_error = f"{type(error).__name__}: {error}".removesuffix(": ")
        lost = isinstance(error, aiohttp.ClientConnectorError | ValueError)
        if server.is_up is None or lost or server.failed_checks >= FAILED_CHECKS:
            if server.is_up is not False:
                self._warnings.warning("the prefill server %s is down: %s", server.url, server.last_error)
            server.is_up = False

    async def _check(self, server: PrefillServer) -> None:
        """Raise an exception if the server does not serve as a prefill server."""
        assert self._session is not None, "start() has opened it"
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        ask: Callable[..., Any] = self._session.get
        if server.is_up and not server.is_stale:
            async with ask(server.url + "/health", timeout=timeout, headers=self._headers) as response:
                role = response.headers.get(ROLE_HEADER, "prefill")
                if role != "prefill":
                    raise ValueError(f"it is no prefill server: its role is {role!r}")
                if response.status != 200:
                    raise ConnectionError(f"/health answers {response.status}")
            return
        async with ask(server.url + "/get_server_info", timeout=timeout, headers=self._headers) as response:
            raw = await response.read()
            if response.status != 200:
                raise ValueError(f"/get_server_info answers {response.status}")
        info = orjson.loads(raw)
        mode = info.get("disaggregation_mode") if isinstance(info, dict) else None
        port = info.get("disaggregation_bootstrap_port") if isinstance(info, dict) else None
        if mode != "prefill":
            raise ValueError(f"it is no prefill server: disaggregation_mode is {mode!r}")
        if isinstance(port, bool) or not isinstance(port, int):
            raise ValueError(f"disaggregation_bootstrap_port is {port!r}, expected a port number")
        if info.get("status") == "not_ready":
            raise ValueError("its engine is starting")
        server.bootstrap_port, server.is_stale = port, False


def _error_of(server: PrefillServer, response: aiohttp.ClientResponse, raw: bytes) -> RequestError:
    """Return the error that a server answered, with its status, code, field and `Retry-After`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = inner_error(body)
    message, field, code = error.get("message"), error.get("param"), error.get("code")
    after = response.headers.get("Retry-After", "")
    status = response.status
    if not 400 <= status <= 599 or status in (401, 403, 404):  # this server's key or flags are wrong, not the request
        status = 502
    return RequestError(
        f"the prefill server {server.url} answered {response.status}" + (f": {message}" if message else ""),
        field=field if isinstance(field, str) else None,
        status=status,
        code=code if isinstance(code, str) else "prefill_failed",
        retry_after_s=int(after) if after.isdecimal() else None,
    )
