"""Anthropic's API at the router: keys, errors in its form, keys of conversations, and streams that go on elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdserve.base.stream_state import MESSAGE_STOP, RESUME_FIELD, STATE_HEADER, EventState
from pdserve.http.access import COUNT_TOKENS_PATH, MESSAGES_PATH, OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH
from pdserve.http.error_forms import inner_error, ollama_error
from pdserve.http.errors import error_object
from pdserve.protocol.failure import Failure
from pdserve.router.config.config import RetryConfig, RouterAccessConfig
from pdserve.router.policies.routing_keys import ConversationKey, conversation_key, prompt_of
from pdserve.router.proxy.stream_retry import Moved, StreamProgress, can_go_on, stream_form
from tests.unit.router.answers import begin_stream
from tests.unit.router.conftest import answer_ok

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
HI = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"messages": HI, "max_tokens": 3}
STREAM = {**BODY, "stream": True}
RETRY = RetryConfig(max_tries=2, first_backoff_s=0.0, stream_retries=1)


def delta(number: int) -> bytes:
    data = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": str(number)}}
    return b"event: content_block_delta\ndata: " + json.dumps(data).encode() + b"\n\n"


def writer(first: int, end: int, code: str | None = None) -> Any:
    """A decode worker that writes some events, and then breaks off, or ends with an error of this code, or well."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        told = STATE_HEADER in request.headers
        for number in range(first, end):
            state = EventState([number], {"id": "msg_1"} if number == 0 else None)
            await response.write((state.line() if told else b"") + delta(number))
        if code == "cut":
            assert request.transport is not None
            request.transport.abort()
        elif code is None:
            await response.write((EventState(tail="").line() if told else b"") + MESSAGE_STOP)
        else:
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "no", "code": code}, "code": 503}
            await response.write(b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
        await response.write_eof()
        return response

    return answer


@pytest.mark.parametrize("code", ["cut", "engine_dead"])
def test_a_stream_goes_on_at_another_pair(run_world: RunWorld, code: str) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(name, writer(0, 2, code), writer(2, 4)) for name in ("d", "d2")]
        decodes[1].answers = [writer(2, 4)]
        async with world.router([prefill], decodes, retry=RETRY, policy="round_robin") as url:
            async with world.session.post(url + MESSAGES_PATH, json=STREAM) as response:
                raw = await response.read()
        assert raw == b"".join(map(delta, range(4))) + MESSAGE_STOP
        assert decodes[1].bodies[0][RESUME_FIELD]["token_ids"] == [0, 1]
        assert decodes[1].bodies[0]["seed"] == decodes[0].bodies[0]["seed"]

    run_world(scenario)


def test_a_broken_stream_ends_with_an_error_event(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", writer(0, 2, "cut"))
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + MESSAGES_PATH, json=STREAM) as response:
                raw = await response.read()
        last = raw.split(b"\n\n")[-2]
        assert last.startswith(b"event: error\ndata: ")
        told = json.loads(last.partition(b"data: ")[2])
        assert (told["type"], told["error"]["code"], told["code"]) == ("error", "worker_failed", 502)

    run_world(scenario)


def test_keys_and_errors_in_the_form_of_the_api(run_world: RunWorld) -> None:
    async def refusing(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"type": "error", "error": {"type": "not_found_error", "message": "no"}, "code": 404}
        return web.json_response(error, status=404)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", answer_ok, refusing)
        access = RouterAccessConfig(api_key="k")
        async with world.router([prefill], [decode], wait_key="k", access=access) as url:
            for path, headers, status, kind in (
                (MESSAGES_PATH, {}, 401, "authentication_error"),
                (COUNT_TOKENS_PATH, {"x-api-key": "j"}, 401, "authentication_error"),
                (MESSAGES_PATH + "?beta=true", {"x-api-key": "k"}, 200, None),
                (MESSAGES_PATH, {"x-api-key": "k"}, 404, "not_found_error"),
                (MESSAGES_PATH + "/batches", {"x-api-key": "k"}, 404, "not_found_error"),
                (MESSAGES_PATH + "/batches/a/cancel", {}, 401, "authentication_error"),
            ):
                async with world.session.post(url + path, json=BODY, headers=headers) as response:
                    told = await response.json()
                    assert response.status == status and response.headers["request-id"]
                    assert kind is None or (told["type"], told["error"]["type"]) == ("error", kind)
            assert decode.headers[0]["Authorization"] == "Bearer k" and "x-api-key" not in decode.headers[0]
            async with world.session.post(
                url + MESSAGES_PATH, data=b"[]", headers={"x-api-key": "k", "Content-Type": "application/json"}
            ) as response:
                assert (await response.json())["error"]["type"] == "invalid_request_error"

    run_world(scenario)


