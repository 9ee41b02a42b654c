"""Resume state in a stream's events, with which another server can continue a stream that broke.

    router ── X-PDServe-Stream-State: 1 ──> server     the router requests the state; a client's header is not forwarded
    router <── `: pdserve {...}` ── server             a line before `data:` of each event, an SSE comment; before each
                                                       line of Ollama's API
    router ── body + `pdserve_resume` ──> server       the state so far; the server continues after it

The state holds only data of the client: the ids of its tokens, and text that it is sent anyway. A client that requests
the state from a server directly, or sends the field, therefore reaches only its own answer. The router removes the
lines from streams and the field from bodies. Used by `server/generation.py` and
`router/proxy/stream_retry.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

ROLE_HEADER = "X-PDServe-Role"
NO_ROLE = "none"
MEMORY_RELEASED = "memory_released"
"""Status in `/health` of a server that takes no requests until its memory is back, and code of its refusals."""


STATE_HEADER = "X-PDServe-Stream-State"
RESUME_FIELD = "pdserve_resume"
MARK = b": pdserve "
EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
MAX_HEAD_CHARS = 1024

ShortText = msgspec.Meta(max_length=MAX_HEAD_CHARS)


class _OllamaLine(msgspec.Struct):
    """One line of a stream of Ollama's API. `done`: it is the last one."""

    done: bool = False


@dataclasses.dataclass(frozen=True)
class StreamForm:
    """Events by which the streams of one API end."""

    last: bytes
    error: bytes
    """The first bytes of an error event."""
    after_error: bytes
    """Events after an error event."""
    end: bytes = EVENT_END
    """What ends each event. A line break: the stream consists of lines of JSON, and the last one has `"done": true`."""

    def is_last(self, event: bytes) -> bool:
        """Whether an event without its end is the last one of a complete stream."""
        if self.end == EVENT_END:
            return event + EVENT_END == self.last
        if b'"done":true' not in event:
            return False
        try:
            return msgspec.json.decode(event, type=_OllamaLine).done
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


OPENAI_STREAM = StreamForm(DONE, b'data: {"error":', DONE)
ANTHROPIC_STREAM = StreamForm(MESSAGE_STOP, b"event: error\n", b"")
OLLAMA_STREAM = StreamForm(b"", b'{"error":', b"", b"\n")


class EventState(msgspec.Struct, omit_defaults=True):
    """The resume state of one event.

    `token_ids`: tokens since the previous event; the event holds their text as far as it is complete.
    `head`: fields common to all events, in the first event only. `logprobs`: `[logprob, top, picked]` of each token, if
    events repeat those of earlier tokens. `tail`: in the last event with tokens, the rest of the stream except
    its last event (`StreamForm.last`); None while more tokens follow. `cached_details`: the fields of
    `CachedTokensDetails`; None: all cached tokens were on the device. `group`: number of events that hold the text of
    these tokens, this one included; a router passes on all or none of them. `weights`: version and fingerprint of the
    weights that computed them; empty: unknown.
    """

    token_ids: list[int] = msgspec.field(default_factory=list)
    head: dict[str, Any] | None = None
    cached_tokens: int = 0
    logprobs: list[Any] | None = None
    tail: str | None = None
    cached_details: dict[str, int | None] | None = None
    group: int = 1
    weights: str = ""

    def line(self) -> bytes:
        """Encode the state as a comment line, with its line break."""
        return MARK + msgspec.json.encode(self) + b"\n"


def split_event(event: bytes) -> tuple[EventState | None, bytes]:
    """Split an event without its end into the resume state and the event for the client."""
    if not event.startswith(MARK):
        return None, event
    line, _, rest = event.partition(b"\n")
    try:
        return msgspec.json.decode(line.removeprefix(MARK), type=EventState), rest
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, rest
