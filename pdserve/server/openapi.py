"""The OpenAPI document of a server, `/openapi.json`, and its pages at `/docs`.

The document has all routes, and bodies as the structs that validate them.

`app` installs it. msgspec parses bodies and the endpoints parse queries, so FastAPI does not know either schema;
`app.INPUTS` lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from pdserve.http.docs_files import DOCS_FILES, DOCS_PATH, INDEX, DocsFile, read_docs_files
from pdserve.http.errors import ErrorAnswer
from pdserve.http.openapi import json_content, openapi_document, openapi_operation
from pdserve.server.request.schemas import NativeSampling

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "a field is missing, of the wrong type, out of range, or not supported; `param` names it",
    "401": "the API key is missing or wrong; the control token proof is invalid, or missing where it is required",
    "403": "a web page of another origin sent a command",
    "404": "no such model",
    "409": "the bootstrap room is in use by a running request, or a role switch is in progress",
    "413": "the body is too large",
    "429": "the client has reached its limit of concurrent requests; `Retry-After` gives the seconds to wait",
    "499": "aborted",
    "500": "an internal error, or a failed KV transfer",
    "503": "not ready, or overloaded; `Retry-After` gives the seconds to wait",
    "504": "the peer server or the KV cache did not arrive in time",
}


LATER = frozenset({"/pd_role_switch"})
"""Routes that may answer 202 before the operation is complete."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the routes, by path: body structs of POST and PUT, routes with an optional body, and query schemas."""

    bodies: Mapping[str, type[msgspec.Struct]]
    optional: Collection[str]
    queries: Mapping[str, Mapping[str, Mapping[str, Any]]]
    binary: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Content types of the routes whose body is no JSON."""


def install(app: FastAPI, inputs: Inputs, *, with_keys: bool) -> None:
    """Make `app` serve this document. `with_keys`: the server has API keys, so the document declares bearer
    authentication.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, inputs, with_keys=with_keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def install_docs(app: FastAPI) -> None:
    """Add the pages that show the document. They are no part of it."""
    files = read_docs_files()

    async def page(_: Request) -> Response:
        return _file(files[INDEX])

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _file(found)

    app.add_route(DOCS_PATH, page, methods=["GET"])
    app.add_route(DOCS_FILES, file, methods=["GET"])


def _file(file: DocsFile) -> Response:
    return Response(file.data, headers=file.headers)


def describe(app: FastAPI, inputs: Inputs, *, with_keys: bool) -> dict[str, Any]:
    """Build the document: OpenAPI 3.1, paths in the order of the application's routes."""
    bodies = inputs.bodies
    types = [*dict.fromkeys([*bodies.values(), NativeSampling, ErrorAnswer])]
    _, components = msgspec.json.schema_components(types, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods or ()):
                operation = _operation(route, inputs.queries.get(route.path, {}))
                body = bodies.get(route.path) if method in ("POST", "PUT") else None
                if body is not None:
                    content: dict[str, Any] = json_content({"$ref": REF.format(name=body.__name__)})
                    operation["requestBody"] = {"required": route.path not in inputs.optional, "content": content}
                elif route.path in inputs.binary:
                    content = {inputs.binary[route.path]: {"schema": {"type": "string", "format": "binary"}}}
                    operation["requestBody"] = {"required": True, "content": content}
                paths.setdefault(_plain(route.path), {})[method.lower()] = operation
    return openapi_document(app.title, paths, components, with_keys=with_keys)


def _plain(path: str) -> str:
    """Return `path` without parameter converters: `/v1/models/{name:path}` becomes `/v1/models/{name}`."""
    return path.replace(":path}", "}")


def _operation(route: APIRoute, query: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    good = {"200": "the response; with `stream`, server-sent events"}
    if route.path in LATER:
        good["202"] = "the operation has started"
    summary = route.summary or route.name.replace("_", " ")
    return openapi_operation(_plain(route.path), summary, good, ERRORS, query, REF)
