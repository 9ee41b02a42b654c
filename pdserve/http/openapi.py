"""Parts of OpenAPI 3.1 documents that server and router share. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pdserve
from pdserve.http.errors import ErrorAnswer

Schema = Mapping[str, Any]


def openapi_document(
    title: str, paths: Mapping[str, Any], schemas: Mapping[str, Schema], *, with_keys: bool
) -> dict[str, Any]:
    """Return a document. `with_keys`: keys are set, so that the document declares bearer authentication."""
    info = {"title": title, "version": pdserve.__version__, "description": (pdserve.__doc__ or "").strip()}
    document: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def openapi_operation(
    path: str,
    summary: str,
    good: Mapping[str, str],
    errors: Mapping[str, str],
    queries: Mapping[str, Schema],
    ref: str,
) -> dict[str, Any]:
    """Return the operation of a route without its body.

    `good` and `errors` map statuses to descriptions, `queries` maps names to schemas. `ref` is the template of
    references to schemas.
    """
    error = json_content({"$ref": ref.format(name=ErrorAnswer.__name__)})
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            **{status: {"description": text} for status, text in good.items()},
            **{status: {"description": text, "content": error} for status, text in errors.items()},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    parameters = [_parameter(name, "path", {"type": "string"}) for name in names]
    parameters += [_parameter(name, "query", schema) for name, schema in queries.items()]
    if parameters:
        operation["parameters"] = parameters
    return operation


def json_content(schema: Schema) -> dict[str, Any]:
    """Return the content of a request or response with a JSON body."""
    return {"application/json": {"schema": schema}}


def _parameter(name: str, where: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}