@pytest.mark.parametrize("path", [MESSAGES_PATH, OLLAMA_GENERATE_PATH])
def test_an_error_of_a_worker_in_openais_form_is_converted_whole(run_world: RunWorld, path: str) -> None:
    async def failing(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(error_object("internal error", 500, code="internal_error"), status=500)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", failing)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + path, json=BODY | {"prompt": "a", "stream": False}) as response:
                raw = await response.read()
        assert response.status == 500 and response.headers["Content-Length"] == str(len(raw))
        assert inner_error(json.loads(raw))["message"] == "internal error"

    run_world(scenario)


def test_a_broken_stream_of_ollamas_api_ends_with_an_error_line(run_world: RunWorld) -> None:
    async def cut(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(b'{"response": "a", "done": false}\n{"resp')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", cut)
        async with world.router([prefill], [decode], retry=RETRY) as url:
            async with world.session.post(url + OLLAMA_GENERATE_PATH, json={"prompt": "a"}) as response:
                lines = (await response.read()).splitlines()
            async with world.session.post(url + OLLAMA_GENERATE_PATH, data=b"[]") as response:
                assert response.status == 400 and isinstance((await response.json())["error"], str)
        assert len(lines) == 2 and json.loads(lines[-1])["error_code"] == "worker_failed"
        assert isinstance(decode.bodies[0]["bootstrap_room"], int)

    run_world(scenario)


def line(number: int) -> bytes:
    return json.dumps({"response": str(number), "done": False}, separators=(",", ":")).encode() + b"\n"


LAST = b'{"response":"","done":true}\n'
DEAD = b'{"error":"no","param":null,"error_code":"engine_dead","code":503}\n'


def line_writer(first: int, end: int, ending: bytes | None = LAST) -> Any:
    """A decode worker that writes some lines of Ollama's API, and then `ending`; None: it breaks off within a line."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        told = STATE_HEADER in request.headers
        for number in range(first, end):
            state = EventState([number], {"id": "1"} if number == 0 else None)
            await response.write((state.line() if told else b"") + line(number))
        if ending is None:
            await response.write(b": pdserve {")
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write((EventState(tail="").line() if told and ending == LAST else b"") + ending)
        await response.write_eof()
        return response

    return answer


@pytest.mark.parametrize("ending", [None, DEAD])
def test_a_stream_of_ollamas_api_goes_on_at_another_pair(run_world: RunWorld, ending: bytes | None) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker("d", line_writer(0, 2, ending)), await world.worker("d2", line_writer(2, 4))]
        async with world.router([prefill], decodes, retry=RETRY, policy="round_robin") as url:
            async with world.session.post(url + OLLAMA_CHAT_PATH, json={"messages": HI}) as response:
                assert await response.read() == b"".join(map(line, range(4))) + LAST
            last = await world.session.post(url + OLLAMA_CHAT_PATH, json={"messages": HI, "stream": False})
            assert last.status == 200
        assert decodes[1].bodies[0][RESUME_FIELD]["token_ids"] == [0, 1]
        assert decodes[1].bodies[0]["seed"] == decodes[0].bodies[0]["seed"]

    run_world(scenario)


def test_the_line_of_a_moved_request_of_ollamas_api() -> None:
    details = {"to": "http://d2", "migrated_rid": "r", "next_token_index": 2}
    error = {"error": {"message": "moved", "type": "server_error", "param": None, "code": "migrated"} | details}
    moved = orjson.dumps(ollama_error(error | {"code": 503})) + b"\n"
    given: list[Any] = []

    async def attach(body: dict[str, Any], to: Moved) -> Any:
        given.append((body[RESUME_FIELD], to))

    async def again(body: dict[str, Any], failure: Failure) -> Any:
        return None

    progress = StreamProgress({"messages": HI}, 1, again, attach, stream_form(OLLAMA_CHAT_PATH))
    lines = [EventState([0], {"id": "1"}).line() + line(0), EventState([1]).line() + line(1), moved]
    assert b"".join(map(progress.feed, lines)) == line(0) + line(1)
    assert progress.failure is not None and progress.failure.code == "migrated"
    asyncio.run(progress.go_on(progress.failure))
    assert given == [
        ({"attach": "r", "head": {"id": "1"}, "token_ids": [0, 1], "cached_tokens": 0}, Moved("http://d2", "r", 2))
    ]


def test_prompts_and_conversations() -> None:
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i};"} for i in range(2)]
    rest = {"type": "text", "text": "You are"}
    bodies = [{**BODY, "system": [block, rest], "tools": [{"name": "f"}]} for block in blocks]
    assert prompt_of(MESSAGES_PATH, bodies[0]) == prompt_of(MESSAGES_PATH, bodies[1])
    longer = {**bodies[0], "messages": [*HI, {"role": "assistant", "content": "ho"}, *HI]}
    prompt, prefix = prompt_of(MESSAGES_PATH, longer), prompt_of(MESSAGES_PATH, bodies[0])
    assert prompt is not None and prefix is not None and prompt.startswith(prefix)
    keys = [conversation_key(MESSAGES_PATH, body, CIMultiDict()) for body in (*bodies, longer)]
    assert keys[0] is not None and not keys[0].named and len(set(keys)) == 1
    named = {**BODY, "metadata": {"user_id": "u"}}
    assert conversation_key(MESSAGES_PATH, named, CIMultiDict()) == ConversationKey(b"u", named=True)
    for body in ({}, {"messages": "x"}, {"messages": []}, {"messages": [5], "metadata": 5, "system": [5]}):
        prompt_of(MESSAGES_PATH, body)
        conversation_key(MESSAGES_PATH, body, CIMultiDict())
    assert prompt_of(OLLAMA_CHAT_PATH, BODY) is not None and prompt_of(OLLAMA_GENERATE_PATH, {"prompt": "a"}) == "a"
    assert can_go_on(OLLAMA_CHAT_PATH, STREAM)
    assert can_go_on(MESSAGES_PATH, STREAM) and not can_go_on(MESSAGES_PATH, BODY)
