"""HTTP calls from the router to a worker, with outcomes as values. Called by `dispatch` and `app`.

Answers are not decoded, so that the client gets the worker's bytes unchanged.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from typing import Protocol

import aiohttp
import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from pdserve.base.proof import PROOF_HEADER
from pdserve.base.stream_state import STATE_HEADER
from pdserve.http.credentials import authorization_of
from pdserve.http.error_forms import inner_error
from pdserve.http.worker_proof import WorkerProof
from pdserve.protocol.failure import RUNNING_TIMEOUT, Failure, weights_mismatch
from pdserve.router.config.config import RouterConfig
from pdserve.router.workers.workers import Worker

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
NOT_FORWARDED = HOP_BY_HOP | {
    *("host", "content-length", "content-type", "content-encoding", "expect"),
    *(STATE_HEADER.lower(), PROOF_HEADER.lower(), "x-api-key"),
    *("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user"),
}
"""Headers that are not forwarded to workers. The router re-encodes the body, so headers that describe the client's body
are wrong; a browser's headers about its page are for the router only; `x-api-key` is forwarded as `Authorization`."""

FORWARDED_FOR = "X-Forwarded-For"

KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that no closing connection is reused."""

MISMATCH = weights_mismatch("").code
WORKER_FAILED = "worker_failed"
"""Error code of streams that a worker began and did not end."""


@dataclasses.dataclass(frozen=True)
class WorkerResponse:
    """A complete answer."""

    worker: Worker
    status: int
    headers: CIMultiDict[str]
    body: bytes


class ContinuedStream(Protocol):
    """A client's stream that another pair can continue; see `stream_retry`."""

    @property
    def failure(self) -> Failure | None:
        """The worker's retryable failure; None without one."""

    @property
    def ending(self) -> bytes | None:
        """The rest of a broken stream whose tokens are complete; None: tokens are missing."""

    @property
    def error_event(self) -> bytes:
        """The worker's retryable error event, and the stream's end; empty without such an event."""

    def feed(self, chunk: bytes) -> bytes:
        """Take the worker's next bytes; returns complete events for the client."""

    def end(self) -> bytes:
        """Handle the end of the worker's answer; returns the rest. Raises EndedError if the last event is missing."""

    async def go_on(self, failure: Failure) -> WorkerStream | None:
        """Continue the stream after `failure`; returns the next answer, or None if the stream cannot be continued."""


@dataclasses.dataclass(frozen=True)
class WorkerStream:
    """A good answer whose first bytes were received and whose rest is still to be read; the owner closes `response`.

    `change(piece, is_last)`, if given, converts each piece for the client. `stream`, if given, takes the pieces, and
    continues at another pair if they end early.
    """

    worker: Worker
    response: aiohttp.ClientResponse
    headers: CIMultiDict[str]
    first: bytes
    change: Callable[[bytes, bool], bytes] | None = None
    stream: ContinuedStream | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether the answer ended early; valid before `response` is closed."""
        return self.response.content.exception() is not None

    @property
    def was_ended(self) -> bool:
        """Whether the router ended the answer, because the worker was lost or the router shuts down."""
        return isinstance(self.response.content.exception(), EndedError)

    @property
    def ended(self) -> bool:
        """Whether the answer was read to its end."""
        return self.response.content.at_eof() and not self.is_truncated


@dataclasses.dataclass(frozen=True)
class ConnectionFailed:
    """No complete answer: the connection failed, or ended early."""

    worker: Worker
    message: str
    lost: bool = False
    """True: health checks or a pair probe ended the attempt, so the circuit breaker does not count the failure."""
    out_of_descriptors: bool = False
    """True: the router has no free file descriptor; the worker may be healthy."""


HalfOutcome = WorkerStream | WorkerResponse | ConnectionFailed
"""The end of the request at one worker."""
Outcome = HalfOutcome | Failure
"""The end of an attempt; `Failure`: the router refused or ended it."""


class EndedError(aiohttp.ClientError):
    """An answer ended early; `failure` is for the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def worker_failed(message: str) -> EndedError:
    """Return the error of a stream that a worker began and did not end."""
    return EndedError(Failure(code=WORKER_FAILED, message=message, origin="router"))


def make_session(config: RouterConfig) -> aiohttp.ClientSession:
    """Make the router's session: no limit of connections, only a connect timeout, no decompression, no cookies.

    With a `worker_proof_key` every request carries a proof. A challenge has no more time to connect than a health
    check, so that it does not delay the first check after a cut link.

    Raises:
        ConfigError: a certificate cannot be read.
    """
    key, connect_s = config.access.worker_proof_key, min(config.connect_timeout_s, config.health.timeout_s)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=config.tls.worker_context() or True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding", "User-Agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=1 << 20,
        middlewares=() if key is None else (WorkerProof(key, connect_s),),
    )


def forwarded_headers(headers: CIMultiDictProxy[str], peer: str | None = None) -> CIMultiDict[str]:
    """Return a client's headers for workers; the client's address `peer` is appended to `X-Forwarded-For`."""
    kept = CIMultiDict([item for item in headers.items() if item[0].lower() not in NOT_FORWARDED])
    if peer is not None:
        kept[FORWARDED_FOR] = ", ".join([*kept.popall(FORWARDED_FOR, []), peer]) if FORWARDED_FOR in kept else peer
    kept["Content-Type"] = "application/json"
    authorization = authorization_of(headers)
    if authorization is not None:
        kept["Authorization"] = authorization
    return kept


