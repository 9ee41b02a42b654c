"""The API's pages at `/docs`: the files in `docs_page/`, which show `/openapi.json` without other origins. Pure.

Server and router serve these files, each with its own HTTP library. The files contain no data of the deployment, so
that they need no key. The page asks for the key that `/openapi.json` may need.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

DOCS_PATH = "/docs"
DOCS_FILES = "/docs/{name}"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "data:",
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


class DocsFile(NamedTuple):
    """One file: its bytes, and the headers of its response."""

    data: bytes
    headers: dict[str, str]


def read_docs_files() -> dict[str, DocsFile]:
    """Read the files, by name."""
    folder = resources.files("pdserve.http") / "docs_page"
    files = {}
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            headers = HEADERS | {"Content-Type": f"{TYPES[suffix]}; charset=utf-8"}
            files[entry.name] = DocsFile(entry.read_bytes(), headers)
    return files


def is_docs_path(path: str) -> bool:
    """Whether a path is that of the page or of one of its files, which need no key."""
    return path == DOCS_PATH or path.startswith(DOCS_PATH + "/")
