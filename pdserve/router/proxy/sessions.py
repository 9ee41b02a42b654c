"""The router's sessions (SGLang): it completes the prompts of their requests, so that any pair can serve each of them.

    begin ── new text ──> a worker's /tokenize ──> whole prompt ──> a worker's /detokenize: its characters
          └─ body with `input_ids`, without `session_params` ──> the pair
    TurnReader <── the answer while it is relayed ──> SessionTurn.ended: the output, before the client has its end

The workers know of no session. A request that fails, or whose client leaves, is forgotten; the requests before it stay.
Made by `app`. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from pdserve.errors import RequestError
from pdserve.http.access import CLOSE_SESSION_PATH, GENERATE_PATH, OPEN_SESSION_PATH
from pdserve.http.credentials import Keys, authorization_of
from pdserve.http.errors import HttpRefusal, convert
from pdserve.http.response_events import GAP, MAX_EVENT_BYTES
from pdserve.http.session_store import (
    CloseSessionBody,
    OpenSessionBody,
    OpenSessions,
    SessionFields,
    SessionNode,
    SessionTurn,
    check_alone,
    required,
)
from pdserve.protocol.failure import Failure
from pdserve.router.http import BODY, json_response, refused
from pdserve.router.proxy.attempts import Drain
from pdserve.router.proxy.dispatch import EVENT_STREAM
from pdserve.router.proxy.relay import late_error
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.fanout import WorkerFanout
from pdserve.router.workers.outcome import (
    ConnectionFailed,
    EndedError,
    Outcome,
    WorkerResponse,
    WorkerStream,
    describe,
    error_of,
)

FIELD = "session_params"
REPLACED = Failure(
    code="aborted",
    message="another request of the session has replaced it",
    origin="router",
    retryable=False,
    status=400,
)
MAX_TOKEN_ID = (1 << 31) - 1
_DATA = b"data: "


class RouterSessions:
    """The open sessions, and the handlers of their paths. `keys`: the router's API keys."""

    def __init__(
        self, sessions: OpenSessions, keys: Keys, fanout: WorkerFanout, admission: Admission, drain: Drain
    ) -> None:
        self.sessions = sessions
        self._keys = keys
        self._fanout = fanout
        self._admission = admission
        self._drain = drain

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of sessions."""
        return [web.post(OPEN_SESSION_PATH, self.open), web.post(CLOSE_SESSION_PATH, self.close)]

    async def open(self, request: web.Request) -> web.Response:
        """Open a session of `/generate` (SGLang)."""
        try:
            body = convert(_parse(request[BODY]), OpenSessionBody)
            return json_response(self.sessions.open(body, self._owner(request), self._abort))
        except RequestError as error:
            return refused(HttpRefusal.of(error))

    async def close(self, request: web.Request) -> web.Response:
        """Close a session; requests that run go on (SGLang)."""
        try:
            body = convert(_parse(request[BODY]), CloseSessionBody)
            self.sessions.close(required(body.session_id, "session_id"), self._owner(request))
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        return web.Response()

    async def begin(self, request: web.Request, body: dict[str, Any]) -> tuple[dict[str, Any], SessionTurn | None]:
        """Return the body for the workers and the turn of a request with `session_params`; None for another one.

        Raises:
            RequestError: 400, 404 or 503 naming the field; 503 too if no worker tokenizes the prompt.
        """
        if request.path != GENERATE_PATH or body.get(FIELD) is None:
            return body, None
        params = convert(body[FIELD], SessionFields, prefix=FIELD)
        rid = body.get("rid")
        if rid is not None and not isinstance(rid, str):
            raise RequestError("rid must be text for a request of a session", field="rid")
        check_alone(1, _count(body))
        owner, field = self._owner(request), f"{FIELD}.id"
        session = self.sessions.find(required(params.id, field), owner, field)
        given, bos = await self._tokens(request, body, follows=params.rid is not None)
        turn = session.begin(params, rid or secrets.token_hex(16), given, bos)
        prompt = turn.prompt
        session.check_chars(await self._num_chars(request, prompt))
        self.sessions.check_room(len(prompt))
        whole = {name: value for name, value in body.items() if name not in ("text", FIELD)}
        return whole | {"input_ids": prompt, "rid": turn.node.rid}, turn

    async def _tokens(
        self, request: web.Request, body: dict[str, Any], *, follows: bool
    ) -> tuple[list[int], int | None]:
        """Return the new tokens of a body, and the BOS token (None: there is none, or the tokens follow no request)."""
        text, ids = body.get("text"), body.get("input_ids")
        if body.get("input_embeds") is not None:
            raise RequestError("input_embeds and session_params cannot be combined", field="input_embeds")
        if (text is None) == (ids is None):
            raise RequestError("exactly one of text and input_ids must be given", field="text")
        if text is not None and not isinstance(text, str):
            raise RequestError("text must be a string for a request of a session", field="text")
        if ids is not None:
            _check_ids(ids)
            if not follows:
                return ids, None
        answer = await self._query(request, "/tokenize", {"prompt": ["" if text is None else text, ""]})
        lists = _field(answer, "tokens")
        if not (isinstance(lists, list) and len(lists) == 2 and all(isinstance(one, list) for one in lists)):
            if ids is not None:
                return ids, None  # servers without a tokenizer
            raise RequestError(_refusal(answer), field="text", status=answer.status if answer.status >= 400 else 502)
        return lists[0] if ids is None else ids, lists[1][0] if lists[1] else None

    async def _num_chars(self, request: web.Request, prompt: list[int]) -> int:
        """Return the characters of a prompt; of servers without a tokenizer its tokens."""
        answer = await self._query(request, "/detokenize", {"tokens": prompt, "skip_special_tokens": False})
        text = _field(answer, "text")
        return len(text) if isinstance(text, str) else len(prompt)

    async def _query(self, request: web.Request, path: str, body: dict[str, Any]) -> WorkerResponse:
        answer = await self._fanout.query(request, path, orjson.dumps(body))
        if answer is None:
            message = "no worker tokenizes the prompt of the session"
            raise RequestError(message, status=503, code="no_worker", retry_after_s=1)
        return answer

    def _abort(self, node: SessionNode) -> None:
        """End a running request that another one replaces."""
        self._admission.abort(node.name)
        self._drain.end(node.name, REPLACED)

    def _owner(self, request: web.Request) -> str:
        return self._keys.find(authorization_of(request.headers)) or ""


class TurnReader:
    """Reads the output of a request from its answer, and records it in its session."""

    def __init__(self, turn: SessionTurn) -> None:
        self._turn = turn
        self._output: list[int] = []
        self._rest = bytearray()
        self._is_lost = False

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of a stream, before the client gets them."""
        if self._is_lost:
            return
        start = max(0, len(self._rest) - 1)
        self._rest += piece
        while (end := self._rest.find(GAP, start)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + len(GAP)]
            start = 0
            if event.startswith(_DATA):
                self.take(event.removeprefix(_DATA))
        if len(self._rest) > MAX_EVENT_BYTES:
            self._is_lost = True
            self._rest.clear()

    def take(self, data: bytes) -> None:
        """Take a whole answer, or an event, which has all tokens so far or the new ones only."""
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return  # the mark at the end
        answer = value if isinstance(value, dict) else {}
        ids, meta = answer.get("output_ids"), answer.get("meta_info")
        if not (isinstance(ids, list) and isinstance(meta, dict)):
            return
        self._output = ids if len(ids) == meta.get("completion_tokens") else self._output + ids
        if meta.get("finish_reason") is not None:
            self._turn.ended(self._output)


