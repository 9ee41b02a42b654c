"""The router's OpenAPI document: its own routes, and what it forwards as the workers document it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pdserve.http.page_files import DOCS_POLICY, page_headers
from pdserve.router.config.config import RouterAccessConfig

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
METHODS = {"get", "post", "put", "delete"}


async def document(world: Any, url: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with world.session.get(url + "/openapi.json", headers=headers) as response:
        assert response.status == 200
        return dict(await response.json())


def references(value: Any) -> set[str]:
    """All names of schemas that anything in `value` refers to."""
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"].removeprefix("#/components/schemas/")} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(references, value.values()))


def check(of: dict[str, Any]) -> None:
    """Every operation says what it is and answers; every reference leads somewhere."""
    assert references(of) <= of["components"]["schemas"].keys()
    for path, methods in of["paths"].items():
        assert ":" not in path
        for method, operation in methods.items():
            assert method in METHODS
            assert operation["summary"], (method, path)
            assert operation["responses"].keys() & {"200", "202"}, (method, path)


def test_what_is_forwarded_is_as_a_worker_says_and_the_rest_is_the_routers(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        theirs = {"summary": "as it says", "requestBody": {"content": {"$ref": "#/components/schemas/Body"}}}
        worker.document = {
            "paths": {"/generate": {"post": theirs}, "/health": {"get": theirs}, "/secret": {"get": theirs}},
            "components": {"schemas": {"Body": {"type": "object"}}},
        }
        async with world.router([], [worker]) as url:
            told = await document(world, url)
            check(told)
            generate = told["paths"]["/generate"]["post"]
            assert generate["summary"] == theirs["summary"]
            assert generate["requestBody"] == theirs["requestBody"]
            assert {"502", "503", "504"} <= generate["responses"].keys()
            assert told["paths"]["/health"]["get"]["summary"] != theirs["summary"], "the router's own"
            assert "/secret" not in told["paths"], "not forwarded"
            add = told["components"]["schemas"]["router.AddBody"]
            assert (add["required"], add["additionalProperties"]) == (["url"], False)
            assert set(told["paths"]["/workers/{name}"]) == {"get", "put", "delete"}

    run_world(scenario)


@pytest.mark.parametrize("theirs", [None, [], {"paths": 7}, {"paths": {"/generate": {"post": 7}}, "components": []}])
def test_without_a_workers_document_the_routes_are_there(run_world: RunWorld, theirs: Any) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        worker.document = theirs
        async with world.router([], [worker], access=RouterAccessConfig(api_key="secret"), wait_key="secret") as url:
            async with world.session.get(url + "/openapi.json") as response:
                assert response.status == 401
            told = await document(world, url, "secret")
        check(told)
        assert told["security"] == [{"key": []}]
        assert {"/generate", "/workers", "/metrics", "/engine_metrics", "/"} <= told["paths"].keys()

    run_world(scenario)


def test_the_pages_that_show_the_document_need_no_key(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker], wait_key="k", access=RouterAccessConfig(api_key="k")) as url:
            for path, status in (("/docs", 200), ("/docs/docs.js", 200), ("/docs/x", 404), ("/openapi.json", 401)):
                async with world.session.get(url + path) as response:
                    assert response.status == status, path
                    if status == 200:
                        assert (
                            response.headers["Content-Security-Policy"]
                            == page_headers(DOCS_POLICY)["Content-Security-Policy"]
                        )

    run_world(scenario)
