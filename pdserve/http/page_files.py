"""The dashboard page: the files in `page/`, with security headers. Pure.

Server and router serve these files, each with its own HTTP library. The files contain no data of the deployment, so
that they need no key. The page prompts for the key that `/observe` and chat need.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

DASHBOARD_PATH = "/dashboard"
PAGE_FOLDER = "/page/"
PAGE_FILES = PAGE_FOLDER + "{name}"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
"""No content of other origins, no inline scripts, and no strings as HTML: the page inserts data as text only."""
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """One file: its bytes, its tag (the value of `ETag` without quotes), and the headers of its response."""

    data: bytes
    tag: str
    headers: dict[str, str]


def read_page_files() -> dict[str, PageFile]:
    """Read the files, by name."""
    files = {}
    for entry in (resources.files("pdserve.http") / "page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            data = entry.read_bytes()
            tag = hashlib.sha256(data).hexdigest()[:32]
            headers = HEADERS | {"ETag": f'"{tag}"', "Content-Type": f"{TYPES[suffix]}; charset=utf-8"}
            files[entry.name] = PageFile(data, tag, headers)
    return files


def is_page_path(path: str) -> bool:
    """Whether a path is that of the page or of one of its files, which need no key."""
    return path == DASHBOARD_PATH or path.startswith(PAGE_FOLDER)
