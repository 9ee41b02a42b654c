"""A tiny OTLP/HTTP collector on loopback: keeps the spans that are posted to it."""

from __future__ import annotations

import dataclasses
import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclasses.dataclass(frozen=True)
class Seen:
    """One span. Times in nanoseconds."""

    name: str
    service: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]


class Collector:
    """Serves on a free port until it is closed."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        self._came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.take(data)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """For `--otlp-traces-endpoint`."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def take(self, data: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        with self._came:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                for scope in resource.scope_spans:
                    self._spans += [_seen(span, service) for span in scope.spans]
            self._came.notify_all()

    def spans(self) -> list[Seen]:
        with self._came:
            return list(self._spans)

    def wait(self, enough: Callable[[list[Seen]], bool], deadline_s: float = 30.0) -> list[Seen]:
        """Until the spans so far are enough."""
        with self._came:
            assert self._came.wait_for(lambda: enough(self._spans), deadline_s), [span.name for span in self._spans]
            return list(self._spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _seen(span: Any, service: str) -> Seen:
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return Seen(
        name=span.name,
        service=service,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=values,
    )


def assert_one_connected_trace(spans: list[Seen], trace: str, root: str) -> None:
    """All spans are of one trace, and each one's parent is another of them, or `root`, the client's."""
    assert {span.trace for span in spans} == {trace}
    known = {span.span for span in spans} | {root}
    assert [span.name for span in spans if span.parent not in known] == []
    by_id = {span.span: span for span in spans}
    for span in spans:
        above = by_id.get(span.parent)
        assert span.end >= span.start, span
        assert above is None or span.start >= above.start - 1_000_000, (span, above)
