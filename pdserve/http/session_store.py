"""The open sessions of SGLang's API, at a server or a router.

A session is a tree of requests. A request appends its prompt to the prompt and output of an earlier one (`rid`), or
begins a new root. The session has the token ids, so that a client sends only what is new; the KV cache finds the prefix
as it finds any other.

    OpenSessions.open ──> OpenSession
    OpenSession.begin ──> SessionTurn (the whole prompt) ──> running ──> ended, or left: the request has failed

`server/sglang_api/sessions.py` and `router/proxy/sessions.py` have the endpoints. Event loop only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec

from pdserve.errors import RequestError

MAX_SESSIONS = 1024
MAX_SESSION_REQUESTS = 1024
"""Most requests of a session."""
MAX_SESSION_TOKENS = 1 << 24
"""Most token ids of all sessions together, 4 bytes each."""
IDLE_S = 3600.0
"""Seconds without a request after which a session is closed, unless `/open_session` gives fewer (`timeout`)."""
MAX_ID_CHARS = 256
FULL_RETRY_S = 60
T = TypeVar("T")


class OpenSessionBody(msgspec.Struct):
    """`POST /open_session`. `capacity_of_str_len`, required: most characters of a prompt with its session.

    `timeout`: seconds without a request after which the session is closed.
    """

    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    session_id: str | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=IDLE_S)] | None = None


class CloseSessionBody(msgspec.Struct):
    """`POST /close_session`; `session_id` is required."""

    session_id: str | None = None


class SessionFields(msgspec.Struct, forbid_unknown_fields=True):
    """`session_params` of `/generate`, with the session's `id`, which is required; see `OpenSession.begin`."""

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


@dataclasses.dataclass(eq=False)
class SessionNode:
    """One request of a session: its prompt, and its output once it has ended (None before). `parent` None: a root.

    `name`: unlike `rid`, which a client chooses, no other request has it.
    """

    rid: str
    prompt: array[int]
    parent: SessionNode | None
    output: array[int] | None = None
    children: list[SessionNode] = dataclasses.field(default_factory=list)
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))

    @property
    def num_tokens(self) -> int:
        """Token ids that are kept."""
        return len(self.prompt) + len(self.output or ())

    def tree(self) -> Iterator[SessionNode]:
        """Yield the node and all below it."""
        yield self
        for child in self.children:
            yield from child.tree()


Abort = Callable[[SessionNode], object]
"""Ends a running request that another one replaces."""


