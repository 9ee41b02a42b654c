"""`GET /openapi.json`: all routes of the router; forwarded paths are taken from a worker's document.

The router requests the document of a usable worker, because request bodies depend on the worker's version. Without such
a document, forwarded paths are listed without their bodies. Created by `app`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from pdserve.base.log_ring import PATH as LOGS_PATH
from pdserve.http.access import CLOSE_SESSION_PATH, OPEN_SESSION_PATH
from pdserve.http.errors import ErrorAnswer
from pdserve.http.openapi import json_content, openapi_document, openapi_operation
from pdserve.http.page_files import DOCS_FILES, DOCS_PATH, INDEX, read_docs_files
from pdserve.http.response_store import ITEMS_PATH, RESPONSE_PATH
from pdserve.http.session_store import CloseSessionBody, OpenSessionBody
from pdserve.observe.history import PATH as HISTORY_PATH
from pdserve.router.http import json_response
from pdserve.router.proxy.migration import PATH as MIGRATE_PATH
from pdserve.router.proxy.migration import MoveBody
from pdserve.router.proxy.replication import PATH as REPLICATE_PATH
from pdserve.router.proxy.replication import CopyPrefixBody
from pdserve.router.workers.api import AddBody, ChangeBody
from pdserve.router.workers.fanout import WorkerFanout
from pdserve.router.workers.role_switch import PATH as ROLE_SWITCH_PATH
from pdserve.router.workers.role_switch import SwitchBody

PATH = "/openapi.json"
REF = "#/components/schemas/router.{name}"
BODIES: Mapping[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/workers"): AddBody,
    ("PUT", "/workers/{name}"): ChangeBody,
    ("POST", ROLE_SWITCH_PATH): SwitchBody,
    ("POST", MIGRATE_PATH): MoveBody,
    ("POST", REPLICATE_PATH): CopyPrefixBody,
    ("POST", OPEN_SESSION_PATH): OpenSessionBody,
    ("POST", CLOSE_SESSION_PATH): CloseSessionBody,
}
QUERIES = {
    ("DELETE", "/workers/{name}"): ("force",),
    ("POST", "/add_worker"): ("url", "worker_type", "bootstrap_port", "api_key"),
    ("POST", "/remove_worker"): ("url",),
    ("GET", HISTORY_PATH): ("seconds", "since", "worker"),
    ("GET", LOGS_PATH): ("lines",),
    ("GET", RESPONSE_PATH): ("stream", "starting_after"),
    ("GET", ITEMS_PATH): ("order", "limit", "after"),
}
GOOD = {
    ("POST", "/workers"): "202",
    ("PUT", "/workers/{name}"): "202",
    ("DELETE", "/workers/{name}"): "202",
    ("POST", "/add_worker"): "202",
    ("POST", "/remove_worker"): "202",
}
ERRORS = {
    "400": "a field is missing, of the wrong type, out of range, or not supported; `param` names it",
    "401": "missing or invalid API key",
    "403": "admin request of a web page of another origin",
    "404": "the worker, file or model does not exist",
    "409": "the worker exists in another role, or its role is being changed",
    "413": "the body is too large",
}
ERRORS_OF_WORKERS = {
    "429": "the client has reached its limit of concurrent requests; `Retry-After`: seconds to wait",
    "502": "a worker's answer broke off, and the request could not be retried",
    "503": "no worker is available, or all are full; `Retry-After`: seconds to wait",
    "504": "no answer before the router's deadline",
}


class OpenApi:
    """The handler. `forwarded`: paths that workers answer; `routes`: returns all routes, called for each request."""

    def __init__(
        self,
        fanout: WorkerFanout,
        forwarded: Iterable[str],
        routes: Callable[[], list[web.RouteDef]],
        *,
        with_keys: bool,
    ) -> None:
        self._fanout = fanout
        self._forwarded = frozenset(map(_plain, forwarded))
        self._routes = routes
        self._with_keys = with_keys
        self._files = read_docs_files()

    def page_routes(self) -> list[web.RouteDef]:
        """Return the routes of the pages that show the document."""
        return [web.get(DOCS_PATH, self.page), web.get(DOCS_FILES, self.page_file)]

    async def page(self, request: web.Request) -> web.Response:
        """Return the page that shows the OpenAPI document."""
        file = self._files[INDEX]
        return web.Response(body=file.data, headers=file.headers)

    async def page_file(self, request: web.Request) -> web.Response:
        """Return a file of the page that shows the OpenAPI document; 404 for any other name."""
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        return web.Response(body=file.data, headers=file.headers)

    async def get(self, request: web.Request) -> web.Response:
        """Return the OpenAPI document."""
        theirs = await self._fanout.document(request)
        return json_response(describe(self._routes(), self._forwarded, theirs, with_keys=self._with_keys))


def describe(
    routes: Iterable[web.RouteDef], forwarded: frozenset[str], theirs: Mapping[str, Any], *, with_keys: bool
) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document, paths in the order of `routes`. `theirs`: a worker's document, or `{}`."""
    _, own = msgspec.json.schema_components([*BODIES.values(), ErrorAnswer], ref_template=REF)
    schemas = _object(_object(theirs, "components"), "schemas") | {f"router.{name}": one for name, one in own.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _plain(route.path)
        operation = _operation(route, path, to_workers=path in forwarded)
        if path in forwarded:
            said = _object(_object(_object(theirs, "paths"), path), route.method.lower())
            responses = operation["responses"] | _object(said, "responses")
            operation |= said | {"responses": responses}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return openapi_document("pdserve router", paths, schemas, with_keys=with_keys)


def _operation(route: web.RouteDef, path: str, *, to_workers: bool) -> dict[str, Any]:
    """Build the operation of a route without a worker's document."""
    key = (route.method, path)
    errors = ERRORS | ERRORS_OF_WORKERS if to_workers or key not in GOOD else ERRORS
    queries = {name: {"type": "string"} for name in QUERIES.get(key, ())}
    operation = openapi_operation(path, _summary(route), {GOOD.get(key, "200"): "the answer"}, errors, queries, REF)
    if key in BODIES:
        content = json_content({"$ref": REF.format(name=BODIES[key].__name__)})
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _summary(route: web.RouteDef) -> str:
    """Return the first sentence of the handler's docstring."""
    text = " ".join((route.handler.__doc__ or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _plain(path: str) -> str:
    """Return `path` without the patterns of its parameters: `/workers/{name:.+}` as `/workers/{name}`."""
    return re.sub(r"{(\w+):[^}]*}", r"{\1}", path)


def _object(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object at `name`; empty if a worker's document has none."""
    found = of.get(name)
    return dict(found) if isinstance(found, dict) else {}
