"""Records of one sequence in the API process, from arrival to end.

Made by the engine client; read by metrics, the list of recent requests, request logs and traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from pdserve.protocol.messages import RequestTiming
from pdserve.protocol.sampling import CoreSamplingParams

TTFT_PARTS = ("intake", "bootstrap", "queue", "prefill", "transfer", "delivery")
"""Parts of TTFT in order of time; see `ttft_parts`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A sequence is submitted. `rid` is the client's id; `key` is the server's, unique for all requests.

    `path` is of the HTTP call; None without one. `room`: None in a monolith. `arrived_at` is wall time in seconds since
    1970, `intake_s` the seconds from then to submission. `traceparent`: of the parent span; None without tracing.
    `request_id`: of the HTTP call, equal on both servers of a pair and in the client's response; None without one.
    """

    key: str
    rid: str
    path: str | None
    room: int | None
    arrived_at: float
    intake_s: float
    input_ids: Sequence[int]
    sampling: CoreSamplingParams
    stream: bool
    traceparent: str | None
    request_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A sequence has ended. Seconds count from its arrival.

    `ttft_s` lasts until the first token, or the prompt's end if no token was requested; None if it ended before that.
    `outcome` is `stop`, `length` or `abort`; `error` is the message of a failure, `status` its HTTP status, else None.
    `matched` is the stop string or token. `output_ids` and `text` are empty unless a listener has `keeps_output`.
    """

    start: RequestStart
    outcome: str
    ttft_s: float | None
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timing: RequestTiming | None
    error: str | None = None
    code: str | None = None
    status: int | None = None
    matched: int | str | None = None
    output_ids: Sequence[int] = ()
    text: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """See `ttft_parts`; empty without a `ttft_s`."""
        return {} if self.ttft_s is None else ttft_parts(self.ttft_s, self.start.intake_s, self.timing)


class RequestListener(Protocol):
    """Is notified of sequences on the event loop; must not block."""

    @property
    def keeps_output(self) -> bool:
        """True when records must have `output_ids` and `text`."""
        ...

    def started(self, start: RequestStart) -> None:
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
