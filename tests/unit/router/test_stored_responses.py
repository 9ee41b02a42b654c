"""The router stores responses: conversations go on at any pair, and a dead worker loses none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai
import pytest
from aiohttp import web

from pdserve.config.responses_group import ResponseStoreConfig
from pdserve.errors import RequestError
from pdserve.http.response_events import EventLog
from pdserve.http.response_store import HISTORY_FIELD, Recording, ResponseStore, StoreLimits
from pdserve.router.config.config import RouterAccessConfig
from pdserve.router.policies.routing_keys import conversation_key, prompt_of
from pdserve.router.proxy import stored_responses
from pdserve.router.proxy.stored_responses import ResponseReader
from tests.unit.router.answers import begin_stream
from tests.unit.router.test_router_dispatch import RunWorld

PATH = "/v1/responses"


def response_of(body: dict[str, Any], text: str = "fine", status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [part]}
    return {
        "id": f"resp_{body['input']}", "object": "response", "created_at": 1, "model": "m", "status": status,
        "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "store": body.get("store"), "previous_response_id": body.get("previous_response_id"),
    }  # fmt: skip


async def respond(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As pdserve's servers: whole, or as events in pieces that end anywhere."""
    made = response_of(body)
    if not body.get("stream"):
        return web.json_response(made)
    response = await begin_stream(request)
    kinds = {"response.created": {**made, "output": []}, "response.completed": made}
    events = [f"event: {kind}\ndata: {json.dumps({'type': kind, 'response': one})}\n\n" for kind, one in kinds.items()]
    data = "".join(events).encode()
    for start in range(0, len(data), 50):
        await response.write(data[start : start + 50])
    return response


def test_numbers_of_a_query_are_bounded() -> None:
    store = ResponseStore(StoreLimits(2, 1 << 20, 10.0), lambda: 0.0)
    store.put("", response_of({"input": "x"}), [])
    store._stored["resp_x"] = dataclasses.replace(store._stored["resp_x"], events=EventLog())
    for digits in ("0000000001" + "9" * 5000, "00000000199"):
        for ask, query in (
            (store.input_items, {"limit": digits}),
            (store.events, {"stream": "true", "starting_after": digits}),
        ):
            with pytest.raises(RequestError) as raised:
                ask("resp_x", "", query)
            assert raised.value.status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_at_another_pair(run_world: RunWorld, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        prefill, *decodes = [await world.worker(name, respond) for name in ("p", "d1", "d2")]
        async with world.router([prefill], decodes) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

                async def ask(text: str, **fields: Any) -> Any:
                    made = await client.responses.create(model="m", input=text, stream=stream, **fields)
                    return [event async for event in made][-1].response if stream else made

                first = await ask("one")
                for worker in (prefill, *decodes):
                    assert all(body[HISTORY_FIELD] == [] and body["store"] is True for body in worker.bodies)
                served = next(worker for worker in decodes if worker.bodies)
                await served.stop()
                second = await ask("two", previous_response_id=first.id)
                (other,) = [worker for worker in decodes if worker is not served]
                history = other.bodies[-1][HISTORY_FIELD]
                assert [item["role"] for item in history] == ["user", "assistant"]
                assert prefill.bodies[-1][HISTORY_FIELD] == history
                assert (await client.responses.retrieve(second.id)).output_text == "fine"
                items = await client.responses.input_items.list(second.id, order="asc")
                assert [item.role for item in items.data] == ["user", "assistant", "user"]
                await ask("three", previous_response_id=second.id, store=False)
                assert [item["role"] for item in other.bodies[-1][HISTORY_FIELD]] == ["user", "assistant"] * 2
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve("resp_three")
                with pytest.raises(openai.BadRequestError, match="has ended"):
                    await client.responses.cancel(second.id)
                await client.responses.delete(second.id)
                with pytest.raises(openai.NotFoundError, match="previous_response_id"):
                    await ask("four", previous_response_id=second.id)

    run_world(scenario)


def test_keys_have_their_own_responses_and_clients_send_no_history(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", respond)
        access = RouterAccessConfig(api_key="a,b")
        async with world.router([], [worker], wait_key="a", access=access) as url:

            def headers(key: str) -> dict[str, str]:
                return {"Authorization": f"Bearer {key}"}

            body = {"input": "x", HISTORY_FIELD: [{"role": "user", "content": "made up"}]}
            async with world.session.post(url + PATH, json=body, headers=headers("a")) as answer:
                made = await answer.json()
            assert worker.bodies[-1][HISTORY_FIELD] == []
            for key, status in (("a", 200), ("b", 404)):
                for tail in ("", "/input_items"):
                    async with world.session.get(f"{url}{PATH}/{made['id']}{tail}", headers=headers(key)) as answer:
                        assert answer.status == status
            more = {"input": "y", "previous_response_id": made["id"]}
            async with world.session.post(url + PATH, json=more, headers=headers("b")) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (404, "previous_response_id")
            assert len(worker.bodies) == 1

    run_world(scenario)


def test_a_router_may_store_none(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", respond)
        async with world.router([], [worker], responses=ResponseStoreConfig(response_store_size=0)) as url:
            async with world.session.post(url + PATH, json={"input": "x", "store": True}) as answer:
                made = await answer.json()
            assert made["store"] is False
            async with world.session.get(f"{url}{PATH}/{made['id']}") as answer:
                assert answer.status == 404 and "--response-store-size 0" in await answer.text()

    run_world(scenario)


def test_all_turns_of_a_conversation_have_one_key_and_a_growing_prompt() -> None:
    store = ResponseStore(StoreLimits(9, 1 << 20, 60.0), lambda: 0.0)
    prompts, keys, previous = [], set(), None
    for text in ("one", "two", "three"):
        given: Any = text if text != "two" else [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        body, recording = store.begin({"input": given, "previous_response_id": previous}, "")
        assert recording is not None
        recording.keep(response_of({"input": text}))
        previous = f"resp_{text}"
        prompts.append(prompt_of(PATH, body) or "")
        key = conversation_key(PATH, body, {})
        assert key is not None
        keys.add(key.value)
    assert len(keys) == 1 and prompts[1].startswith(prompts[0]) and prompts[2].startswith(prompts[1])
    assert prompts[2].endswith("assistant: fine\nuser: three")


def reader(*, is_stream: bool) -> tuple[ResponseReader, ResponseStore]:
    store = ResponseStore(StoreLimits(9, 1 << 20, 60.0), lambda: 0.0)
    return ResponseReader(Recording(store, "", []), is_stream=is_stream), store


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not JSON",
        b"[1]",
        b'{"id": 5}',
        b"event: response.completed\ndata: 5\n\n",
        b'event: response.completed\ndata: {"response": 5}\n\n',
        b'event: response.failed\ndata: {"response": {"id": "x", "status": "failed"}}\n\n',
    ],
)
def test_what_is_no_response_is_relayed_and_not_stored(data: bytes, is_stream: bool) -> None:
    read, store = reader(is_stream=is_stream)
    assert read.feed(data, False) + read.feed(b"", True) == data and len(store) == 0


def test_an_endless_event_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_EVENT_BYTES", 100)
    read, store = reader(is_stream=True)
    for _ in range(50):
        assert read.feed(b"x" * 9, False) == b"x" * 9
    assert len(read._read) == 0 and len(store) == 0
