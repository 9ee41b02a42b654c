"""Reports sequences: to the metrics at each token, to listeners at start and end.

Owned by the engine client, which calls it on the event loop. Health probes are excluded from request statistics.
"""

from __future__ import annotations

import time

import msgspec

from pdserve.observe.metrics import RequestMetrics
from pdserve.observe.record import RequestListener, RequestRecord, ttft_parts
from pdserve.protocol.messages import EngineCoreOutput
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.request_context import HttpCall


class RequestStatsRecorder:
    """Writes the statistics of records, and reports to `metrics` and to all `listeners`."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self.listeners: list[RequestListener] = []

    def started(self, record: RequestRecord, call: HttpCall | None) -> None:
        """Record the submission of a sequence by `call`. A request is `traced` if the call's span is recorded."""
        now = time.monotonic()
        record.arrived_at, record.arrived_s = time.time(), now
        if call is not None:
            record.intake_s = now - call.arrived_s
            record.arrived_at -= record.intake_s
            record.arrived_s = call.arrived_s
            record.path, record.request_id, record.traceparent = call.path, call.request_id, call.traceparent
            if call.span is not None and call.span.recorded:
                record.request = msgspec.structs.replace(record.request, traced=True)
        if not record.request.probe:
            self._metrics.started(record)
            for listener in self.listeners:
                listener.started(record)

    def tokens(self, record: RequestRecord, output: EngineCoreOutput, update: GenerationUpdate) -> None:
        """Record an output, which may hold tokens and the finish.

        A request with `max_new_tokens` 0 has no tokens: its finish marks the end of prefill.
        """
        if record.request.probe:
            return
        if update.finish is not None:
            record.matched, record.failure = update.finish.matched, update.finish.failure
        now, num_tokens = time.monotonic(), len(update.token_ids)
        if record.seen_s is None:
            if num_tokens == 0 and (update.finish is None or update.finish.type == "abort"):
                return
            self._prompt_done(record, output, now)
        elif num_tokens:
            self._metrics.next_tokens((now - record.seen_s) / num_tokens, num_tokens)
        if num_tokens:
            self._metrics.generated(num_tokens)
            record.seen_s = now
            record.completion_tokens += num_tokens
        if any(listener.keeps_output for listener in self.listeners):
            record.output_ids += update.token_ids
            record.texts.append(update.text)

    def _prompt_done(self, record: RequestRecord, output: EngineCoreOutput, now: float) -> None:
        record.seen_s = now
        record.ttft_s = now - record.arrived_s
        record.cached_tokens = output.cached_tokens
        self._metrics.first_token(record.ttft_s, ttft_parts(record.ttft_s, record.intake_s, record.timing))
        self._metrics.prompt_done(output.prompt_tokens, output.cached_tokens)

    def ended(self, record: RequestRecord, outcome: str) -> None:
        """Record the end of a sequence; the last call for it. `outcome` is its finish reason."""
        if record.request.probe:
            return
        record.outcome = outcome
        record.e2e_s = time.monotonic() - record.arrived_s
        self._metrics.ended(record)
        for listener in self.listeners:
            listener.ended(record)
