"""The record of one sequence in the API process, from arrival to end, and the newest records for the dashboard.

Written by the engine client; read by metrics, the list of recent requests, request logs and traces.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import GenerateRequest, RequestTiming

TTFT_PARTS = ("intake", "bootstrap", "queue", "prefill", "transfer", "delivery")
"""Parts of TTFT in order of time; see `ttft_parts`."""
NUM_RECENT = 64
"""Most records that `RecentRequests` keeps."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """Statistics of one sequence, written until it ends. Its message `request` has prompt and parameters.

    `name` is the client's id of the sequence; `request.rid` is the server's, unique for all requests.
    Of the HTTP call: `path`, `request_id` (equal on both servers of a pair and in the client's response), `traceparent`
    of the parent span (None without tracing); all None without a call.
    `arrived_at` is wall time in seconds since 1970, `arrived_s` monotonic seconds; `intake_s` are the seconds from the
    arrival to the submission. Other seconds count from the arrival. `ttft_s` lasts until the first token, or the
    prompt's end if no token was requested; None if it ended before that. `seen_s` is the monotonic time of the newest
    token. `e2e_s` and `outcome` (`stop`, `length` or `abort`) are those of the end. `matched` is the stop string or
    token, `failure` the reason of a failure. `output_ids` and `texts` stay empty unless a listener has `keeps_output`.
    """

    request: GenerateRequest
    name: str
    path: str | None = None
    request_id: str | None = None
    traceparent: str | None = None
    arrived_at: float = 0.0
    arrived_s: float = 0.0
    intake_s: float = 0.0
    ttft_s: float | None = None
    seen_s: float | None = None
    e2e_s: float = 0.0
    outcome: str = ""
    cached_tokens: int = 0
    completion_tokens: int = 0
    timing: RequestTiming | None = None
    """The newest one that the scheduler sent. A stop string ends the sequence before the scheduler's last output."""
    matched: int | str | None = None
    failure: Failure | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)

    @property
    def room(self) -> int | None:
        """The bootstrap room; None in a monolith."""
        return None if self.request.room is None else self.request.room.room

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.input_ids)

    @property
    def parts(self) -> dict[str, float]:
        """See `ttft_parts`; empty without a `ttft_s`."""
        return {} if self.ttft_s is None else ttft_parts(self.ttft_s, self.intake_s, self.timing)


class RequestListener(Protocol):
    """Is notified of sequences on the event loop; must not block."""

    @property
    def keeps_output(self) -> bool:
        """True when records must have `output_ids` and `text`."""
        ...

    def started(self, record: RequestRecord) -> None:
        """A sequence was submitted."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A sequence has ended."""
        ...


def ttft_parts(ttft_s: float, intake_s: float, timing: RequestTiming | None) -> dict[str, float]:
    """Split the time from a request's arrival at this server to its first token into parts that add up to it.

        intake      parsing, chat template, tokenizing
        bootstrap   prefill: until decode's pages are known; decode: session, handshake, waiting for memory
        queue       until the first chunk was planned
        prefill     until the prompt was computed
        transfer    prefill: until every byte had landed; decode: the remaining time until KV and first token arrived
        delivery    from the scheduler to the API process, and the remainder

    All in seconds. The scheduler's parts come from other clocks than `ttft_s`, so a part is cut where the sum would
    exceed `ttft_s`. Parts without a share on this server are 0.
    """
    told: Mapping[str, float | None] = (
        {}
        if timing is None
        else {
            "bootstrap": timing.bootstrap_s,
            "queue": timing.queue_s,
            "prefill": timing.prefill_s,
            "transfer": timing.transfer_s,
        }
    )
    parts: dict[str, float] = {}
    left_s = ttft_s
    for name in TTFT_PARTS[:-1]:
        wanted_s = intake_s if name == "intake" else told.get(name) or 0.0
        parts[name] = min(max(wanted_s, 0.0), left_s)
        left_s -= parts[name]
    parts["delivery"] = left_s
    return parts


class RecentRequests:
    """A `RequestListener` that keeps the `NUM_RECENT` newest records of HTTP calls."""

    keeps_output = False

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)
        """As JSON objects: a record holds its prompt and, in the server, the state of its stream."""

    def started(self, record: RequestRecord) -> None:
        """See `RequestListener`."""

    def ended(self, record: RequestRecord) -> None:
        """See `RequestListener`."""
        if record.path is not None:
            self._records.append(_fields(record))

    def as_json(self) -> list[dict[str, Any]]:
        """Return the records as JSON objects, the newest first."""
        return list(reversed(self._records))


def _fields(record: RequestRecord) -> dict[str, Any]:
    timing = record.timing
    return {
        "id": record.name,
        "path": record.path,
        "room": None if record.room is None else str(record.room),
        "arrived_at": record.arrived_at,
        "outcome": record.outcome,
        "error": None if record.failure is None else record.failure.message,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_s": record.ttft_s,
        "ttft_parts": record.parts,
        "e2e_s": record.e2e_s,
        "kv_bytes": None if timing is None else timing.kv_bytes,
        "kv_transfer_s": None if timing is None else timing.kv_transfer_s,
    }
