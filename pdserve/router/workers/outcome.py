"""One HTTP call from the router to a worker, with results as values. Called by `dispatch` and `app`.

Answers pass through undecoded, so that what the client gets is byte for byte what the worker sent.
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
from pdserve.router.config.config import RouterConfig
from pdserve.router.http.tls import worker_tls
from pdserve.router.worker_proof import WorkerProof
from pdserve.router.workers.admission import Refused
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
    *(STATE_HEADER.lower(), PROOF_HEADER.lower()),
    *("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user"),
}
"""The body is re-encoded by the router, so what described the client's bytes does not hold any more; and what a browser
says of its pages concerns the router only."""

FORWARDED_FOR = "X-Forwarded-For"

KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which uvicorn closes an idle connection: a reused one must not be closing already."""

WORKER_FAILED = "worker_failed"
"""The code of streams that a worker began and did not end."""


@dataclasses.dataclass(frozen=True)
class WorkerResponse:
    """An answer that was read to its end."""

    worker: Worker
    status: int
    headers: CIMultiDict[str]
    body: bytes


class ContinuedStream(Protocol):
    """A client's stream that may go on at another pair; see `stream_retry`."""

    @property
    def failure(self) -> EndedError | None:
        """The worker said that the stream has failed and that another try may help."""

    @property
    def ending(self) -> bytes | None:
        """What is left of a broken stream whose tokens are all here; None: more tokens were to come."""

    @property
    def error_event(self) -> bytes:
        """What the worker said of its failure; empty where it said nothing."""

    def feed(self, chunk: bytes) -> bytes:
        """The worker's next bytes; returns whole events for the client."""

    def end(self) -> bytes:
        """The worker's answer is at its end; returns the rest. Raises EndedError where something is missing."""

    async def go_on(self, error: EndedError) -> WorkerStream | None:
        """The answer that the stream goes on with after `error`; None where it cannot."""


@dataclasses.dataclass(frozen=True)
class WorkerStream:
    """A good answer whose first bytes are here and whose rest is still to be read; its owner must close `response`.

    `change`, if given, makes of each piece, and of whether it is the last, what the client gets. `stream`, if given,
    takes the pieces, and goes on elsewhere where they end too early.
    """

    worker: Worker
    response: aiohttp.ClientResponse
    headers: CIMultiDict[str]
    first: bytes
    change: Callable[[bytes, bool], bytes] | None = None
    stream: ContinuedStream | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether the answer ended too early; asked before `response` is closed."""
        return self.response.content.exception() is not None

    @property
    def was_ended(self) -> bool:
        """Whether the router itself ended it, for its worker is dead or the router ends."""
        return isinstance(self.response.content.exception(), EndedError)

    @property
    def ended(self) -> bool:
        """Whether the answer was read to its end."""
        return self.response.content.at_eof() and not self.is_truncated


@dataclasses.dataclass(frozen=True)
class ConnectionFailed:
    """No answer: the connection could not be made, or ended too early."""

    worker: Worker
    message: str
    lost: bool = False
    """Health checks found the worker dead: they know that already, and its circuit breaker need not."""
    out_of_descriptors: bool = False
    """The router has no free file descriptor: the worker may be healthy."""


class EndedError(aiohttp.ClientError):
    """The router itself ends an answer before its end; `status` and `code` are for the client."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


def make_session(config: RouterConfig) -> aiohttp.ClientSession:
    """The one session of a router: no limit on connections, no timeout but connecting, nothing decompressed; with
    `--worker-control-proof` a proof in every request.

    `ConfigError` where a certificate cannot be read.
    """
    key = config.access.worker_proof_key
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=worker_tls(config.tls) or True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding", "User-Agent"),
        read_bufsize=1 << 20,
        middlewares=() if key is None else (WorkerProof(key, config.connect_timeout_s),),
    )


def forwarded_headers(headers: CIMultiDictProxy[str], peer: str | None = None) -> CIMultiDict[str]:
    """A client's headers as sent to workers. As a proxy does, the router appends the address it was asked from."""
    kept = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in NOT_FORWARDED)
    if peer is not None:
        kept[FORWARDED_FOR] = ", ".join([*kept.popall(FORWARDED_FOR, []), peer])
    kept["Content-Type"] = "application/json"
    return kept


