"""`POST /replicate` at the router: the worker that has the prefix sends it to those that lack it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from pdserve.router.config.config import RouterAccessConfig

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
TEXT = {"text": "You are a helpful"}


@dataclasses.dataclass
class Cache:
    """A decode worker with the contract of `docs/migration.md`. `refuses`: URLs that its copies do not reach."""

    num_tokens: int
    refuses: tuple[str, ...] = ()
    error: tuple[int, str, str | None] | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    keys: list[str | None] = dataclasses.field(default_factory=list)

    async def __call__(self, worker: Any, request: web.Request, body: dict[str, Any]) -> web.Response:
        assert request.path == "/replicate"
        self.calls.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.error is not None:
            status, code, param = self.error
            return web.json_response({"error": {"message": "no", "code": code, "param": param}}, status=status)
        if body.get("to") in self.refuses:
            error = {"message": "other weights", "code": "migration_refused", "param": "weights"}
            return web.json_response({"error": error}, status=409)
        return web.json_response({"success": True, "to": body.get("to"), "num_tokens": self.num_tokens})

    @property
    def copies(self) -> list[str]:
        """URLs of the workers that got the prefix."""
        return [body["to"] for body in self.calls if "to" in body]


class Fleet:
    """A router over decode workers with these caches."""

    def __init__(self, world: Any, caches: list[Cache]) -> None:
        self.world, self.caches = world, caches
        self.workers: list[Any] = []
        self.prefill: Any = None

    async def start(self) -> Fleet:
        self.prefill = await self.world.worker("p")
        self.workers = [await self.world.worker(f"d{i}", cache) for i, cache in enumerate(self.caches)]
        return self

    def router(self, **options: Any) -> Any:
        return self.world.router([self.prefill], self.workers, policy="round_robin", **options)

    async def copy(self, url: str, key: str | None = None, **body: Any) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.world.session.post(f"{url}/replicate", json=body, headers=headers) as response:
            return response.status, await response.json()

    def urls(self, *numbers: int) -> list[str]:
        return [self.workers[number].url for number in numbers]


def test_the_longest_prefix_goes_where_less_of_it_is(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        fleet = await Fleet(world, [Cache(16), Cache(64), Cache(0), Cache(64)]).start()
        caches = fleet.caches
        async with fleet.router() as url:
            status, answer = await fleet.copy(url, **TEXT, cache_salt="s")
            assert (status, answer["success"], answer["num_tokens"]) == (200, True, 64)
            source = 1 if answer["from"] == fleet.workers[1].url else 3
            assert sorted(caches[source].copies) == sorted(fleet.urls(0, 2)) and not caches[4 - source].copies
            told = {one["url"]: one["copied"] for one in answer["to"]}
            assert told == dict(zip(fleet.urls(0, 2, 4 - source), (True, True, False), strict=True))
            for cache in caches:
                assert cache.calls[0] == {**TEXT, "cache_salt": "s"}, "each is asked how much it has"

            status, answer = await fleet.copy(url, input_ids=[1, 2], to=fleet.workers[2].url)
            assert (status, [one["url"] for one in answer["to"]]) == (200, fleet.urls(2))
            before = len(caches[3].calls)
            body = {"input_ids": [1, 2], "from": fleet.workers[0].url, "to": fleet.urls(1, 2, 2)}
            status, answer = await fleet.copy(url, **body)
            assert (answer["from"], answer["num_tokens"]) == (fleet.workers[0].url, 16)
            assert [(one["url"], one["copied"]) for one in answer["to"]] == list(
                zip(fleet.urls(1, 2), (False, True), strict=True)
            )
            assert caches[0].copies == fleet.urls(2) and len(caches[3].calls) == before
            assert caches[0].calls[-1] == {"input_ids": [1, 2], "to": fleet.workers[2].url}

    run_world(scenario)


def test_a_worker_that_refuses_is_named(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        fleet = await Fleet(world, [Cache(32), Cache(0), Cache(0)]).start()
        fleet.caches[0].refuses = tuple(fleet.urls(1))
        async with fleet.router() as url:
            status, answer = await fleet.copy(url, **TEXT)
            assert (status, answer["success"]) == (200, False)
            assert [one["success"] for one in answer["to"]] == [False, True]
            error = answer["to"][0]["error"]
            assert (error["code"], error["param"]) == ("migration_refused", "weights")
            status, answer = await fleet.copy(url, **TEXT, to=fleet.workers[1].url)
            assert (status, answer["success"]) == (502, False)
            fleet.caches[2].error = (500, "internal", None)
            status, answer = await fleet.copy(url, **TEXT, to=fleet.workers[2].url)
            assert (status, answer["success"]) == (200, True), "what a target has is not known: it gets all"
            fleet.caches[0].error = (400, "invalid_request", "lora_path")
            status, answer = await fleet.copy(url, **TEXT, lora_path="?", to=fleet.workers[1].url)
            assert (status, answer["error"]["param"]) == (400, "lora_path"), "a worker says what is wrong with the body"

    run_world(scenario)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "text"),
        ({"text": "a", "input_ids": [1]}, 400, "text"),
        ({"text": 5}, 400, "text"),
        ({"text": "a", "too": 1}, 400, "too"),
        ({"text": "a", "from": "http://no:1"}, 404, "from"),
        ({"text": "a", "to": "http://no:1"}, 404, "to"),
        ({"text": "a", "to": []}, 404, "to"),
        ({"text": "a", "from": 0, "to": 0}, 404, "to"),
        ({"text": "a", "to": [0, 1]}, 404, "to"),
        ({"text": "a", "to": "prefill"}, 404, "to"),
        ({"text": "a"}, 404, "text"),
        ({"input_ids": [1], "to": 1}, 404, "input_ids"),
    ],
)
def test_bad_input(run_world: RunWorld, body: dict[str, Any], status: int, param: str) -> None:
    async def scenario(world: Any) -> None:
        fleet = await Fleet(world, [Cache(0), Cache(0)]).start()

        def name(given: Any) -> Any:
            if isinstance(given, list):
                return [name(one) for one in given]
            return fleet.workers[given].url if isinstance(given, int) else given

        asked = body | {field: name(body[field]) for field in ("from", "to") if field in body}
        asked |= {"to": fleet.prefill.url} if body.get("to") == "prefill" else {}
        async with fleet.router() as url:
            told, answer = await fleet.copy(url, **asked)
            assert (told, answer["error"]["param"]) == (status, param), answer
            assert not any(cache.copies for cache in fleet.caches)

    run_world(scenario)


@pytest.mark.parametrize(
    ("error", "status"), [((400, "no_such_model", "lora_path"), 400), ((409, "x", "dp_size"), 502)]
)
def test_an_error_of_all_workers_is_the_answer(run_world: RunWorld, error: tuple[int, str, str], status: int) -> None:
    async def scenario(world: Any) -> None:
        fleet = await Fleet(world, [Cache(0, error=error), Cache(0, error=error)]).start()
        async with fleet.router() as url:
            told, answer = await fleet.copy(url, **TEXT)
            assert (told, answer["error"]["code"]) == (status, error[1])

    run_world(scenario)


def test_it_needs_the_admin_key_and_sends_the_workers_theirs(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        fleet = await Fleet(world, [Cache(16), Cache(0)]).start()
        access = RouterAccessConfig(api_key="k", admin_api_key="root", worker_admin_api_key="inner")
        async with fleet.router(access=access, wait_key="k") as url:
            assert (await fleet.copy(url, "k", **TEXT))[0] == 401
            assert not fleet.caches[0].calls
            assert (await fleet.copy(url, "root", **TEXT))[0] == 200
            assert set(fleet.caches[0].keys) == {"Bearer inner"}

    run_world(scenario)
