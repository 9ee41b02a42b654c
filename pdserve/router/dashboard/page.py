"""The dashboard page at `/` and `/dashboard`: serves the files of `http/page`, read once at start-up. Made by `app`."""

from __future__ import annotations

from aiohttp import web

from pdserve.http.page_files import DASHBOARD_PATH, INDEX, PAGE_FILES, read_page_files


class DashboardPage:
    """The handlers; one per app."""

    def __init__(self) -> None:
        self._files = read_page_files()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the page and of its files."""
        return [web.get("/", self.index), web.get(DASHBOARD_PATH, self.index), web.get(PAGE_FILES, self.file)]

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
        data, tag, headers = self._files[name]
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={key: headers[key] for key in headers if key != "Content-Type"})
        return web.Response(body=data, headers=headers)
