"""One sequence as the API process saw it, from its arrival to its end. Made by the engine client, read by all that tell
of requests: metrics, the list of the newest ones, logs, traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from pdserve.protocol.messages import RequestTiming
from pdserve.protocol.sampling import CoreSamplingParams

TTFT_PARTS = ("intake", "bootstrap", "queue", "prefill", "transfer", "delivery")
"""In the order in which they follow each other; see `ttft_parts`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A sequence is submitted. `rid` is the client's name of it, `key` is ours, which no other request ever has.

    `arrived_at` is wall time, `intake_s` what passed from then to now. `traceparent`: of the span that the
    sequence's own are children of; None where nobody traces. `request_id`: of the HTTP call, the same on both servers
    of a pair and in the client's answer; None where there was none.
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
    """A sequence has ended. Seconds count from its arrival; `ttft_s` is until the first token, until the prompt's end
    where no token was asked for, and None when neither came.

    `outcome` is `stop`, `length` or `abort`; `error` says why where it failed, `status` the HTTP status for it.
    `output_ids` and `text` are there where a listener asked to keep them.
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
    """Told of sequences on the event loop; must not block."""

    @property
    def keeps_output(self) -> bool:
        """True when records shall have `output_ids` and `text`."""
        ...

    def started(self, start: RequestStart) -> None:
        """A sequence was submitted."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """It has ended."""
        ...


def ttft_parts(ttft_s: float, intake_s: float, timing: RequestTiming | None) -> dict[str, float]:
    """The time from a request's arrival at this server to its first token, in parts that add up to it.

        intake      parsing, chat template, tokenizing
        bootstrap   prefill: until decode's pages are known; decode: session, handshake, waiting for memory
        queue       until the first chunk was planned
        prefill     until the prompt was computed
        transfer    prefill: until every byte had landed; decode: the rest of the time until all was there
        delivery    from the scheduler to here, and what no other part has

    The scheduler's parts are measured by other clocks than the whole: what would make the sum longer than it is left
    off. Parts that this server has no share in are 0.
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
