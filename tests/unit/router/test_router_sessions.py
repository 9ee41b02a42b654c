"""Sessions at the router: each turn goes to any pair with its whole prompt, and a lost pair loses no turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pdserve.http import session_store
from pdserve.router.config.config import RetryConfig, RouterAccessConfig
from pdserve.router.policies.routing_keys import prompt_of
from tests.unit.router.answers import begin_stream
from tests.unit.router.test_router_dispatch import GENERATE, RunWorld
from tests.waiting import until

BOS, EOS = 1, 2


def result(body: dict[str, Any], ids: list[int], count: int, *, ends: bool) -> dict[str, Any]:
    reason = {"type": "stop", "matched": EOS} if ends else None
    meta = {"id": body["rid"], "completion_tokens": count, "finish_reason": reason}
    return {"text": "", "output_ids": ids, "meta_info": meta}


class SessionWorker:
    """Tokens are bytes behind a BOS token; outputs are 7, 8, EOS. `incremental`: events have the new tokens only."""

    def __init__(self, *, incremental: bool = False, tokenizer: bool = True) -> None:
        self.incremental = incremental
        self.tokenizer = tokenizer
        self.gate: asyncio.Event | None = None
        self.end_gate: asyncio.Event | None = None
        self.prompts: list[list[int]] = []

    async def __call__(self, worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/tokenize" and self.tokenizer:
            return web.json_response({"tokens": [[BOS, *text.encode()] for text in body["prompt"]]})
        if request.path == "/detokenize" and self.tokenizer:
            return web.json_response({"text": "x" * len(body["tokens"])})
        if request.path != GENERATE:
            return web.json_response({"error": {"message": "no tokenizer"}}, status=400)
        assert "session_params" not in body and "text" not in body
        self.prompts.append(body["input_ids"])
        ids = [7, 8, EOS]
        if not body.get("stream"):
            if self.gate is not None:
                await self.gate.wait()
            return web.json_response(result(body, ids, 3, ends=True))
        response = await begin_stream(request)
        for count in (1, 2, 3):
            shown = ids[count - 1 : count] if self.incremental else ids[:count]
            data = f"data: {json.dumps(result(body, shown, count, ends=count == 3))}\n\n".encode()
            await response.write(data[:20])
            await response.write(data[20:])
            if self.gate is not None:
                await self.gate.wait()
        if self.end_gate is not None:
            await self.end_gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


class SessionClient:
    def __init__(self, world: Any, url: str, key: str | None = None) -> None:
        self.world, self.url, self.id = world, url, ""
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.world.session.post(self.url + path, json=body, headers=self.headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", '"')) else text

    async def open(self, **fields: Any) -> str:
        status, made = await self.post("/open_session", {"capacity_of_str_len": 1000, **fields})
        assert status == 200, made
        self.id = made
        return str(made)

    async def ask(self, given: Any, name: str | None = None, *, stream: bool = False, **params: Any) -> tuple[int, Any]:
        prompt = {"text": given} if isinstance(given, str) else {"input_ids": given}
        body = {**prompt, "rid": name, "stream": stream, "session_params": {"id": self.id, **params}}
        return await self.post(GENERATE, body)


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("kind", ["whole", "stream", "incremental"])
def test_turns_go_on_at_any_pair(run_world: RunWorld, kind: str, retries: int) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker(incremental=kind == "incremental")
        prefill, *decodes = [await world.worker(name, answer) for name in ("p", "d1", "d2")]
        retry = RetryConfig(max_tries=3, first_backoff_s=0.0, stream_retries=retries)
        async with world.router([prefill], decodes, policy="round_robin", retry=retry) as url:
            client, stream = SessionClient(world, url), kind != "whole"
            await client.open()

            async def prompt(given: Any, *more: Any, **params: Any) -> list[int]:
                answer.prompts.clear()
                status, answered = await client.ask(given, *more, stream=stream, **params)
                assert status == 200, answered
                assert answer.prompts[0] == answer.prompts[1], "both halves have the whole prompt"
                return answer.prompts[0]

            out = [7, 8, EOS]
            assert await prompt("ab", "one") == [BOS, *b"ab"]
            assert await prompt("cd", "two", rid="one") == [BOS, *b"ab", *out, *b"cd"]
            for decode in decodes:
                assert any(path == GENERATE for path in decode.paths), "the turns went to both"
            served = next(one for one in decodes if one.bodies[-1].get("rid") == "two")
            await served.stop()
            two = [BOS, *b"ab", *out, *b"cd", *out]
            assert await prompt([BOS, 5], "three", rid="two") == [*two, 5]
            assert await prompt([BOS, 5], rid="two", drop_previous_output=True) == [*two[:-3], 5]
            assert await prompt("x", rid="two", offset=-1) == [*two[:-1], *b"x"]
            assert await prompt("x", rid="one", offset=2, replace=True) == [BOS, *b"a", *b"x"]
            assert (await client.ask("x", rid="three", stream=stream))[0] == 404, "it was replaced"
            assert await prompt([4]) == [4], "a root of its own"
            assert (await client.post("/close_session", {"session_id": client.id}))[0] == 200
            status, error = await client.ask("x", rid="one", stream=stream)
            assert (status, error["error"]["code"]) == (404, "session_not_found")

    run_world(scenario)


def test_a_turn_that_fails_or_is_left_is_forgotten(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker()
        worker = await world.worker("w", answer)
        async with world.router([], [worker]) as url:
            client = SessionClient(world, url)
            await client.open()
            await client.ask("a", "one")
            answer.gate = asyncio.Event()
            for stream in (False, True):
                count = len(answer.prompts)
                left = asyncio.create_task(client.ask("b", "two", stream=stream, rid="one"))
                await until(lambda count=count: len(answer.prompts) > count)
                status, error = await client.ask("c", rid="two")
                assert (status, error["error"]["param"]) == (400, "session_params.rid") and "still runs" in str(error)
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                await until(lambda stream=stream: worker.num_cancelled == 1 + stream)
                assert (await client.ask("c", rid="two"))[0] == 404
            running = asyncio.create_task(client.ask("b", "three", rid="one"))
            await until(lambda: answer.prompts[-1][-1] == ord("b") and len(answer.prompts) == 4)
            await worker.stop()
            assert (await running)[0] >= 500
            await worker.start(int(worker.url.rsplit(":", 1)[1]))
            answer.gate = None
            await world.until(lambda: world.healthy_urls(url), lambda urls: worker.url in urls)
            assert (await client.ask("c", rid="three"))[0] == 404
            assert (await client.ask("c", rid="one"))[0] == 200, "the turn before it is kept"

    run_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_replaces_a_running_one_ends_it(run_world: RunWorld, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker()
        answer.gate = asyncio.Event()
        prefill, decode = await world.worker("p", answer), await world.worker("d", answer)
        async with world.router([prefill], [decode]) as url:
            client = SessionClient(world, url)
            await client.open()
            running = asyncio.create_task(client.ask("a", "one", stream=stream))
            await until(lambda: len(answer.prompts) == 2)
            closing = asyncio.create_task(client.ask("b", "two", replace=True))
            status, ended = await running
            assert (status, "has replaced it" in str(ended)) == (200 if stream else 400, True)
            assert (await client.post("/close_session", {"session_id": client.id}))[0] == 200
            answer.gate.set()
            assert (await closing)[0] == 200, "closing ends no running request"

    run_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_replaces_the_running_one_that_it_follows_and_no_other(run_world: RunWorld, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker()
        answer.gate = asyncio.Event()
        workers = [await world.worker(name, answer) for name in "ab"]
        async with world.router([], workers, policy="round_robin") as url:
            client, other = SessionClient(world, url), SessionClient(world, url)
            await client.open()
            await other.open()
            running = [asyncio.create_task(one.ask("a", "one", stream=stream)) for one in (client, other)]
            await until(lambda: len(answer.prompts) == 2)
            follow = asyncio.create_task(client.ask("b", "two", rid="one", replace=True))
            status, ended = await running[0]
            assert (status, "has replaced it" in str(ended)) == (200 if stream else 400, True)
            await until(lambda: len(answer.prompts) == 3)
            answer.gate.set()
            assert (await follow)[0] == 200 and answer.prompts[2] == [BOS, *b"ab"]
            status, ended = await running[1]
            assert (status, "replaced" in str(ended)) == (200, False), "another client's request has the same id"
            assert (await client.ask("c", rid="two"))[0] == 200

    run_world(scenario)


def test_a_client_that_leaves_behind_the_last_event_goes_on(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker()
        worker = await world.worker("w", answer)
        async with world.router([], [worker]) as url:
            client = SessionClient(world, url)
            await client.open()
            answer.end_gate = asyncio.Event()
            body = {"text": "a", "rid": "one", "stream": True, "session_params": {"id": client.id}}
            async with world.session.post(url + GENERATE, json=body) as response:
                async for line in response.content:
                    if b'"finish_reason": {' in line:
                        break
                response.close()
            await until(lambda: worker.num_cancelled == 1)
            assert (await client.ask("b", rid="one"))[0] == 200
            assert answer.prompts[-1] == [BOS, *b"a", 7, 8, EOS, *b"b"]

    run_world(scenario)


def test_what_a_session_cannot_do_is_refused_by_field(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_SESSIONS", 2)

    async def scenario(world: Any) -> None:
        answer = SessionWorker()
        worker = await world.worker("w", answer)
        async with world.router([], [worker]) as url:
            client = SessionClient(world, url)
            for path in ("/open_session", "/close_session"):
                status, error = await client.post(path, [])
                assert status == 400 and error["error"]["message"] == "the body must be a JSON object, got list"
            for body, field in (
                ({}, "capacity_of_str_len"),
                ({"capacity_of_str_len": "x"}, "capacity_of_str_len"),
                ({"capacity_of_str_len": 9, "session_id": ""}, "session_id"),
            ):
                status, error = await client.post("/open_session", body)
                assert (status, error["error"]["param"]) == (400, field)
            assert await client.open(session_id="s", capacity_of_str_len=8) == "s"
            assert (await client.ask("a", "one"))[0] == 200
            for fields, status, param in (
                ({"session_params": {"id": "x"}}, 404, "session_params.id"),
                ({"session_params": {}}, 400, "session_params.id"),
                ({"session_params": 5}, 400, "session_params"),
                ({"session_params": {"id": "s", "other": 1}}, 400, "session_params.other"),
                ({"session_params": {"id": "s", "rid": "x"}}, 404, "session_params.rid"),
                ({"rid": "one"}, 400, "rid"),
                ({"rid": ["two"]}, 400, "rid"),
                ({"sampling_params": {"n": 2}}, 400, "session_params"),
                ({"text": ["a"]}, 400, "text"),
                ({"text": "a", "input_ids": [1]}, 400, "text"),
                ({"text": None}, 400, "text"),
                ({"text": None, "input_ids": []}, 400, "input_ids"),
                ({"text": None, "input_ids": [1 << 40]}, 400, "input_ids"),
                ({"text": None, "input_ids": ["a"]}, 400, "input_ids"),
                ({"text": None, "input_ids": [[1], [2]]}, 400, "session_params"),
                ({"text": None, "input_embeds": "x"}, 400, "input_embeds"),
                ({"text": "long enough"}, 400, "session_params"),
            ):
                found, error = await client.post(GENERATE, {"text": "b", "session_params": {"id": "s"}, **fields})
                assert (found, error["error"]["param"]) == (status, param), fields
            assert len(answer.prompts) == 1
            await client.open()
            status, error = await client.post("/open_session", {"capacity_of_str_len": 9})
            assert (status, error["error"]["code"]) == (503, "sessions_full")
            assert (await client.post("/close_session", {}))[0] == 400
            assert (await client.post("/close_session", {"session_id": "x"}))[0] == 404

    run_world(scenario)


def test_servers_without_a_tokenizer_take_token_ids(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        answer = SessionWorker(tokenizer=False)
        worker = await world.worker("w", answer)
        async with world.router([], [worker]) as url:
            client = SessionClient(world, url)
            await client.open(capacity_of_str_len=6)
            assert (await client.ask([5], "one"))[0] == 200
            status, found = await client.ask([6], rid="one")
            assert status == 200, found
            assert answer.prompts[-1] == [5, 7, 8, EOS, 6]
            status, error = await client.ask([6, 6, 6], rid="one")
            assert (status, error["error"]["code"]) == (400, "session_capacity_exceeded")
            status, error = await client.ask("a")
            assert (status, error["error"]["param"]) == (400, "text") and "no tokenizer" in error["error"]["message"]
            await worker.stop()
            assert (await client.ask("a"))[0] == 503

    run_world(scenario)


def test_each_key_has_its_own_sessions(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", SessionWorker())
        async with world.router([], [worker], wait_key="a", access=RouterAccessConfig(api_key="a,b")) as url:
            mine, other = SessionClient(world, url, "a"), SessionClient(world, url, "b")
            other.id = await mine.open()
            assert (await mine.ask("x"))[0] == 200 and (await other.ask("x"))[0] == 404
            assert (await other.post("/close_session", {"session_id": mine.id}))[0] == 404

    run_world(scenario)


def test_a_growing_prompt_keeps_its_prefix_for_policies() -> None:
    first, second = ({"input_ids": ids} for ids in ([1, 2, 3], [1, 2, 3, 4]))
    assert (prompt_of(GENERATE, second) or "").startswith(prompt_of(GENERATE, first) or "x")
