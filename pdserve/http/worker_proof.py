"""Mutual proof of the control token between a client and servers: a router and its workers, or two servers.

Used where the router has the key for it in its environment, unless `--no-worker-control-proof` turns it off. A worker
must prove the token before the router sends it anything, and every request proves the token to the worker. This is an
aiohttp client middleware around all requests of the router's session, installed by `workers.outcome.make_session`. The
protocol is in `http/session_proof`. Servers use it for `/migrate_in`, and decode servers for
`--disaggregation-prefill`.

    no session with a worker, or it ended  ──>  challenge  ──>  request with a proof  ──>  answer
                                                    └─ not proven: UnprovenWorkerError, and the worker counts as dead
    half the session's lifetime has passed ──>  the next challenge, concurrent with requests
    a request failed, or got a 401         ──>  the session ends: another process may listen there now
    a request was cancelled                ──>  the next challenge, concurrent with requests
    401 `control_proof_expired`            ──>  the worker was restarted: a new challenge, and one retry
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from pdserve.base.log import SparingLog, escaped, no_request
from pdserve.base.proof import PROOF_HEADER, MacKey
from pdserve.errors import ProofError
from pdserve.http.session_proof import CHALLENGE_PATH, EXPIRED, SESSION_LIFETIME_S, Session

log = logging.getLogger(__name__)

RENEW_AFTER_S = SESSION_LIFETIME_S / 2
TIMEOUT_S = 10.0
"""Timeout of a challenge."""
MAX_ANSWER_BYTES = 4096
REASONS = {
    404: "it has no such path: it is no pdserve server, or an old version. Routers with --no-worker-control-proof send "
    "keys to such servers",
    409: "it has no control token; set PDSERVE_CONTROL_TOKEN there, or start the router with --no-worker-control-proof",
}


class UnprovenWorkerError(aiohttp.ClientError):
    """A worker does not prove the control token, or refuses the router's proof.

    If the worker did not prove the token, it was sent no prompt. It was sent no API key in either case.
    """


class WorkerChallengeAnswer(msgspec.Struct, frozen=True):
    """A worker's answer to a challenge."""

    nonce: str
    proof: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Proven:
    """A session with a worker that has proven the token, at `since_s` in the event loop's time."""

    session: Session
    since_s: float


class WorkerProof:
    """The middleware. One event loop. `connect_timeout_s`: seconds to connect for a challenge."""

    def __init__(self, key: MacKey, connect_timeout_s: float) -> None:
        self._key = key
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=connect_timeout_s)
        self._warnings = SparingLog(log)
        self._proven: dict[URL, _Proven] = {}
        self._asking: dict[URL, asyncio.Task[_Proven]] = {}

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request with a proof, see aiohttp's client middlewares. Raises UnprovenWorkerError."""
        request.headers.popall(hdrs.AUTHORIZATION, None)
        response = await self._send(request, handler)
        if response.status == 401 and response.headers.get(PROOF_HEADER) == EXPIRED:
            response.close()
            response = await self._send(request, handler)
        if response.status == 401:
            response.close()
            told = escaped(response.headers.get(PROOF_HEADER, "none given"))
            raise self._unproven(request.url.origin(), f"it refuses the router's own proof, reason: {told}")
        return response

    async def _send(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """Send the request with a new proof to a worker that proved the token. A failure or 401 ends the session."""
        origin = request.url.origin()
        proven = await self._prove(origin, request.session)
        body = request.body if isinstance(request.body, bytes) else await request.body.as_bytes()
        request.headers[PROOF_HEADER] = proven.session.header(request.method, request.url.raw_path_qs, body)
        try:
            response = await handler(request)
        except asyncio.CancelledError:  # the client disconnected, or a timeout: the worker must prove itself again
            self._challenge(origin, request.session)
            raise
        except Exception:
            self._forget(origin, proven)
            raise
        if response.status == 401:
            self._forget(origin, proven)
        return response

    def _forget(self, origin: URL, proven: _Proven) -> None:
        if self._proven.get(origin) is proven:
            del self._proven[origin]

    async def _prove(self, origin: URL, http: aiohttp.ClientSession) -> _Proven:
        """Return the current session with the worker; without one, start one challenge for all waiting requests."""
        proven = self._proven.get(origin)
        age_s = None if proven is None else asyncio.get_running_loop().time() - proven.since_s
        if proven is not None and age_s is not None and age_s < SESSION_LIFETIME_S:
            if age_s >= RENEW_AFTER_S:
                self._challenge(origin, http)
            return proven
        return await asyncio.shield(self._challenge(origin, http))

    def _challenge(self, origin: URL, http: aiohttp.ClientSession) -> asyncio.Task[_Proven]:
        running = self._asking.get(origin)
        if running is None:
            running = self._asking[origin] = asyncio.create_task(self._ask(origin, http), context=no_request())
            running.add_done_callback(lambda task: self._asked(origin, task))
        return running

    def _asked(self, origin: URL, task: asyncio.Task[_Proven]) -> None:
        del self._asking[origin]
        if task.cancelled() or task.exception() is not None:
            self._proven.pop(origin, None)
            return
        now = asyncio.get_running_loop().time()
        for old in [url for url, one in self._proven.items() if now - one.since_s >= SESSION_LIFETIME_S]:
            del self._proven[old]
        self._proven[origin] = task.result()

    async def _ask(self, origin: URL, http: aiohttp.ClientSession) -> _Proven:
        session, begun_s = Session(self._key), asyncio.get_running_loop().time()
        url = origin.with_path(CHALLENGE_PATH).with_query(nonce=session.nonce)
        async with http.get(url, timeout=self._timeout, allow_redirects=False, middlewares=()) as response:
            length = response.content_length
            if response.status != 200:
                reason = REASONS.get(response.status, "it gives no challenge")
                raise self._unproven(origin, f"GET {CHALLENGE_PATH} answered {response.status}, {reason}")
            if length is None or length > MAX_ANSWER_BYTES:
                raise self._unproven(origin, f"the answer to GET {CHALLENGE_PATH} is no challenge")
            raw = await response.read()
        try:
            answer = msgspec.json.decode(raw, type=WorkerChallengeAnswer)
            session.accept(answer.nonce, answer.proof)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._unproven(origin, f"the answer to GET {CHALLENGE_PATH} is no challenge") from error
        except ProofError as error:
            raise self._unproven(origin, str(error)) from error
        return _Proven(session, begun_s)

    def _unproven(self, origin: URL, reason: str) -> UnprovenWorkerError:
        text = f"{origin} does not prove the control token: {reason}"
        self._warnings.warning("%s", text)
        return UnprovenWorkerError(text)