def own_headers(worker: Worker, default_key: str | None) -> dict[str, str]:
    """Return the `Authorization` header with the worker's key, or `default_key`; empty without a key."""
    key = worker.spec.api_key or default_key
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def returned_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return a worker's headers for the client, without hop-by-hop and CORS headers; the router sets its own."""
    return CIMultiDict(
        [
            item
            for item in headers.items()
            if (name := item[0].lower()) not in HOP_BY_HOP and not name.startswith("access-control-")
        ]
    )


async def read_response(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: CIMultiDict[str]
) -> WorkerResponse | ConnectionFailed:
    """POST and read the complete answer. Cancellation closes the connection."""
    response = await _post(session, worker, path, body, headers)
    if isinstance(response, ConnectionFailed):
        return response
    try:
        content = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        return ConnectionFailed(worker, describe(error))
    finally:
        response.close()
    return WorkerResponse(worker, response.status, returned_headers(response.headers), content)


async def open_stream(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: CIMultiDict[str]
) -> HalfOutcome:
    """POST and wait for the first bytes of a good answer, or for a complete error response (status 400 or more).

    Cancellation closes the connection.
    """
    response = await _post(session, worker, path, body, headers)
    if isinstance(response, ConnectionFailed):
        return response
    kept = returned_headers(response.headers)
    try:
        if response.status >= 400:
            return WorkerResponse(worker, response.status, kept, await response.read())
        return WorkerStream(worker, response, kept, await response.content.readany())
    except (aiohttp.ClientError, OSError) as error:
        response.close()
        return ConnectionFailed(worker, describe(error))
    except BaseException:
        response.close()
        raise


async def _post(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: CIMultiDict[str]
) -> aiohttp.ClientResponse | ConnectionFailed:
    """POST and wait for the headers of the answer."""
    try:
        return await session.post(worker.spec.url + path, data=body, headers=headers, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as error:
        return ConnectionFailed(worker, describe(error), out_of_descriptors=is_out_of_descriptors(error))


async def read_at_most(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the complete body; `aiohttp.ClientPayloadError` if it has more than `max_bytes` bytes."""
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > max_bytes:
            raise aiohttp.ClientPayloadError(f"more than {max_bytes} bytes")
    return bytes(read)


def error_of(raw: bytes) -> tuple[str | None, str]:
    """Return code and message of an error; (None, "") if the body has no known form."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, ""
    error = inner_error(body)
    code = error.get("code")
    return code if isinstance(code, str) else None, str(error.get("message", ""))


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether a connection failed because this process, or its host, has no free file descriptor."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):  # the resolver does not report the cause
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as found:
            error = found
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def describe(error: BaseException) -> str:
    """Return an exception as one line, with its type, since some of aiohttp's exceptions have no text."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"cannot resolve {error.host}: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientPayloadError) and str(error).startswith("Response payload is not completed"):
        return "the connection was closed before its end"
    if type(error) is aiohttp.ClientConnectorError and (number := error.os_error.errno) in errno.errorcode:
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(number or 0)}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


RETRYABLE_STATUSES = frozenset({502, 503})


def resolve_outcome(
    prefill: WorkerResponse | ConnectionFailed | None, decode: HalfOutcome | None
) -> HalfOutcome | None:
    """Return the outcome of an attempt; None while it is open. `prefill` None: no answer yet, or no prefill half.

    When decode sends its first bytes, the KV cache has arrived, so that prefill's result no longer matters. Of two
    failures a client error (4xx) takes precedence, then prefill's.
    """
    if isinstance(decode, WorkerStream):
        return decode
    failures = [half for half in (prefill, decode) if failed(half)]
    failures.sort(key=lambda half: not (isinstance(half, WorkerResponse) and half.status < 500))
    return failures[0] if failures else None


def failed(half: Outcome | None) -> bool:
    """Whether one half ended without a good answer."""
    return isinstance(half, ConnectionFailed | Failure) or (isinstance(half, WorkerResponse) and half.status >= 400)


def ends_both(prefill: WorkerResponse | ConnectionFailed) -> bool:
    """Whether prefill's failure also ends decode's half, even if decode computes prompts whose KV does not arrive.

    Decode is not notified of a request that prefill refused, and would wait for its KV.
    """
    return isinstance(prefill, WorkerResponse) and (prefill.status < 500 or asked_to_retry_later(prefill))


def retryable(outcome: HalfOutcome) -> bool:
    """Whether the request may be retried."""
    if isinstance(outcome, WorkerResponse):
        return outcome.status in RETRYABLE_STATUSES and error_of(outcome.body)[0] != RUNNING_TIMEOUT
    return isinstance(outcome, ConnectionFailed)


def weights_differ(outcome: HalfOutcome) -> bool:
    """Whether the pair's servers have different weights, as while one after the other changes them."""
    return isinstance(outcome, WorkerResponse) and outcome.status == 503 and error_of(outcome.body)[0] == MISMATCH


def counts_as_failure(outcome: HalfOutcome) -> bool:
    """Return True when the outcome counts against the worker's breaker.

    Client errors and `Retry-After` responses do not count.
    """
    if isinstance(outcome, WorkerResponse):
        return outcome.status >= 500 and not asked_to_retry_later(outcome)
    return isinstance(outcome, ConnectionFailed) and not outcome.lost and not outcome.out_of_descriptors


def asked_to_retry_later(outcome: HalfOutcome) -> bool:
    """Whether a worker answered with `Retry-After`, which it sends when it is full."""
    return isinstance(outcome, WorkerResponse) and "Retry-After" in outcome.headers
