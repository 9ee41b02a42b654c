"""What a server tells a router of each event of a stream, so that another server can go on where it broke off.

    router ── X-PDServe-Stream-State: 1 ──> server     the router asks for it; it never passes a client's header on
    router <── `: pdserve {...}` ── server             a line before `data:` of each event, a comment to other readers
    router ── body + `pdserve_resume` ──> server       what was told so far; the server goes on behind it

What is told is the client's own: ids of its tokens, and what it is shown anyway. So a client that asks a server for it
directly, or sends the field, can reach nothing but its own answer. The router takes the lines out of streams, and the
field out of bodies. Used by `server/request/stream_states.py` and `router/proxy/stream_retry.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

ROLE_HEADER = "X-PDServe-Role"
NO_ROLE = "none"


STATE_HEADER = "X-PDServe-Stream-State"
RESUME_FIELD = "pdserve_resume"
MARK = b": pdserve "
EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MAX_HEAD_CHARS = 1024

ShortText = msgspec.Meta(max_length=MAX_HEAD_CHARS)


class EventState(msgspec.Struct, omit_defaults=True):
    """What is told before one event.

    `token_ids`: tokens since the event before; the event shows their text as far as it can be shown.
    `head`: of the first event, what all events have in common. `logprobs`: `[logprob, top, picked]` of each token,
    where events repeat those of earlier tokens. `tail`: of the last event that has tokens, all that follows it but
    `[DONE]`; None while more tokens come.
    """

    token_ids: list[int] = msgspec.field(default_factory=list)
    head: dict[str, Any] | None = None
    cached_tokens: int = 0
    logprobs: list[Any] | None = None
    tail: str | None = None

    def line(self) -> bytes:
        """The comment line, with its end."""
        return MARK + msgspec.json.encode(self) + b"\n"


def split_event(event: bytes) -> tuple[EventState | None, bytes]:
    """An event without its end: what is told of it, and the event as the client gets it."""
    if not event.startswith(MARK):
        return None, event
    line, _, rest = event.partition(b"\n")
    try:
        return msgspec.json.decode(line.removeprefix(MARK), type=EventState), rest
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, rest
