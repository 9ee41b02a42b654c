"""HTTP calls from a server to the server that takes over its requests: `/migrate_in` and `/migrate_stream`.

With a control token each server proves it to the other (`http/worker_proof`); with an admin key it sends its own. Event
loop only; one per application.
"""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import msgspec
import orjson
from yarl import URL

from pdserve.errors import RequestError
from pdserve.http.session_proof import worker_key
from pdserve.http.worker_proof import WorkerProof
from pdserve.protocol.messages import EngineCoreOutput, GenerateRequest
from pdserve.server.engine_client.migration import Outputs
from pdserve.server.generation import from_wire

CONNECT_S = 5.0
TAKE_IN_S = 30.0
"""Seconds that the other server may take to compute the request, its connection included."""
SILENCE_S = 600.0
"""Seconds without an output after which a stream counts as broken."""
MAX_ANSWER_BYTES = 1 << 20
MAX_EVENT_BYTES = 64 << 20
FAILED = "migration_failed"
REFUSED = "migration_refused"
NO_ROOM = "migration_no_room"
NO_CACHE = "no_prefix_cache"
_EVENT = b"data: "


class TakeInBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /migrate_in`: the request as a value. `timeout_s`: seconds until it must be computed.

    `source`: a random name of the server that has the request. `weights`, `dtype`, `model` (`ModelSpec.digest`): of
    that server. They are compared where no KV, and so no handshake, comes.
    """

    request: GenerateRequest
    timeout_s: float = TAKE_IN_S
    source: str = ""
    weights: str = ""
    dtype: str = ""
    model: str = ""


class MigrateStreamBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /migrate_stream`: the request's name at the server that has taken it."""

    rid: str


def base_url(text: str | None) -> URL:
    """Parse the base URL of a server in the field `to`. Raises RequestError, naming `to`."""
    if text is None:
        raise RequestError("to is missing", field="to")
    try:
        url = URL(text)
        valid = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        valid = False
    if not valid or url.query_string or url.user or url.path not in ("", "/"):
        raise RequestError("to must be the base URL of a server, such as http://host:30000", field="to")
    return url.origin()


def _failed(why: str) -> RequestError:
    return RequestError(f"to: {why}", field="to", status=502, code=FAILED)


class MigrationClient:
    """Calls other servers. `token`: the control token, empty without one; `key`: the admin key, None without one.

    `ca_certs`: PEM file that verifies HTTPS servers; None: the system's.
    """

    def __init__(self, token: str, key: str | None, ca_certs: str | None = None) -> None:
        self._token = token
        self._key = key
        self._ca_certs = ca_certs
        self._session: aiohttp.ClientSession | None = None

    async def reach(self, url: URL) -> None:
        """Return once the server at `url` has answered a call, with any status.

        Raises:
            RequestError: 502, it does not answer within `CONNECT_S` seconds.
        """
        try:
            get = self._opened().get(url.with_path("/health"), allow_redirects=False)
            async with asyncio.timeout(CONNECT_S), get:
                return
        except (aiohttp.ClientError, OSError) as error:
            raise _failed(f"{url} does not answer: {error or type(error).__name__}") from error

    async def take_in(self, url: URL, taken: TakeInBody) -> None:
        """Have the server at `url` take the request; return once it computes it.

        Raises:
            RequestError: 409 naming the field in which the servers differ; 503 without memory there; 502 otherwise.
        """
        body = msgspec.json.encode(taken)
        try:
            async with asyncio.timeout(TAKE_IN_S + CONNECT_S):
                async with self._post(url, "/migrate_in", body) as response:
                    if response.status == 200:
                        return
                    answer = await response.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise _failed(f"{url} does not take the request: {error or type(error).__name__}") from error
        raise _refusal(url, response.status, answer)

    async def outputs(self, url: URL, rid: str) -> Outputs:
        """Yield the outputs of a request at the server at `url`, to its end.

        Raises:
            RequestError: the stream is refused, or breaks.
        """
        body = msgspec.json.encode(MigrateStreamBody(rid))
        try:
            async with self._post(url, "/migrate_stream", body) as response:
                if response.status != 200:
                    raise _refusal(url, response.status, await response.content.read(MAX_ANSWER_BYTES))
                async for line in response.content:
                    if line.startswith(_EVENT) and line != b"data: [DONE]\n":
                        yield decode_output(line.removeprefix(_EVENT))
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError) as error:
            raise _failed(f"the stream of {url} broke: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            proof = [WorkerProof(worker_key(self._token), CONNECT_S)] if self._token else []
            verify: ssl.SSLContext | bool = True
            if self._ca_certs is not None:
                verify = ssl.create_default_context(cafile=self._ca_certs)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=verify),  # each moved request keeps a connection
                cookie_jar=aiohttp.DummyCookieJar(),
                middlewares=proof,
                read_bufsize=MAX_EVENT_BYTES,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
            )
        return self._session

    def _post(self, url: URL, path: str, body: bytes) -> aiohttp.client._RequestContextManager:
        headers = {"Content-Type": "application/json"}
        if self._key and not self._token:
            headers["Authorization"] = f"Bearer {self._key}"
        return self._opened().post(url.with_path(path), data=body, headers=headers, allow_redirects=False)


def decode_output(data: bytes) -> EngineCoreOutput:
    """Decode an event of `/migrate_stream`. Raises msgspec.MsgspecError."""
    output = msgspec.json.decode(data, type=EngineCoreOutput)
    return output if output.logprobs is None else msgspec.structs.replace(output, logprobs=from_wire(output.logprobs))


def _refusal(url: URL, status: int, answer: bytes) -> RequestError:
    """Return the error for a server's refusal. A difference of the servers is named by its field."""
    try:
        error = orjson.loads(answer)["error"]
        code, message, param = error.get("code"), str(error.get("message")), error.get("param")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return _failed(f"{url} answered {status}")
    if code == NO_CACHE:
        return RequestError(message, status=409, code=NO_CACHE)
    if code == NO_ROOM:
        return RequestError(f"{url}: {message}", field="to", status=503, code=NO_ROOM)
    if code == "lora_mismatch":
        return RequestError(f"{url}: {message}", field="lora_path", status=409, code=REFUSED)
    if code == "weights_mismatch":
        return RequestError(f"{url}: {message}", field="weights", status=409, code=REFUSED)
    if code == "handshake_refused":
        return RequestError(message, field=message.partition(":")[0], status=409, code=REFUSED)
    if status == 409 or (status in (400, 404) and param):
        return RequestError(f"{url}: {message}", field=param, status=409, code=REFUSED)
    return _failed(f"{url} answered {status}: {message}")
