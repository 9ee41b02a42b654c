"""Responses in the background at the router: the client leaves, pairs die, and the response is read again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from aiohttp import web

from pdserve.config.responses_group import ResponseStoreConfig
from pdserve.http.response_events import RunningResponse
from pdserve.router.app import ROUTER
from pdserve.router.config.config import RouterAccessConfig
from tests.unit.router.answers import begin_stream
from tests.unit.router.test_router_dispatch import RunWorld, cut, refuse
from tests.unit.router.test_stored_responses import PATH, response_of
from tests.waiting import seen_until, settle, until


def event_of(kind: str, number: int, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()


class Worker:
    """Writes a response in two parts; the second one when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(self, worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        made = response_of(body)
        if not body.get("stream"):
            return web.json_response(made)
        response = await begin_stream(request)
        open_ = {**made, "output": [], "status": "in_progress"}
        for number, kind in enumerate(("response.created", "response.in_progress")):
            await response.write(event_of(kind, number, response=open_))
        item = made["output"][0]
        await response.write(event_of("response.output_item.done", 2, output_index=0, item=item)[:-1])
        await self.gate.wait()
        await response.write(b"\n" + event_of("response.completed", 3, response=made))
        return response


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_a_response_goes_on_without_its_client(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        answer = Worker()
        prefill, decode = await world.worker("p", answer), await world.worker("d", answer)
        async with world.router([prefill], [decode]) as url, client_of(url) as client:
            made = await client.responses.create(model="m", input="one", background=True)
            assert (made.status, made.background, made.model) == ("queued", True, "m")
            stream = await client.responses.create(model="m", input="two", background=True, stream=True)
            first = [await anext(stream) for _ in range(3)]
            assert [event.type for event in first] == ["response.created", "response.queued", "response.in_progress"]
            await stream.close()
            name = first[0].response.id
            assert (await client.responses.retrieve(name)).status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="cannot be continued"):
                await client.responses.create(model="m", input="x", previous_response_id=name)
            await until(lambda: len(decode.bodies) == len(prefill.bodies) == 2)
            for body in (*decode.bodies, *prefill.bodies):
                assert body["stream"] is True and body["background"] is False
            reader = await client.responses.retrieve(name, stream=True, starting_after=1)
            assert (await anext(reader)).type == "response.in_progress"
            answer.gate.set()
            again = [event async for event in reader]
            assert [event.sequence_number for event in again] == [3, 4]
            assert again[-1].response.output_text == "fine" and again[-1].response.id == name
            found = await seen_until(
                lambda: client.responses.retrieve(made.id), lambda one: one.status not in ("queued", "in_progress")
            )
            assert (found.status, found.id, found.output_text) == ("completed", made.id, "fine")
            more = await client.responses.create(model="m", input="three", previous_response_id=name)
            assert [item["role"] for item in decode.bodies[-1]["pdserve_history"]] == ["user", "assistant"]
            assert more.status == "completed"
            every = [event async for event in await client.responses.retrieve(name, stream=True)]
            assert every[:3] == first and every[3:] == again

    run_world(scenario)


@pytest.mark.parametrize("by", ["cancel", "delete"])
def test_a_cancelled_response_ends_at_both_workers(run_world: RunWorld, by: str) -> None:
    async def scenario(world: Any) -> None:
        answer = Worker()
        prefill, decode = await world.worker("p", answer), await world.worker("d", answer)
        async with world.router([prefill], [decode]) as url, client_of(url) as client:
            stream = await client.responses.create(model="m", input="one", background=True, stream=True)
            name = (await anext(stream)).response.id
            async for event in stream:
                if event.type == "response.in_progress":
                    break
            await (client.responses.cancel if by == "cancel" else client.responses.delete)(name)
            last = [event async for event in stream][-1]
            assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
            await until(lambda: prefill.num_cancelled == decode.num_cancelled == 1)
            if by == "cancel":
                assert (await client.responses.retrieve(name)).status == "cancelled"
                assert (await client.responses.cancel(name)).status == "cancelled"
            else:
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(name)

    run_world(scenario)


def test_a_dead_pair_is_replaced_and_a_refusal_fails_the_response(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        answer = Worker()
        answer.gate.set()
        wrong = refuse(400, "wrong")
        dying, good = await world.worker("w1", cut, wrong), await world.worker("w2", answer, wrong)
        async with world.router([], [dying, good], policy="round_robin") as url, client_of(url) as client:

            async def ended(text: str) -> Any:
                made = await client.responses.create(model="m", input=text, background=True)
                return await seen_until(
                    lambda: client.responses.retrieve(made.id), lambda one: one.status not in ("queued", "in_progress")
                )

            assert (await ended("one")).status == "completed" and len(dying.bodies) == 1
            found = await ended("two")
            assert (found.status, found.error.code) == (
                "failed",
                "invalid_prompt",
            ) and "says 400" in found.error.message
            for worker in (dying, good):
                await worker.stop()
            found = await ended("three")
            assert (found.status, found.error.code) == ("failed", "server_error")

    run_world(scenario)


def test_a_response_without_readers_begins_anew_when_its_worker_dies(run_world: RunWorld) -> None:
    async def dies(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        item = response_of({"input": "lost"})["output"][0]
        await response.write(event_of("response.output_item.done", 2, output_index=0, item=item))
        await response.write(b"event: response.output_text.delta")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def scenario(world: Any) -> None:
        answer = Worker()
        answer.gate.set()
        workers = [await world.worker("w1", dies, answer), await world.worker("w2", dies, answer)]
        access = RouterAccessConfig(max_concurrent_requests_per_client=1)
        async with world.router([], workers, policy="round_robin", access=access) as url, client_of(url) as client:
            made = await client.responses.create(model="m", input="one", background=True)
            found = await seen_until(
                lambda: client.responses.retrieve(made.id), lambda one: one.status not in ("queued", "in_progress")
            )
            assert (found.status, found.output_text, len(found.output)) == ("completed", "fine", 1)
            assert sum(len(worker.bodies) for worker in workers) == 3
            answer.gate.clear()
            made = await client.responses.create(model="m", input="two", background=True)
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(model="m", input="three")
            await client.responses.cancel(made.id)
            await settle()
            assert (await client.responses.create(model="m", input="three")).status == "completed"

    run_world(scenario)


def test_a_broken_stream_fails_the_response(run_world: RunWorld) -> None:
    async def broken(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(event_of("response.created", 0, response=response_of(body)))
        if body["input"] == "error":
            await response.write(b'data: {"error": {"message": "no engine", "code": "x"}, "code": 503}\n\n')
        elif body["input"] == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def scenario(world: Any) -> None:
        worker = await world.worker("w", broken)
        async with world.router([], [worker]) as url, client_of(url) as client:
            for text, message in (("error", "no engine"), ("end", "before its last event"), ("cut", "ended early")):
                stream = await client.responses.create(model="m", input=text, background=True, stream=True)
                last = [event async for event in stream][-1]
                assert last.type == "response.failed" and message in last.response.error.message
                assert (await client.responses.retrieve(last.response.id)).status == "failed"

    run_world(scenario)


def test_what_runs_is_bounded_and_ends_with_the_router(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", Worker())
        limits = ResponseStoreConfig(max_background_responses=1, response_store_mb=1)
        async with world.router([], [worker], responses=limits) as url:

            async def post(**fields: Any) -> tuple[int, Any]:
                async with world.session.post(url + PATH, json={"input": "x", "background": True, **fields}) as answer:
                    return answer.status, await answer.json()

            assert (await post(store=False))[1]["error"]["param"] == "background"
            status, made = await post(stream=None)
            assert status == 200
            status, error = await post()
            assert (status, error["error"]["code"]) == (503, "background_full")
            router = world.app[ROUTER]
            drained = asyncio.create_task(router.drain(60.0, hurry := asyncio.Event()))
            await until(lambda: worker.bodies)
            hurry.set()
            await drained
            async with world.session.get(f"{url}{PATH}/{made['id']}") as answer:
                found = await answer.json()
            assert found["status"] == "failed" and "shutting down" in found["error"]["message"]
        async with world.router([], [worker], responses=ResponseStoreConfig(max_background_responses=0)) as url:
            async with world.session.post(url + PATH, json={"input": "x", "background": True}) as answer:
                assert answer.status == 400 and "--max-background-responses 0" in await answer.text()

    run_world(scenario)


def test_events_that_fill_the_store_are_dropped_and_the_response_stays(run_world: RunWorld) -> None:
    gate = asyncio.Event()

    async def long(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        made = response_of(body)
        response = await begin_stream(request)
        await gate.wait()
        for number in range(40):
            await response.write(event_of("response.output_text.delta", number, delta="x" * 40_000))
        await response.write(event_of("response.completed", 40, response=made))
        return response

    async def scenario(world: Any) -> None:
        worker = await world.worker("w", long)
        async with world.router([], [worker], responses=ResponseStoreConfig(response_store_mb=1)) as url:
            async with client_of(url) as client:
                stream = await client.responses.create(model="m", input="a", background=True, stream=True)
                name = (await anext(stream)).response.id
                gate.set()
                with pytest.raises(openai.APIError, match="no longer kept"):
                    [event async for event in stream]
                found = await seen_until(
                    lambda: client.responses.retrieve(name), lambda one: one.status != "in_progress"
                )
                assert (found.status, found.output_text) == ("completed", "fine")
                assert world.app[ROUTER]._responses.store.num_bytes < 1 << 20

    run_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_is_nested_too_deeply_or_too_large_holds_nothing(run_world: RunWorld, stream: bool) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", Worker())
        limits = ResponseStoreConfig(response_store_mb=1)
        access = RouterAccessConfig(max_concurrent_requests_per_client=1)
        async with world.router([], [worker], responses=limits, access=access) as url:
            head = b'{"input": "x", "background": true, "stream": ' + (b"true" if stream else b"false")
            for more, status, text in (
                (b'"metadata": {"a": ' + b"[" * 300 + b"]" * 300 + b"}", 400, "nested too deeply"),
                (b'"instructions": "' + b"x" * (1 << 20) + b'"', 503, "fill --response-store-mb"),
            ):
                async with world.session.post(
                    url + PATH, data=head + b", " + more + b"}", headers={"Content-Type": "application/json"}
                ) as answer:
                    assert answer.status == status and text in await answer.text()
            router = world.app[ROUTER]
            assert len(router._responses.background) == 0 and await router._drain.empty(0.0)
            async with world.session.post(url + PATH, json={"input": "x", "background": True}) as answer:
                assert answer.status == 200, "no place of its client is taken"

    run_world(scenario)


def test_bytes_behind_the_end_are_not_kept() -> None:
    running = RunningResponse("", b"[]", {"input": "x"})
    running.fail("no")
    before = running.num_bytes
    running.feed(b"x" * 1000)
    assert running.num_bytes == before


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_end_anywhere_and_other_data_is_passed_over(size: int) -> None:
    running = RunningResponse("", b"[]", {"input": "x", "stream": True})
    made = response_of({"input": "x"})
    data = b"data: [DONE]\n\ndata: 5\n\nevent: x\n\n: comment\n\n" + event_of("response.completed", 9, response=made)
    for start in range(0, len(data), size):
        running.feed(data[start : start + size])
    assert running.ended and running.response["status"] == "completed" and running.events is not None
    assert len(running.events) == 3, "queued twice, and the end"
    running.fail("late")
    running.cancel()
    running.feed(data)
    assert running.response["status"] == "completed" and len(running.events) == 3
