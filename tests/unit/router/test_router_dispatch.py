"""Requests through a real router to fake workers: what each side gets, and how a pair fails as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from pdserve.protocol.failure import RUNNING_TIMEOUT
from pdserve.router.config.config import RouterConfig
from pdserve.router.proxy import dispatch
from pdserve.router.workers.outcome import WorkerStream, make_session
from tests.unit.router.answers import begin_stream, ok, silent
from tests.waiting import settle, until

Scenario = Callable[[Any], Coroutine[Any, Any, None]]
RunWorld = Callable[[Scenario], None]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def refuse(status: int, code: str | None = None, **headers: str) -> Any:
    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": f"{worker.name} says {status}", "code": code}
        return web.json_response({"error": error}, status=status, headers=headers)

    return answer


async def cut(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The process dies: the connection ends without an answer."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("never")


async def start_stream(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Extra": "kept"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"input_ids": [1, 2], "sampling_params": {"temperature": 0.1, "n": 2}}),
        (GENERATE, {"text": ["a", "b"], "unknown": {"kept": None}}),
        (COMPLETIONS, {"model": "m", "prompt": ["é\u2028"], "seed": 2**63}),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}),
    ],
)
def test_both_halves_get_the_clients_body_and_the_same_room(
    run_world: RunWorld, path: str, body: dict[str, Any]
) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            headers = {"Authorization": "Bearer k", "X-Trace": "7"}
            async with world.session.post(url + path, json=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers["X-Worker"] == "d"
                assert (await response.json())["from"] == "d"
        assert prefill.bodies == decode.bodies and prefill.paths == decode.paths == [path]
        sent = decode.bodies[0]
        assert {key: sent[key] for key in body} == body
        assert set(sent) - set(body) == {"bootstrap_host", "bootstrap_port", "bootstrap_room"}
        host, port = sent["bootstrap_host"], sent["bootstrap_port"]
        assert (host, port) in [("127.0.0.1", 7000), (["127.0.0.1"] * 2, [7000] * 2), (["127.0.0.1"], [7000])]
        for seen in (prefill.headers[0], decode.headers[0]):
            assert (seen["Authorization"], seen["X-Trace"]) == ("Bearer k", "7")

    run_world(scenario)


def test_a_stream_passes_through_chunk_by_chunk(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await start_stream(request, b"data: one\n\n")
            await gate.wait()
            await response.write(b"data: \xff\xfe half")
            await response.write(b" line\n\ndata: [DONE]\n\n")
            return response

        prefill, decode = await world.worker("p"), await world.worker("d", stream)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a", "stream": True}) as response:
                assert response.headers["X-Extra"] == "kept"
                assert await response.content.readany() == b"data: one\n\n"
                gate.set()
                assert await response.read() == b"data: \xff\xfe half line\n\ndata: [DONE]\n\n"

    run_world(scenario)


def test_a_compressed_answer_is_not_touched(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def packed(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.json_response({"text": "x" * 5000})
            response.enable_compression(web.ContentCoding.gzip)
            return response

        prefill, decode = await world.worker("p"), await world.worker("d", packed)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.headers["Content-Encoding"] == "gzip"
                assert (await response.json())["text"] == "x" * 5000

    run_world(scenario)


@pytest.mark.parametrize("status", [400, 404, 409, 429])
def test_a_4xx_of_either_half_is_answered_at_once_and_cancels_the_other(run_world: RunWorld, status: int) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = (
            await world.worker("p", refuse(status), silent),
            await world.worker("d", silent, refuse(status)),
        )
        async with world.router([prefill], [decode]) as url:
            for culprit, victim in ((prefill, decode), (decode, prefill)):
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    assert response.status == status
                    assert (await response.json())["error"]["message"] == f"{culprit.name} says {status}"
                await until(lambda victim=victim: victim.num_cancelled == 1)
        assert len(prefill.bodies) == len(decode.bodies) == 2

    run_world(scenario)


@pytest.mark.parametrize("status", [502, 503])
def test_an_overloaded_half_is_tried_again_with_a_new_room(run_world: RunWorld, status: int) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p", refuse(status), silent, ok)
        decode = await world.worker("d", silent, refuse(status), ok)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 200
            async with world.session.get(url + "/metrics") as response:
                assert "pdserve_router_retries_total 2.0" in await response.text()
        assert len({body["bootstrap_room"] for body in decode.bodies}) == 3
        assert prefill.bodies == decode.bodies
        await until(lambda: prefill.num_cancelled == decode.num_cancelled == 1)

    run_world(scenario)


def test_a_request_that_ran_for_too_long_is_not_tried_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        refusal = refuse(503, RUNNING_TIMEOUT, **{"Retry-After": "1"})
        prefill, decodes = await world.worker("p"), [await world.worker(name, refusal) for name in ("d0", "d1")]
        async with world.router([prefill], decodes) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == RUNNING_TIMEOUT
        assert sum(len(decode.bodies) for decode in decodes) == 1

    run_world(scenario)


def test_tries_end_and_the_workers_answer_is_passed_on(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", refuse(503))
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 503
                assert (await response.json())["error"]["message"] == "d says 503"
        assert len(decode.bodies) == 3

    run_world(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_full_worker_is_not_pestered_and_its_time_to_come_back_is_passed_on(
    run_world: RunWorld, full: str, stream: bool
) -> None:
    async def scenario(world: Any) -> None:
        no_room = refuse(503, **{"Retry-After": "9"})
        prefill = await world.worker("p", no_room if full == "prefill" else silent)
        decode = await world.worker("d", no_room if full == "decode" else silent)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a", "stream": stream}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "9")
                assert (await response.json())["error"]["message"] == f"{full[0]} says 503"
        assert len(prefill.bodies) == len(decode.bodies) == 1
        other = prefill if full == "decode" else decode
        await until(lambda: other.num_cancelled == 1)

    run_world(scenario)


def test_while_another_worker_has_room_nobody_is_told_to_come_back(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker("d0", refuse(503, **{"Retry-After": "9"})), await world.worker("d1")]
        async with world.router([prefill], decodes) as url:
            for _ in range(8):
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    assert response.status == 200
        assert len(decodes[1].bodies) == 8

    run_world(scenario)


def test_when_all_are_full_each_was_asked_once(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(f"d{i}", refuse(503, **{"Retry-After": "9"})) for i in range(2)]
        async with world.router([prefill], decodes, max_tries=5) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "9")
        assert [len(decode.bodies) for decode in decodes] == [1, 1]

    run_world(scenario)


def test_other_server_errors_are_not_tried_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent), await world.worker("d", refuse(500))
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 500
            await until(lambda: prefill.num_cancelled == 1)
        assert len(decode.bodies) == 1

    run_world(scenario)


def test_the_second_try_goes_to_another_worker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker("d0", refuse(503)), await world.worker("d1", refuse(503))]
        async with world.router([prefill], decodes, max_tries=2) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 503
        assert [len(decode.bodies) for decode in decodes] == [1, 1]

    run_world(scenario)


def test_prefills_broken_connection_cancels_decode_and_a_dead_pair_is_a_502(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", cut), await world.worker("d", silent)
        async with world.router([prefill], [decode], check_interval_s=60.0) as url:
            prefill.health_status = 503
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 502
                assert prefill.url in (await response.json())["error"]["message"]
            await until(lambda: decode.num_cancelled == 1)
        assert len(decode.bodies) == 1

    run_world(scenario)


def test_a_broken_connection_to_a_living_worker_is_tried_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent, ok), await world.worker("d", cut, ok)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 200
        await until(lambda: prefill.num_cancelled == 1)

    run_world(scenario)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_both_upstream_calls(run_world: RunWorld, begun: bool) -> None:
    async def scenario(world: Any) -> None:
        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await start_stream(request, b"data: one\n\n")
            return await silent(worker, request, body)

        prefill, decode = await world.worker("p", silent), await world.worker("d", stream if begun else silent)
        async with world.router([prefill], [decode]) as url:
            call = asyncio.create_task(world.session.post(url + GENERATE, json={"text": "a", "stream": True}))
            await until(lambda: bool(prefill.bodies and decode.bodies))
            if begun:
                (await call).close()
            else:
                call.cancel()
            await until(lambda: prefill.num_cancelled == decode.num_cancelled == 1)
            await world.until(lambda: world.loads(url), lambda seen: seen == [0, 0])

    run_world(scenario)


def test_decode_dying_in_a_stream_becomes_an_error_event(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def dies(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await start_stream(request, b"data: one\n\ndata: tw")
            return await cut(worker, request, body)

        prefill, decode = await world.worker("p"), await world.worker("d", dies)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a", "stream": True}) as response:
                assert response.status == 200
                events = (await response.text()).split("\n\n")
        assert events[:2] == ["data: one", "data: tw"]
        assert events[2].startswith('data: {"error":{') and "ended early" in events[2]
        assert events[3:] == [""]

    run_world(scenario)


def test_decode_dying_in_a_plain_answer_cuts_the_client_off(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def dies(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"{")
            return await cut(worker, request, body)

        prefill, decode = await world.worker("p"), await world.worker("d", dies)
        async with world.router([prefill], [decode]) as url:
            with pytest.raises(aiohttp.ClientPayloadError):
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    await response.read()

    run_world(scenario)


@pytest.mark.parametrize("begun", [False, True])
def test_one_deadline_bounds_the_whole_request(run_world: RunWorld, begun: bool) -> None:
    async def scenario(world: Any) -> None:
        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await start_stream(request, b"data: one\n\n")
            return await silent(worker, request, body)

        prefill, decode = await world.worker("p", silent), await world.worker("d", stream if begun else silent)
        async with world.router([prefill], [decode], request_timeout_s=0.3) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == (200 if begun else 504)
                assert "--request-timeout" in await response.text()
            await until(lambda: prefill.num_cancelled == decode.num_cancelled == 1)

    run_world(scenario)


def test_client_that_does_not_read_is_cut_off_at_the_deadline(run_world: RunWorld) -> None:
    async def flood(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", flood)
        async with world.router([prefill], [decode], request_timeout_s=0.5) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
            writer.write(f"POST {GENERATE} HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            await until(lambda: decode.num_cancelled == 1)
            sent = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    sent += piece
            writer.close()
        assert sent.startswith(b"HTTP/1.1 200") and b"error" not in sent and not sent.endswith(b"0\r\n\r\n")

    run_world(scenario)


@pytest.mark.asyncio
async def test_cookies_of_workers_are_not_kept() -> None:
    session = make_session(RouterConfig(pd=True))
    session.cookie_jar.update_cookies({"session": "of one client"}, URL("http://worker"))
    assert not session.cookie_jar.filter_cookies(URL("http://worker"))
    await session.close()


@pytest.mark.asyncio
async def test_a_try_that_is_cancelled_while_it_ends_closes_the_answer_it_has() -> None:
    class Answer:
        closed = False

        def close(self) -> None:
            self.closed = True

    may_end = asyncio.Event()

    async def slow_to_end() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    async def has(answer: Any) -> Any:
        return WorkerStream(worker=cast(Any, None), response=answer, headers=CIMultiDict(), first=b"")

    answer = Answer()
    prefill, decode = asyncio.create_task(slow_to_end()), asyncio.create_task(has(answer))
    await decode
    closing = asyncio.create_task(dispatch.close_halves(prefill, decode))
    await asyncio.sleep(0)
    closing.cancel()
    await settle()
    assert answer.closed and not prefill.done()
    may_end.set()
    await asyncio.gather(closing, prefill, return_exceptions=True)
    assert closing.cancelled()
