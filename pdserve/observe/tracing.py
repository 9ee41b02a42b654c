"""Traces through OpenTelemetry: spans of calls and sequences, and the headers that join servers into one trace.

Used by servers and the router with `--enable-trace`. OpenTelemetry is not imported otherwise.

    client ─ traceparent ─> router            router.request
                              ├─ traceparent ─> prefill   prefill.request
                              │                             intake, bootstrap, queue, compute (a span a chunk), transfer
                              └─ traceparent ─> decode    decode.request
                                                            intake, bootstrap, transfer, generate

The API process makes the stages from a request's timing at its end, so the scheduler loop has no cost. Stages follow
each other from the arrival on: they are as exact as the parts of TTFT (`record.ttft_parts`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.observe.metrics import RequestRecord
from pdserve.observe.speculation import request_fields

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

NANOS = 1_000_000_000
STAGES = {
    "unified": {"queue": "queue", "prefill": "compute"},
    "prefill": {"bootstrap": "bootstrap", "queue": "queue", "prefill": "compute", "transfer": "transfer"},
    "decode": {"bootstrap": "bootstrap"},
}
"""By engine type: the parts of TTFT that are stages of this server, and the names of their spans.

Decode does not queue or compute the prompt, so its whole wait for prefill is one stage, `transfer`."""


class CallSpan:
    """The span of one call. Spans with its `traceparent` become its children, also in other processes."""

    def __init__(self, span: Span, traceparent: str | None, tracestate: str | None) -> None:
        self._span = span
        self.traceparent = traceparent
        self.tracestate = tracestate

    @property
    def headers(self) -> dict[str, str]:
        """Trace headers for calls within this span."""
        found = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in found.items() if value}

    @property
    def recorded(self) -> bool:
        """False when this trace is not sampled."""
        return self._span.is_recording()

    def note(self, **attributes: str | int | float | bool) -> None:
        """Set attributes of the span; a double underscore in a name becomes a dot."""
        self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})

    def answered(self, status: int) -> None:
        """Record the HTTP status; 500 and above mark the span as failed."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)


class Tracing:
    """Makes and exports the spans of one process. A `RequestListener` in servers.

    `kind` is router, unified, prefill or decode: the prefix of its span names.
    """

    keeps_output = False

    def __init__(self, kind: str, model: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": f"pdserve-{kind}", "gen_ai.system": "pdserve"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("pdserve")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = kind
        self._model = model

    @contextlib.contextmanager
    def call(self, path: str, headers: Mapping[str, str]) -> Iterator[CallSpan]:
        """Open the span of an incoming call for the block; a child of the span in `headers`, if there is one."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({name.lower(): value for name, value in headers.items()})
        with self._span(f"{self._kind}.request", parent, SpanKind.SERVER) as call:
            call.note(http__route=path)
            if self._model:
                call.note(gen_ai__request__model=self._model)
            yield call

    @contextlib.contextmanager
    def outgoing(self, name: str, within: CallSpan) -> Iterator[CallSpan]:
        """Open the span of a call to another server, `name`, for the block; a child of `within`."""
        from opentelemetry.trace import SpanKind

        with self._span(f"{self._kind}.{name}", self._propagator.extract(within.headers), SpanKind.CLIENT) as call:
            yield call

    def started(self, record: RequestRecord) -> None:
        """See `RequestListener`."""

    def ended(self, record: RequestRecord) -> None:
        """See `RequestListener`. Makes the spans of the sequence's stages."""
        if record.traceparent is None:
            return
        parent = self._propagator.extract({"traceparent": record.traceparent})
        began = int(record.arrived_at * NANOS)
        for name, start_s, end_s in self._stages(record):
            self._stage(name, parent, began + int(start_s * NANOS), began + int(end_s * NANOS), record)

    def close(self) -> None:
        """Export the remaining spans, for at most 2 s."""
        self._provider.force_flush(2000)
        self._provider.shutdown()

    def _stages(self, record: RequestRecord) -> Iterator[tuple[str, float, float]]:
        """Yield name, begin and end of each stage, in seconds after the arrival."""
        at = record.intake_s
        yield "intake", 0.0, at
        if record.ttft_s is None:
            if record.e2e_s > at:
                yield "failed", at, record.e2e_s
            return
        names, parts = STAGES[self._kind], record.parts
        for part in ("bootstrap", "queue", "prefill", "transfer"):
            if part in names:
                yield names[part], at, at + parts[part]
                at += parts[part]
        if self._kind == "decode":
            waited_s = parts["queue"] + parts["prefill"] + parts["transfer"]
            yield "transfer", at, at + waited_s
        if self._kind != "prefill":
            yield "generate", record.ttft_s, max(record.ttft_s, record.e2e_s)

    def _stage(self, name: str, parent: Context, start: int, end: int, record: RequestRecord) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        span = self._tracer.start_span(f"{self._kind}.{name}", parent, start_time=start)
        span.set_attributes(_attributes(name, record))
        if name == "failed" or (name == "generate" and record.failure is not None):
            span.set_status(StatusCode.ERROR, None if record.failure is None else record.failure.message)
        if name == "compute":
            self._chunks(set_span_in_context(span), start, end, record)
        span.end(end)

    def _chunks(self, parent: Context, start: int, end: int, record: RequestRecord) -> None:
        """Make a span for each chunk of the prompt."""
        timing = record.timing
        began, first = start, record.cached_tokens
        for ended_s, tokens in () if timing is None or timing.chunks is None else timing.chunks:
            until = min(end, start + int(ended_s * NANOS))
            span = self._tracer.start_span(f"{self._kind}.chunk", parent, start_time=began)
            span.set_attributes({"pdserve.tokens": max(0, tokens - first), "pdserve.tokens_computed": tokens})
            span.end(until)
            began, first = until, tokens

    @contextlib.contextmanager
    def _span(self, name: str, parent: Context, kind: object) -> Iterator[CallSpan]:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        assert isinstance(kind, SpanKind)
        span = self._tracer.start_span(name, parent, kind=kind)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, parent))
        try:
            yield CallSpan(span, carrier.get("traceparent"), carrier.get("tracestate"))
        except BaseException as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end(time.time_ns())