class OpenSession:
    """One open session. `owner`: the API key that opened it, or empty. `abort`: ends a running request.

    `now`: monotonic seconds.
    """

    def __init__(self, body: OpenSessionBody, owner: str, abort: Abort, now: Callable[[], float]) -> None:
        self.id = body.session_id or secrets.token_hex(16)
        self.owner = owner
        self.most_chars = required(body.capacity_of_str_len, "capacity_of_str_len")
        self.idle_s = body.timeout or IDLE_S
        self.used_s = now()
        """Time of the last begin or end of a request."""
        self.num_tokens = 0
        """Token ids that are kept."""
        self._abort = abort
        self._now = now
        self._nodes: dict[str, SessionNode] = {}

    @property
    def is_busy(self) -> bool:
        """Whether one of its requests runs."""
        return any(node.output is None for node in self._nodes.values())

    def begin(self, params: SessionFields, rid: str, given: Sequence[int], bos: int | None) -> SessionTurn:
        """Begin the request `rid` with the new tokens `given`, and return it with its whole prompt.

        Without `params.rid` the tokens are a prompt of their own, with `replace` in place of all requests of the
        session. Else they follow prompt and output of that request, with `replace` in place of the requests that
        followed it. `drop_previous_output`: they follow its prompt alone. `offset`, if not 0: they follow the first
        `offset` tokens; a negative one counts from the end. A BOS token (`bos`) before appended tokens is dropped.

        Raises:
            RequestError: 400 or 404 naming the field of `session_params`.
        """
        if rid in self._nodes:
            raise RequestError(f"rid: the session has a request {rid!r}", field="rid")
        if params.rid is None:
            if params.offset or params.drop_previous_output:
                field = "session_params.rid"
                raise RequestError(f"{field} is missing: offset and drop_previous_output need one", field=field)
            roots = [node for node in self._nodes.values() if node.parent is None]
            return self._turn(rid, array("i", given), None, roots if params.replace else [])
        parent = self._nodes.get(params.rid)
        if parent is None:
            field = "session_params.rid"
            message = f"{field}: the session has no request {params.rid[:100]!r}"
            raise RequestError(message, field=field, status=404, code="session_request_not_found")
        if parent.output is None and not params.replace:
            field = "session_params.rid"
            raise RequestError(f"{field}: the request {params.rid!r} still runs", field=field)
        before = parent.prompt + (parent.output or array("i")) if not params.drop_previous_output else parent.prompt
        if params.offset:
            if abs(params.offset) > len(before):
                field = "session_params.offset"
                raise RequestError(f"{field} is {params.offset}; there are {len(before)} tokens", field=field)
            before = before[: params.offset]
        new = given[1:] if given and given[0] == bos else given
        return self._turn(rid, before + array("i", new), parent, parent.children if params.replace else [])

    def enter(self, node: SessionNode, replaced: Sequence[SessionNode]) -> None:
        """Add a request whose body is valid, in place of the nodes `replaced`.

        Raises:
            RequestError: 400, another request of the session has changed it meanwhile, or has the same id.
        """
        parent = node.parent
        if node.rid in self._nodes or (parent is not None and self._nodes.get(parent.rid) is not parent):
            raise RequestError("session_params: the session has changed meanwhile", field="session_params")
        for each in list(replaced):
            self._remove(each)
        if parent is not None and parent.output is None:  # only with `replace`
            self._abort(parent)
        self._nodes[node.rid] = node
        self.num_tokens += node.num_tokens
        if parent is not None:
            parent.children.append(node)

    def drop(self, node: SessionNode) -> None:
        """Forget a request that has failed. One that was replaced by a request that follows it stays without output."""
        self.used_s = self._now()
        if node.children:
            node.output = array("i")
        elif self._nodes.get(node.rid) is node:
            self._remove(node)

    def _turn(
        self, rid: str, prompt: array[int], parent: SessionNode | None, replaced: Sequence[SessionNode]
    ) -> SessionTurn:
        if len(self._nodes) >= MAX_SESSION_REQUESTS and not replaced:
            field = "session_params.id"
            message = f"{field}: the session has {MAX_SESSION_REQUESTS} requests, the maximum; replace some"
            raise RequestError(message, field=field)
        return SessionTurn(self, SessionNode(rid, prompt, parent), tuple(replaced))

    def _remove(self, node: SessionNode) -> None:
        """Remove `node` and all below it; those that run are aborted."""
        if node.parent is not None and node in node.parent.children:
            node.parent.children.remove(node)
        for each in node.tree():
            if self._nodes.get(each.rid) is not each:  # removed before
                continue
            del self._nodes[each.rid]
            self.num_tokens -= each.num_tokens
            if each.output is None:
                self._abort(each)

    def ended(self, node: SessionNode, token_ids: Sequence[int]) -> None:
        """Record the whole output of a request, once."""
        if node.output is not None:
            return
        node.output = array("i", token_ids)
        self.used_s = self._now()
        if self._nodes.get(node.rid) is node:
            self.num_tokens += len(node.output)

    def check_chars(self, num_chars: int) -> None:
        """Check the characters of a prompt with its session.

        Raises:
            RequestError: 400, they are more than the session takes.
        """
        if num_chars > self.most_chars:
            field = "session_params"
            message = f"the prompt has {num_chars} characters with its session, whose capacity is {self.most_chars}"
            raise RequestError(f"{field}: {message}", field=field, code="session_capacity_exceeded")


