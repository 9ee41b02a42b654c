"""Client of bootstrap servers (`bootstrap`): prefill replicas register routes, and decode's directory looks them up.

With a control token each request is an exchange (`base/proof`): challenge, the server's proof, then the request with
our proof, and a proven answer. The client sends nothing that depends on the token before the server has proven that it
knows the token. Redirects are not followed, and an answer is read up to `MAX_BODY_BYTES`. `BootstrapClient` has no
timeouts of its own: its callers set one deadline for all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver
from yarl import URL

from pdserve.base.env import SAME_TOKEN
from pdserve.base.hosts import is_host
from pdserve.base.log import escaped
from pdserve.base.proof import PROOF_HEADER, Challenge, ControlKey
from pdserve.errors import ProofError, TransferError
from pdserve.transfer.bootstrap_routes import MAX_BODY_BYTES, ChallengeAnswer, FoundRoute, ReplicaRoute, ServerFacts

TOKEN_MISMATCH = "control_token_mismatch"
"""Error code: the two servers have different control tokens, or one has none."""
_FINAL = frozenset({"bootstrap_refused", TOKEN_MISMATCH})
"""Error codes with which another try fails as well."""
_FACTS = "engine_rank=-1&target_dp_group=-1&target_pp_rank=-1"
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
T = TypeVar("T")


class BootstrapError(TransferError):
    """A bootstrap server was not found, or gave no valid answer.

    The message never quotes the other side. `detail` quotes it, escaped, and is for the log only.
    """

    def __init__(self, message: str, *, code: str, retryable: bool = True, detail: str = "") -> None:
        super().__init__(message, code=code, retryable=retryable)
        self.detail = escaped(detail)


class BootstrapClient:
    """Sends requests to the bootstrap server at `host:port`; `key` None: without a token. One event loop, in `async
    with`.

    Raises:
        BootstrapError: from the constructor, when `host` is no valid host; from the methods, when there is no valid
            answer.
    """

    def __init__(self, host: str, port: int, key: ControlKey | None, resolver: AbstractResolver | None = None) -> None:
        if not is_host(host):
            raise BootstrapError(f"not a bootstrap address: {host[:100]!r}", code="bad_address", retryable=False)
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._key = key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, resolver=resolver),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "pdserve", "Accept-Encoding": "identity"},
            timeout=_NO_TIMEOUT,
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def register(self, route: ReplicaRoute) -> None:
        """Register the route of a replica."""
        await self._ask("PUT", "/route", msgspec.json.encode(route))

    async def facts(self) -> ServerFacts:
        """Fetch the facts that all replicas share."""
        return self._decode(await self._ask("GET", f"/route?{_FACTS}"), ServerFacts)

    async def replica(self, dp_rank: int) -> ReplicaRoute:
        """Fetch the route of one replica."""
        target = f"/route?engine_rank=0&target_dp_group={dp_rank}&target_pp_rank=0"
        found = self._decode(await self._ask("GET", target), FoundRoute)
        return ReplicaRoute(**{field: getattr(found, field) for field in ReplicaRoute.__struct_fields__})

    async def _ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        if self._key is None:
            status, _, content = await self._send(method, target, body)
            return self._expect(status, content)
        challenge = await self._challenge(self._key)
        sent = {PROOF_HEADER: challenge.header(method, target, body)}
        status, headers, content = await self._send(method, target, body, sent)
        try:
            challenge.check_answer(headers.get(PROOF_HEADER), status, content)
        except ProofError as error:
            raise self._error("the answer of {} is not proven", "bootstrap_unproven", f"{status}: {error}") from error
        return self._expect(status, content)

    async def _challenge(self, key: ControlKey) -> Challenge:
        """Return an exchange with a server that has proven that it knows the token."""
        challenge = Challenge(key)
        status, _, content = await self._send("GET", f"/challenge?nonce={challenge.nonce}")
        if status == 409:
            raise self._mismatch("no control token, this server has one")
        answer = self._decode(self._expect(status, content), ChallengeAnswer)
        try:
            challenge.accept(answer.nonce, answer.proof)
        except ProofError as error:
            with contextlib.suppress(BootstrapError):
                await self._send("GET", "/challenge?mismatch=1")  # for the server's log only
            raise self._mismatch("another control token than this server") from error
        return challenge

    async def _send(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        url = URL(f"http://{self._where}{target}", encoded=True)
        try:
            async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                return answer.status, answer.headers, await self._read(answer.content)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message, detail = "no bootstrap server answers at {}", f"{type(error).__name__}: {error}"
            raise self._error(message, "bootstrap_unreachable", detail) from error

    async def _read(self, stream: aiohttp.StreamReader) -> bytes:
        content = bytearray()
        async for chunk in stream.iter_any():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise self._error("what answers at {} is no pdserve bootstrap server", detail="its answer is too long")
        return bytes(content)

    def _expect(self, status: int, content: bytes) -> bytes:
        if status == 200:
            return content
        detail = f"{status}: {content[:500].decode(errors='replace')}"
        if status == 401:
            raise self._mismatch(
                "a control token, this server has none" if self._key is None else "another control token"
            )
        if status >= 500:
            raise self._error(f"the bootstrap server at {{}} is not ready ({status})", "bootstrap_unready", detail)
        raise self._error(f"the bootstrap server at {{}} refuses ({status})", detail=detail)

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._error("what answers at {} is no pdserve bootstrap server", detail=str(error)) from error

    def _mismatch(self, what: str) -> BootstrapError:
        return self._error(f"the bootstrap server at {{}} has {what}; {SAME_TOKEN}", TOKEN_MISMATCH)

    def _error(self, message: str, code: str = "bootstrap_refused", detail: str | bytes = "") -> BootstrapError:
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else detail
        return BootstrapError(message.format(self._where), code=code, retryable=code not in _FINAL, detail=text[:1000])


# ---------------------------------------------------------------------- for callers without an event loop


def register_route(host: str, port: int, route: ReplicaRoute, token: str = "", timeout_s: float = 5.0) -> None:
    """Register a replica with our own server's bootstrap server at `host:port`. Blocks up to `timeout_s`.

    Raises:
        BootstrapError: not reachable (retryable), or refused (not retryable; the text names the field).
    """
    try:
        _run(host, port, token, timeout_s, lambda client: client.register(route))
    except BootstrapError as error:
        raise BootstrapError(
            f"{error}: {error.detail}", code=error.code, retryable=error.retryable, detail=error.detail
        ) from error


def fetch_facts(host: str, port: int, token: str = "", timeout_s: float = 5.0) -> ServerFacts:
    """Fetch the facts that all replicas of the prefill server share. Blocks up to `timeout_s`.

    Raises:
        BootstrapError: not reachable or not complete yet (retryable), or refused (not retryable).
    """
    return _run(host, port, token, timeout_s, lambda client: client.facts())


def fetch_replica(host: str, port: int, token: str = "", *, dp_rank: int = 0, timeout_s: float = 5.0) -> ReplicaRoute:
    """Fetch the route of one replica. Blocks up to `timeout_s`.

    Raises:
        BootstrapError: as `fetch_facts`; not retryable when there is no such replica.
    """
    return _run(host, port, token, timeout_s, lambda client: client.replica(dp_rank))


def _run(host: str, port: int, token: str, timeout_s: float, ask: Callable[[BootstrapClient], Awaitable[T]]) -> T:
    async def asked() -> T:
        async with asyncio.timeout(timeout_s):
            async with BootstrapClient(host, port, ControlKey(token) if token else None) as client:
                return await ask(client)

    try:
        return asyncio.run(asked())
    except TimeoutError as error:
        message = f"no bootstrap server answers at {host}:{port} within {timeout_s:g} s"
        raise BootstrapError(message, code="bootstrap_unreachable") from error
