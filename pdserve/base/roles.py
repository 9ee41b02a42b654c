"""The header by which a router and a server agree on what the server does: its role can change while it runs.

    router ── X-PDServe-Role: decode ──> server      "this half is for a decode server": one that is none refuses it
    router <── X-PDServe-Role: prefill ── server     on /health, and on such a refusal: what it takes now

Values are those of `--disaggregation-mode`, and `none` while a server takes nothing because its role changes. Whoever
does not know the header neither sends nor reads it.
"""

from __future__ import annotations

ROLE_HEADER = "X-PDServe-Role"
NO_ROLE = "none"
