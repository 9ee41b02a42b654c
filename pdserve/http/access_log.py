"""The access log of servers and router (`--access-log`): one line for each HTTP request, at its end.

    ... INFO router[4711] pdserve.access: [req-7f...] 127.0.0.1 POST /v1/chat/completions 200 812.3 ms

Requests of load balancers, routers and Prometheus that succeed are logged at level debug only, since they come every
few seconds. The client is an address; a key is never logged.
"""

from __future__ import annotations

import logging

from pdserve.base.log import about, escaped

log = logging.getLogger("pdserve.access")

POLLED_PATHS = frozenset(
    {
        *("/health", "/health_generate", "/health_pair", "/ready", "/readiness", "/liveness"),
        *("/metrics", "/engine_metrics", "/get_load", "/v1/loads", "/control_challenge", "/observe"),
    }
)
"""Paths that programs poll."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before the answer began."""


def log_access(
    *, client: str, method: str, path: str, status: int, seconds: float, request_id: str, complete: bool = True
) -> None:
    """Log one request. `seconds`: until the last byte was sent. `complete` False: the answer was cut off."""
    level = logging.DEBUG if path in POLLED_PATHS and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round(1000 * seconds, 1),
        "complete": complete,
    }
    text = f"{escaped(client)} {escaped(method)} {escaped(path)} {status} {1000 * seconds:.1f} ms"
    log.log(level, "%s%s", text, "" if complete else ", cut off", extra=about(request_id, fields=fields))