def _attributes(stage: str, record: RequestRecord) -> dict[str, str | int | float]:
    """Return the attributes of a stage, with OpenTelemetry's names for generative AI where they exist."""
    timing = record.timing
    found: dict[str, str | int | float | None] = {"gen_ai.request.id": record.name}
    match stage:
        case "intake":
            found |= {
                "gen_ai.request.max_tokens": record.request.sampling.max_new_tokens,
                "gen_ai.request.temperature": record.request.sampling.temperature,
                "pdserve.room": None if record.room is None else str(record.room),
                "pdserve.request_id": record.request_id,
            }
        case "compute":
            found |= {"gen_ai.usage.input_tokens": record.prompt_tokens, "pdserve.cached_tokens": record.cached_tokens}
        case "transfer" if timing is not None:
            found |= {
                "pdserve.kv_bytes": timing.kv_bytes,
                "pdserve.kv_pages": timing.kv_pages,
                "pdserve.kv_write_s": timing.kv_transfer_s,
            }
        case "generate" | "failed":
            found |= {
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "pdserve.spec_accept_length": request_fields(record.speculation).get("spec_accept_length"),
                "gen_ai.latency.time_to_first_token": record.ttft_s,
                "gen_ai.latency.e2e": record.e2e_s,
                "gen_ai.response.finish_reasons": record.outcome,
                "error.type": None if record.failure is None else record.failure.code,
            }
    return {name: value for name, value in found.items() if value is not None}


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are posted to. `endpoint` is a URL, or HOST:PORT of a collector's OTLP/HTTP port."""
    if not endpoint.startswith(("http://", "https://")):
        endpoint = f"http://{endpoint}"
    path = endpoint.split("://", 1)[1].partition("/")[2]
    return endpoint if path else f"{endpoint.rstrip('/')}/v1/traces"


def open_tracing(kind: str, model: str, endpoint: str) -> Tracing:
    """Make a `Tracing` that posts to `endpoint` over OTLP/HTTP.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"traces need OpenTelemetry: pip install 'pdserve[otel]' ({error})", field="enable_trace"
        ) from error
    return Tracing(kind, model, OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=5))
