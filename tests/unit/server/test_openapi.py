"""The OpenAPI document lists what there is: every body that is read, and what every field of it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

import pdserve.server
from pdserve.config.access_group import AccessConfig
from pdserve.http.access import RESTORE_PATH
from pdserve.http.response_store import CANCEL_PATH, ITEMS_PATH, MAX_EVENT_NUMBER, RESPONSE_PATH
from pdserve.observe.history import PATH as HISTORY_PATH
from pdserve.server.app import BODIES, OPTIONAL_BODIES
from pdserve.server.sglang_api.snapshots import KV_RULES
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"json_schema": "{}"}], "rid": ["x", None]},
        {"input_ids": [5, 6], "sampling_params": {"logit_bias": {"5": 1.5}}, "return_logprob": True},
        {
            "input_ids": [[5], [6]],
            "logprob_start_len": [-1, 0],
            "token_ids_logprob": [[5], None],
            "bootstrap_room": [1, 2],
        },
    ],
    "/v1/completions": [{"prompt": prompt, "max_tokens": 1} for prompt in ("a", ["a", "b"], [5], [[5], [6, 7]])],
    "/v1/chat/completions": [
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice}
        for choice in ("auto", {"type": "function", "function": {"name": "f"}})
    ]
    + [
        {"messages": MESSAGES, "response_format": form}
        for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}})
    ],
    "/v1/responses": [{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}],
    "/v1/messages": [
        {
            "messages": MESSAGES,
            "max_tokens": 3,
            "system": system,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        for system in ("a", [{"type": "text", "text": "a"}])
    ],
    "/v1/messages/count_tokens": [{"messages": MESSAGES}],
    "/api/chat": [
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [TOOL],
            "options": {"num_predict": 3},
            "stream": False,
        }
    ],
    "/api/generate": [{"prompt": "hi", "format": form, "think": True} for form in ("json", {"type": "object"})],
    "/api/show": [{"model": "tiny"}],
    "/tokenize": [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [5]}, {"tokens": [[5], [6, 7]]}],
    "/parse_function_call": [
        {"text": "x", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_call_parser": "hermes"}
    ],
    "/separate_reasoning": [{"text": "x", "reasoning_parser": "qwen3"}],
    "/abort_request": [{"rid": "x"}, {"abort_all": True}],
    "/pause_generation": [{"mode": "retract"}],
    "/declare_peer_dead": [{"instance": "0123abcd"}],
    "/start_profile": [{"num_steps": 1, "activities": ["CPU"]}],
}
"""Bodies that the server takes; the document must not forbid them."""


async def test_every_route_that_reads_a_body_says_what_it_is(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, enable_ollama_api=True) as b:
        routes = [route for route in b.app.routes if isinstance(route, APIRoute)]
        posts = {route.path for route in routes if {"POST", "PUT"} & (route.methods or set())}
        for path in sorted(posts):
            answer = await b.http.post(path, content=b"no JSON", headers={"Content-Type": "application/json"})
            expected = 400 if path in BODIES or path == RESTORE_PATH else 404 if path == CANCEL_PATH else 200
            assert answer.status_code == expected, path
        assert BODIES.keys() <= posts
        for path in sorted(OPTIONAL_BODIES):
            assert (await b.http.post(path)).status_code == 200
        document = (await b.http.get("/openapi.json")).json()
    for path in BODIES:
        body = document["paths"][path]["post"]["requestBody"]
        assert body["required"] == (path not in OPTIONAL_BODIES)
    assert document["paths"].keys() == {route.path.replace(":path}", "}") for route in routes}
    assert "security" not in document


async def test_every_query_says_what_it_may_be_and_nothing_else_is_read(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        paths = (await b.http.get("/openapi.json")).json()["paths"]
        found = {
            (path, method, parameter["name"]): parameter["schema"]
            for path, methods in paths.items()
            for method, operation in methods.items()
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query"
        }
        assert found.pop((RESTORE_PATH, "post", "kv")) == {"type": "string", "enum": list(KV_RULES)}
        assert (await b.http.post(f"{RESTORE_PATH}?kv=x")).json()["param"] == "kv"
        assert found.pop(("/control_challenge", "get", "nonce")) == {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        for name in ("seconds", "since"):
            assert found.pop((HISTORY_PATH, "get", name)) == {"type": "number", "minimum": 0}
            assert (await b.http.get(f"{HISTORY_PATH}?{name}=x")).json()["param"] == name
        assert all(found.pop((ITEMS_PATH, "get", name)) for name in ("order", "limit", "after"))
        for name, schema in (
            ("stream", {"type": "boolean"}),
            ("starting_after", {"type": "integer", "minimum": 0, "maximum": MAX_EVENT_NUMBER}),
        ):
            assert found.pop((RESPONSE_PATH, "get", name)) == schema
        for path, name, most in (("/logs", "lines", 5000), ("/v1/models", "limit", 1000)):
            assert found.pop((path, "get", name)) == {"type": "integer", "minimum": 1, "maximum": most}
            for text in ("x", "0", str(most + 1)):
                answer = await b.http.get(f"{path}?{name}={text}", headers={"anthropic-version": "2023-06-01"})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        for method in ("get", "post"):
            assert found.pop(("/get_weights_by_name", method, "name")) == {"type": "string"}
            size = found.pop(("/get_weights_by_name", method, "truncate_size"))
            assert size == {"type": "integer", "minimum": 1}
        for name in ("after_id", "before_id"):
            assert found.pop(("/v1/models", "get", name)) == {"type": "string"}
        assert found.keys() == {
            ("/flush_cache", "get", "timeout"), ("/flush_cache", "post", "timeout"), ("/v1/loads", "get", "dp_rank"),
        }  # fmt: skip
        for (path, method, name), schema in found.items():
            assert {"type", "minimum"} <= schema.keys()
            for text in ("x", "-1", "nan", "1e9"):
                answer = await b.http.request(method, f"{path}?{name}={text}")
                assert (answer.status_code, answer.json()["param"]) == (400, name), (path, text)
            assert (await b.http.request(method, f"{path}?{name}=0")).status_code == 200
    sources = "".join(path.read_text() for path in Path(pdserve.server.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"query_params\W+get\(\"(\w+)", sources)) == {name for _, _, name in found} | {
        "truncate_size",
        "nonce",
        "kv",
        "lines",
        "limit",
    }


async def test_every_field_says_what_it_may_be_and_bodies_that_are_taken_are_allowed(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="k"), enable_ollama_api=True) as b:
        headers = {"Authorization": "Bearer k"}
        document = (await b.http.get("/openapi.json", headers=headers)).json()
        assert document["security"] == [{"key": []}]
        for path, bodies in GOOD.items():
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            checker = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
            for body in bodies:
                checker.validate(body)
                assert (await b.http.post(path, json=body, headers=headers)).status_code == 200, (path, body)
    untyped = [where for where, schema in fields(document) if schema.keys() <= {"default", "title", "description"}]
    assert not untyped


def fields(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All properties of all schemas."""
    for name, schema in document["components"]["schemas"].items():
        for field, what in schema.get("properties", {}).items():
            yield f"{name}.{field}", what