@dataclasses.dataclass(frozen=True)
class SessionTurn:
    """A request of a session, from the check of its body to its end."""

    session: OpenSession
    node: SessionNode
    replaced: tuple[SessionNode, ...]
    """Requests in whose place it is."""

    @property
    def prompt(self) -> list[int]:
        """The whole prompt."""
        return self.node.prompt.tolist()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Enter the request into the session; it is dropped again if the block fails before the output has ended."""
        self.session.enter(self.node, self.replaced)
        try:
            yield
        except BaseException:
            self.left()
            raise

    def ended(self, token_ids: Sequence[int]) -> None:
        """Record the whole output; a request that was aborted may be followed, too."""
        self.session.ended(self.node, token_ids)

    def left(self) -> None:
        """Drop the request, whose client is gone, unless it has ended."""
        if self.node.output is None:
            self.session.drop(self.node)


def check_alone(num_prompts: int, n: int) -> None:
    """Check that a request of a session has one sequence. Raises RequestError, 400."""
    if num_prompts != 1 or n != 1:
        raise RequestError("session_params needs one prompt and n=1", field="session_params")


def required(value: T | None, field: str) -> T:
    """Return `value`. Raises RequestError, 400 naming `field`, if it is None."""
    if value is None:
        raise RequestError(f"{field} is missing", field=field)
    return value


class OpenSessions:
    """The open sessions by id. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._sessions: dict[str, OpenSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, body: OpenSessionBody, owner: str, abort: Abort) -> str:
        """Open a session and return its id.

        Raises:
            RequestError: 400 naming the field: the id is open or not valid. 503: too many sessions are open.
        """
        self._close_idle()
        if body.session_id is not None and not 1 <= len(body.session_id) <= MAX_ID_CHARS:
            raise RequestError(f"session_id must have 1 to {MAX_ID_CHARS} characters", field="session_id")
        if body.session_id in self._sessions:
            message = f"session_id: a session {body.session_id!r} is open"
            raise RequestError(message, field="session_id", code="session_exists")
        if len(self._sessions) >= MAX_SESSIONS:
            raise _full(f"{MAX_SESSIONS} sessions are open")
        session = OpenSession(body, owner, abort, self._now)
        self._sessions[session.id] = session
        return session.id

    def close(self, session_id: str, owner: str) -> None:
        """Close a session; its running requests go on. Raises RequestError as `find`."""
        del self._sessions[self.find(session_id, owner, "session_id").id]

    def find(self, session_id: str, owner: str, field: str) -> OpenSession:
        """Return an open session, which counts as used.

        Raises:
            RequestError: 404 naming `field`: this owner has no such session, or no more.
        """
        self._close_idle()
        found = self._sessions.get(session_id)
        if found is None or found.owner != owner:
            message = f"{field}: there is no open session {session_id[:100]!r}"
            raise RequestError(message, field=field, status=404, code="session_not_found")
        found.used_s = self._now()
        return found

    def check_room(self, num_tokens: int) -> None:
        """Check that `num_tokens` more token ids have room.

        Raises:
            RequestError: 503, the sessions hold too many.
        """
        if sum(session.num_tokens for session in self._sessions.values()) + num_tokens > MAX_SESSION_TOKENS:
            raise _full(f"the open sessions have {MAX_SESSION_TOKENS} tokens, the maximum")

    def _close_idle(self) -> None:
        now = self._now()
        idle = [one.id for one in self._sessions.values() if now - one.used_s > one.idle_s and not one.is_busy]
        for session_id in idle:
            del self._sessions[session_id]


def _full(why: str) -> RequestError:
    return RequestError(f"{why}; close some", status=503, code="sessions_full", retry_after_s=FULL_RETRY_S)
