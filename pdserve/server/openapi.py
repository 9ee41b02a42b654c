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

from pdserve.http.errors import ErrorAnswer
from pdserve.http.openapi import json_content, openapi_document, openapi_operation
from pdserve.http.page_files import DOCS_FILES, DOCS_PATH, INDEX, PageFile, read_docs_files
from pdserve.server.request.schemas import NativeSampling

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "a field is missing, of the wrong type, out of range, or not supported; `param` names it",
    "401": "the API key is missing or wrong; the control token proof is invalid, or missing where it is required",
    "403": "a web page of another origin sent a command",
    "404": "no such model, or stored response",
    "409": "the bootstrap room is in use by a running request, or a role switch is in progress",
    "413": "the body is too large",
    "429": "the client has reached its limit of concurrent requests; `Retry-After` gives the seconds to wait",
    "499": "aborted",
    "500": "an internal error, or a failed KV transfer",
    "503": "not ready, or overloaded; `Retry-After` gives the seconds to wait",
    "504": "the peer server or the KV cache did not arrive in time",
}


SUMMARIES = {
    "/v1/chat/completions": "Chat completion (OpenAI)",
    "/v1/completions": "Text completion (OpenAI)",
    "/v1/responses": "Response (OpenAI)",
    "/v1/responses/{response_id}": "A stored response (OpenAI)",
    "/v1/responses/{response_id}/cancel": "Cancel a response (OpenAI); stored ones have ended",
    "/v1/responses/{response_id}/input_items": "Items of a stored response's conversation (OpenAI)",
    "/v1/messages": "Message (Anthropic)",
    "/v1/messages/count_tokens": "Number of prompt tokens of a message (Anthropic)",
    "/v1/embeddings": "Embeddings of texts (OpenAI)",
    "/v1/score": "Probabilities of labels (SGLang), or scores of pairs of texts (vLLM)",
    "/v1/rerank": "Documents in the order of their relevance (Jina, Cohere)",
    "/generate": "Generate from text or token ids (SGLang)",
    "/api/chat": "Chat (Ollama)",
    "/api/generate": "Generate from a prompt (Ollama)",
    "/api/show": "Facts about the model (Ollama)",
    "/api/tags": "Served models (Ollama)",
    "/api/version": "Version (Ollama)",
    "/tokenize": "Text or messages to token ids",
    "/detokenize": "Token ids to text",
    "/parse_function_call": "Tool calls in a text",
    "/separate_reasoning": "Reasoning in a text",
    "/v1/models": "Served models",
    "/v1/models/{name}": "One served model",
    "/model_info": "Facts about the model",
    "/server_info": "Flags, limits and state of the server",
    "/weight_version": "Version of the weights",
    "/version": "Version of pdserve",
    "/get_load": "Requests and tokens of each replica",
    "/v1/loads": "Requests and tokens of each replica",
    "/metrics": "Metrics in Prometheus's format",
    "/observe": "Live view of requests, queues and memory",
    "/logs": "Last log lines of all processes",
    "/health": "Whether the server lives",
    "/ready": "Whether the server takes requests",
    "/ping": "Whether the HTTP server answers",
    "/health_generate": "Compute one token",
    "/health_pair": "Probe a pair of servers with one token",
    "/flush_cache": "Drop the cached prefixes",
    "/hicache/storage-backend/clear": "Remove all objects of the KV store",
    "/abort_request": "Abort requests",
    "/open_session": "Open a session of /generate (SGLang)",
    "/close_session": "Close a session (SGLang)",
    "/pause_generation": "Stop computing",
    "/continue_generation": "Compute again",
    "/load_lora_adapter": "Load a LoRA adapter",
    "/unload_lora_adapter": "Unload a LoRA adapter",
    "/release_memory_occupation": "Give memory back to the system",
    "/resume_memory_occupation": "Take released memory again",
    "/get_weights_by_name": "Read a tensor by its name",
    "/update_weights_from_disk": "Change to other weights",
    "/update_weights_from_tensor": "Replace tensors of the weights",
    "/update_weights_from_distributed": "Replace tensors that a trainer sends",
    "/init_weights_update_group": "Join a trainer's process group",
    "/destroy_weights_update_group": "Leave a trainer's process group",
    "/update_weight_version": "Name the weights anew",
    "/start_profile": "Start torch's profiler",
    "/stop_profile": "Stop torch's profiler",
    "/pd_role_switch": "Change the role of the server",
    "/migrate": "Move a running request to another server",
    "/replicate": "Send a cached prefix to another server",
    "/migrate_in": "Take a running request over (for servers)",
    "/migrate_stream": "The rest of a moved stream (for servers)",
    "/extract": "A running request as a snapshot",
    "/restore": "Continue the request of a snapshot",
    "/suspend": "Stop a running request and keep it",
    "/resume": "Continue a suspended request",
    "/declare_peer_dead": "Free the pages that a dead peer could write to",
    "/control_challenge": "Prove the control token (for servers)",
}
"""Summaries of operations by path; other paths, and aliases of these, have the names of their routes."""


LATER = frozenset({"/pd_role_switch"})
"""Routes that may answer 202 before the operation is complete."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the routes, by path: body structs of POST and PUT, routes with an optional body, and query schemas.

    DELETE routes have no query.
    """

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


def _file(file: PageFile) -> Response:
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
                queries = inputs.queries.get(route.path, {}) if method != "DELETE" else {}
                operation = _operation(route, queries)
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


def _unaliased(path: str) -> str:
    """Return the path that `path` is another name of, as `/get_X` of `/X`."""
    return path.replace("/get_", "/", 1).replace("/v1/tok", "/tok").replace("/v1/detok", "/detok").replace("iness", "y")


def _operation(route: APIRoute, query: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    good = {"200": "the response; with `stream`, server-sent events"}
    if route.path in LATER:
        good["202"] = "the operation has started"
    path = _plain(route.path)
    summary = SUMMARIES.get(path) or SUMMARIES.get(_unaliased(path)) or route.name.replace("_", " ")
    return openapi_operation(path, summary, good, ERRORS, query, REF)
