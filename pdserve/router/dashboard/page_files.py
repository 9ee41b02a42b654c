"""The dashboard page at `/`: serves the files in `page/`, read once at start-up, with security headers.

The files contain no data of the deployment, so they need no key. The page prompts for the key that `/observe` and chat
need. Created by `app`.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from aiohttp import web

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


class PageFiles:
    """The handlers; one per app."""

    def __init__(self) -> None:
        folder = resources.files("pdserve.router.dashboard") / "page"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if _suffix(entry.name) in TYPES}
        self._tags = {name: hashlib.sha256(data).hexdigest()[:32] for name, data in self._files.items()}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of `/` and of the page's files."""
        return [web.get("/", self.index), web.get("/page/{name}", self.file)]

    async def index(self, request: web.Request) -> web.Response:
        """Return the dashboard page."""
        return self._answer(request, INDEX)

    async def file(self, request: web.Request) -> web.Response:
        """Return a file of the dashboard page; 404 for any other name."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        """Return the file, or 304 if the browser has the current version."""
        tag = self._tags[name]
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=HEADERS | {"ETag": f'"{tag}"'})
        headers = HEADERS | {"ETag": f'"{tag}"', "Content-Type": f"{TYPES[_suffix(name)]}; charset=utf-8"}
        return web.Response(body=self._files[name], headers=headers)


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