def own_headers(worker: Worker, default_key: str | None) -> dict[str, str]:
    """Headers of the router's own calls to a worker: its key, if there is one."""
    key = worker.spec.api_key or default_key
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def returned_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A worker's headers as sent to the client: all but those of the connection, and who may ask is our business."""
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP and not name.lower().startswith("access-control-")
    )


async def read_whole(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: CIMultiDict[str]
) -> WorkerResponse | ConnectionFailed:
    """POST and read the answer to its end. Cancelling it closes the connection."""
    outcome = await open_live(session, worker, path, body, headers)
    if not isinstance(outcome, WorkerStream):
        return outcome
    try:
        rest = await outcome.response.read()
    except (aiohttp.ClientError, OSError) as error:
        return ConnectionFailed(worker, describe(error))
    finally:
        outcome.response.close()
    return WorkerResponse(worker, outcome.response.status, outcome.headers, outcome.first + rest)


async def open_live(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: CIMultiDict[str]
) -> WorkerStream | WorkerResponse | ConnectionFailed:
    """POST and wait for the first bytes of a good answer, or for all of a refusal (status 400 or more).

    Cancelling it closes the connection.
    """
    try:
        response = await session.post(worker.spec.url + path, data=body, headers=headers, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as error:
        return ConnectionFailed(worker, describe(error), out_of_descriptors=is_out_of_descriptors(error))
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


async def read_at_most(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body; `aiohttp.ClientPayloadError` where it is absurdly long."""
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > max_bytes:
            raise aiohttp.ClientPayloadError(f"more than {max_bytes} bytes")
    return bytes(read)


def error_of(raw: bytes) -> tuple[str | None, str]:
    """Code and message of an error in OpenAI's form; None and an empty text where it is none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, ""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None, ""
    code = error.get("code")
    return code if isinstance(code, str) else None, str(error.get("message", ""))


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether a connection failed because this process, or its host, has no free file descriptor."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):  # the resolver does not say why it could not ask
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as found:
            error = found
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def describe(error: BaseException) -> str:
    """An exception as one line; some of aiohttp's have no text of their own."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


RETRYABLE_STATUSES = frozenset({502, 503})


def resolve_outcome(
    prefill: WorkerResponse | ConnectionFailed | None, decode: WorkerStream | WorkerResponse | ConnectionFailed | None
) -> WorkerStream | WorkerResponse | ConnectionFailed | None:
    """What a try has come to; None while it is open. `prefill` None means no answer yet, or no prefill at all.

    Once decode has its first bytes the KV cache has arrived, so that prefill does not matter any more. Of two
    failures the client's own fault (4xx) says more than a server's, and prefill's says more than decode's.
    """
    if isinstance(decode, WorkerStream):
        return decode
    failures = [half for half in (prefill, decode) if failed(half)]
    failures.sort(key=lambda half: not (isinstance(half, WorkerResponse) and half.status < 500))
    return failures[0] if failures else None


def failed(half: WorkerStream | WorkerResponse | ConnectionFailed | Refused | None) -> bool:
    """Whether one half ended without a good answer."""
    return isinstance(half, ConnectionFailed | Refused) or (isinstance(half, WorkerResponse) and half.status >= 400)


def ends_both(prefill: WorkerResponse | ConnectionFailed) -> bool:
    """Whether prefill's failure ends decode's half, too, even where decode computes prompts whose KV does not come.

    Decode does not hear of a request that prefill refused, and would wait for its KV.
    """
    return isinstance(prefill, WorkerResponse) and (prefill.status < 500 or asked_to_retry_later(prefill))


def retryable(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether another try may help."""
    return isinstance(outcome, ConnectionFailed) or (
        isinstance(outcome, WorkerResponse) and outcome.status in RETRYABLE_STATUSES
    )


def counts_as_failure(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether an outcome speaks against its worker: not where it is the client's fault, nor where it is only full."""
    if isinstance(outcome, WorkerResponse):
        return outcome.status >= 500 and not asked_to_retry_later(outcome)
    return isinstance(outcome, ConnectionFailed) and not outcome.lost and not outcome.out_of_descriptors


def asked_to_retry_later(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether a worker said when to come back (`Retry-After`): it has no room, and knows it."""
    return isinstance(outcome, WorkerResponse) and "Retry-After" in outcome.headers
