"""The files of the dashboard page (`page/`) and of the API's pages at `/docs` (`docs_page/`), with their headers. Pure.

Server and router serve these files, each with its own HTTP library. The files contain no data of the deployment, so
that they need no key. The pages prompt for the key that the endpoints behind them need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

DASHBOARD_PATH = "/dashboard"
PAGE_FOLDER = "/page/"
PAGE_FILES = PAGE_FOLDER + "{name}"
DOCS_PATH = "/docs"
DOCS_FILES = DOCS_PATH + "/{name}"
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
DOCS_POLICY = POLICY | {"img-src": "data:"}
"""That of the API's pages, whose icon is part of the page."""


class PageFile(NamedTuple):
    """One file: its bytes, its tag (the value of `ETag` without quotes), and the headers of its response."""

    data: bytes
    tag: str
    headers: dict[str, str]


def read_page_files() -> dict[str, PageFile]:
    """Read the files of the dashboard page, by name."""
    return _read("page", POLICY)


def read_docs_files() -> dict[str, PageFile]:
    """Read the files of the API's pages, by name."""
    return _read("docs_page", DOCS_POLICY)


def page_headers(policy: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of each file of a page, beside its type and tag."""
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Cache-Control": "no-cache",
    }


def is_page_path(path: str) -> bool:
    """Whether a path is that of a page or of one of its files, which need no key."""
    return path in (DASHBOARD_PATH, DOCS_PATH) or path.startswith((PAGE_FOLDER, DOCS_PATH + "/"))


def _read(folder: str, policy: Mapping[str, str]) -> dict[str, PageFile]:
    files, common = {}, page_headers(policy)
    for entry in (resources.files("pdserve.http") / folder).iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            data = entry.read_bytes()
            tag = hashlib.sha256(data).hexdigest()[:32]
            own = {"ETag": f'"{tag}"', "Content-Type": f"{TYPES[suffix]}; charset=utf-8"}
            files[entry.name] = PageFile(data, tag, common | own)
    return files
