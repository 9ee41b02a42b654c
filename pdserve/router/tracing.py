"""A call through the router as spans: its own, and one for each half of each try. Used by `app` and `dispatch`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from pdserve.observe.tracing import CallSpan, Tracing

NO_HEADERS: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """What a traced call takes along through the dispatcher."""

    tracing: Tracing
    span: CallSpan

    @contextlib.contextmanager
    def half(self, role: str, url: str) -> Iterator[Mapping[str, str]]:
        """A call to a worker; the headers that make the worker's spans its children. Ends with decode's first bytes."""
        with self.tracing.outgoing(role, self.span) as span:
            span.note(server__address=url)
            yield span.headers


@contextlib.contextmanager
def half_of(trace: CallTrace | None, role: str, url: str) -> Iterator[Mapping[str, str]]:
    """See `CallTrace.half`; nothing where nobody traces, and then the client's own headers go on as they came."""
    if trace is None:
        yield NO_HEADERS
    else:
        with trace.half(role, url) as headers:
            yield headers