async def with_turn(outcome: Outcome, turn: SessionTurn | None, deadline: float) -> tuple[Outcome, TurnReader | None]:
    """Return the outcome, and what reads the stream of a session's request (None: another answer).

    A whole answer is read here, so that its turn has ended when the client has it. `deadline`: of the event loop.
    """
    if turn is None:
        return outcome, None
    reader = TurnReader(turn)
    if isinstance(outcome, WorkerStream):
        if outcome.response.content_type == EVENT_STREAM:
            return outcome, reader
        try:
            async with asyncio.timeout_at(deadline):
                body = outcome.first + await outcome.response.read()
        except TimeoutError:
            return late_error().failure, None
        except EndedError as error:
            return error.failure, None
        except (aiohttp.ClientError, OSError) as error:
            return ConnectionFailed(outcome.worker, describe(error)), None
        headers = outcome.headers.copy()
        headers.popall("Content-Length", None)
        outcome = WorkerResponse(outcome.worker, outcome.response.status, headers, body)
    if isinstance(outcome, WorkerResponse) and outcome.status == 200:
        reader.take(outcome.body)
    return outcome, None


@contextlib.contextmanager
def attending(turn: SessionTurn | None) -> Iterator[None]:
    """Enter a request into its session (None: it has none); it is forgotten unless it has ended in the block.

    Raises:
        RequestError: see `SessionTurn.running`.
    """
    if turn is None:
        yield
        return
    with turn.running():
        try:
            yield
        finally:
            turn.left()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_request") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}", code="invalid_request")
    return body


def _count(body: dict[str, Any]) -> int:
    """Return `n` of a body; 1 if it is of a wrong type, which the worker refuses."""
    params = body.get("sampling_params")
    if isinstance(params, list) and len(params) == 1:
        params = params[0]
    n = params.get("n") if isinstance(params, dict) else None
    return n if isinstance(n, int) and not isinstance(n, bool) else 1


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, list) or any(isinstance(one, list) for one in ids):
        check_alone(0 if isinstance(ids, list) else 1, 1)
        raise RequestError("input_ids must be a list of token ids", field="input_ids")
    if not ids:
        raise RequestError("input_ids must not be empty", field="input_ids")
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_TOKEN_ID for one in ids):
        raise RequestError("input_ids has a value that is no token id", field="input_ids")


def _field(answer: WorkerResponse, name: str) -> Any:
    """Return a field of a worker's answer; None if it refused, or answered something else."""
    if answer.status != 200:
        return None
    try:
        value = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return value.get(name) if isinstance(value, dict) else None


def _refusal(answer: WorkerResponse) -> str:
    _, message = error_of(answer.body)
    url = answer.worker.spec.url
    return f"text: {message}" if message else f"text: the worker {url} does not tokenize it ({answer.status})"
