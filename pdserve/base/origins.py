"""Whether a web page of another origin makes a browser ask. Used by the HTTP sides of servers and router.

CORS keeps such a page from reading answers, and from asking with a key or with JSON that says that it is JSON. It does
not keep it from asking: a form or an image is enough for a command to a server on loopback that wants no key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

OWN_SITE = ("same-origin", "none")
"""`Sec-Fetch-Site` of our own pages, and of what a person has typed in."""


def from_elsewhere(headers: Mapping[str, str], allowed: Collection[str]) -> bool:
    """True for requests of pages whose origin is neither ours nor allowed; programs send none of these headers."""
    origin = headers.get("Origin")
    if "*" in allowed or origin in allowed:
        return False
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in OWN_SITE
    return origin is not None and urlsplit(origin).netloc != headers.get("Host")
