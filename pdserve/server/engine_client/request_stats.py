"""Reports sequences: to the metrics at each token, to listeners at start and end.

Owned by the engine client, which calls it on the event loop. Health probes are excluded from request statistics.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import msgspec

from pdserve.errors import RequestError
from pdserve.observe.metrics import RequestMetrics
from pdserve.observe.record import RequestListener, RequestRecord, RequestStart, ttft_parts
from pdserve.protocol.messages import EngineCoreOutput, FinishReason, GenerateRequest, RequestTiming
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.request_context import HttpCall


@dataclasses.dataclass(slots=True)
class SequenceProgress:
    """Progress of one sequence. Times are monotonic seconds; `seen_s` is the time of its newest token."""

    start: RequestStart
    arrived_s: float
    probe: bool = False
    ttft_s: float | None = None
    seen_s: float | None = None
    cached_tokens: int = 0
    num_tokens: int = 0
    finish: FinishReason | None = None
    refused: RequestError | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)


class RequestStatsRecorder:
    """Reports to `metrics` and to all `listeners`."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self.listeners: list[RequestListener] = []

    def traced(self, call: HttpCall | None) -> Callable[[GenerateRequest], GenerateRequest]:
        """Return a function that sets `traced` on requests when the trace span of `call` is recorded."""
        if call is None or call.span is None or not call.span.recorded:
            return lambda request: request
        return lambda request: msgspec.structs.replace(request, traced=True)

    def started(self, request: GenerateRequest, name: str, call: HttpCall | None) -> SequenceProgress:
        """Record the submission of a sequence. `name` is the client's id of it."""
        now = time.monotonic()
        intake_s = 0.0 if call is None else now - call.arrived_s
        start = RequestStart(
            key=request.rid,
            rid=name,
            path=None if call is None else call.path,
            room=None if request.room is None else request.room.room,
            arrived_at=time.time() - intake_s,
            intake_s=intake_s,
            input_ids=request.input_ids,
            sampling=request.sampling,
            stream=request.stream,
            traceparent=None if call is None else call.traceparent,
            request_id=None if call is None else call.request_id,
        )
        if not request.probe:
            self._metrics.started(start)
            for listener in self.listeners:
                listener.started(start)
        return SequenceProgress(start, now - intake_s, request.probe)

    def tokens(self, progress: SequenceProgress, output: EngineCoreOutput, update: GenerationUpdate) -> None:
        """Record an output, which may hold tokens and the finish.

        A request with `max_new_tokens` 0 has no tokens: its finish marks the end of prefill.
        """
        progress.finish = update.finish
        if progress.probe:
            return
        now, num_tokens = time.monotonic(), len(update.token_ids)
        if progress.seen_s is None:
            if num_tokens == 0 and (update.finish is None or update.finish.type == "abort"):
                return
            self._prompt_done(progress, output, update, now)
        elif num_tokens:
            self._metrics.next_tokens((now - progress.seen_s) / num_tokens, num_tokens)
        if num_tokens:
            self._metrics.generated(num_tokens)
            progress.seen_s = now
            progress.num_tokens += num_tokens
        if any(listener.keeps_output for listener in self.listeners):
            progress.output_ids += update.token_ids
            progress.text.append(update.text)

    def _prompt_done(
        self, progress: SequenceProgress, output: EngineCoreOutput, update: GenerationUpdate, now: float
    ) -> None:
        progress.seen_s = now
        progress.ttft_s = now - progress.arrived_s
        progress.cached_tokens = output.cached_tokens
        parts = ttft_parts(progress.ttft_s, progress.start.intake_s, update.timing)
        self._metrics.first_token(progress.ttft_s, parts)
        self._metrics.prompt_done(output.prompt_tokens, output.cached_tokens)

    def ended(self, progress: SequenceProgress, outcome: str, timing: RequestTiming | None) -> None:
        """Record the end of a sequence; the last call for it. `outcome` is its finish reason."""
        if progress.probe:
            return
        finish, refused = progress.finish, progress.refused
        record = RequestRecord(
            start=progress.start,
            outcome=outcome,
            ttft_s=progress.ttft_s,
            e2e_s=time.monotonic() - progress.arrived_s,
            prompt_tokens=len(progress.start.input_ids),
            cached_tokens=progress.cached_tokens,
            completion_tokens=progress.num_tokens,
            timing=timing,
            error=refused.message if refused is not None else None if finish is None else finish.message,
            code=refused.code if refused is not None else None if finish is None else finish.err_type,
            status=refused.status if refused is not None else None if finish is None else finish.status_code,
            matched=None if finish is None else finish.matched,
            output_ids=progress.output_ids,
            text="".join(progress.text),
        )
        self._metrics.ended(record)
        for listener in self.listeners:
            listener.ended(record)
