"""A decode server with `--disaggregation-prefill` sends the prefill half of requests without a room itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from pdserve.base.proof import PROOF_HEADER, body_digest
from pdserve.config.access_group import AccessConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.http.session_proof import CHALLENGE_PATH, SessionVerifier, worker_key
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

Answer = Callable[[web.Request], Any]
TOKEN = "a-token-that-is-long-enough"
PROMPT: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}


class FakePrefill:
    """A prefill server that notes the halves it got, and answers them by `answer`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_gone = 0
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: web.json_response({})
        self.mode = "prefill"
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, *middlewares: Any) -> FakePrefill:
        app = web.Application(middlewares=middlewares)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/health", self._info)
        app.router.add_post("/{path:.*}", self._half)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": 8998})

    async def _half(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        try:
            found = self.answer(self.bodies[-1])
            response: web.StreamResponse = await found if asyncio.iscoroutine(found) else found
            return response
        except asyncio.CancelledError:
            self.num_gone += 1
            raise


async def forever(_: dict[str, Any]) -> web.Response:
    await asyncio.sleep(1000)
    raise AssertionError


def refuse(status: int, code: str, **headers: str) -> Callable[[dict[str, Any]], web.Response]:
    """Answer an error as servers do."""
    return lambda _: web.json_response(
        {"error": {"message": f"told {code}", "code": code, "param": None}}, status=status, headers=headers
    )


@contextlib.asynccontextmanager
async def world(
    count: int = 1, *, start: bool = True, **options: Any
) -> AsyncIterator[tuple[Bench, list[FakePrefill]]]:
    """A decode server, and the prefill servers that it names."""
    prefills = [await FakePrefill().start() for _ in range(count)]
    pairing = PairingConfig(disaggregation_prefill=",".join(one.url for one in prefills), **options.pop("pairing", {}))
    try:
        async with bench(None, "decode", pairing=pairing, **options) as decode:
            yield decode, prefills
    finally:
        for one in prefills:
            await one.stop()


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", PROMPT),
        ("/generate", {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 2, "n": 2}}),
        ("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "n": 2}),
    ],
)
def test_both_halves_have_the_same_room_and_the_answer_is_decode_s(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            answer = await decode.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            (half,) = prefill.bodies
            rooms = [request.room for request in decode.scheduler.requests]
            assert rooms[0] is not None and half["bootstrap_room"] == rooms[0].room
            assert [room and room.room - rooms[0].room for room in rooms] == list(range(len(rooms)))
            assert (rooms[0].host, rooms[0].port) == ("127.0.0.1", 8998)
            assert {name: half[name] for name in body} == body
            info = (await decode.http.get("/get_server_info")).json()["prefill_servers"]
            assert info[0]["url"] == prefill.url and info[0]["results"] == {"ok": 1}
            text = (await decode.http.get("/metrics")).text
            assert f'prefill="{prefill.url}",result="ok"}} 1.0' in text and "pdserve:prefill_server_up" in text

    run(test)


def test_a_request_with_a_room_passes_through() -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            given = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 77}
            answer = await decode.http.post("/generate", json=PROMPT | given)
            assert answer.status_code == 200 and not prefill.bodies
            assert decode.scheduler.requests[0].room is not None and decode.scheduler.requests[0].room.room == 77

    run(test)


def test_a_stream_and_prompt_logprobs_need_no_router() -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            body = PROMPT | {"stream": True, "return_logprob": True, "logprob_start_len": 0}
            answer = await decode.http.post("/generate", json=body)
            events = [line for line in answer.text.split("\n\n") if line]
            assert events[-1] == "data: [DONE]" and prefill.bodies[0]["pdserve_single_request"] is True
            meta = json.loads(events[-2].removeprefix("data: "))["meta_info"]
            assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
            params = decode.scheduler.requests[0].logprobs
            assert params is not None and params.to_decode

    run(test)


async def held(decode: Bench) -> None:
    """Wait until exactly one request is held, then end it."""
    scheduler = decode.scheduler
    await until(lambda: len(scheduler._held) == 1)
    scheduler.finish(next(iter(scheduler._held.values())))


def hold_without_token(decode: Bench) -> None:
    decode.scheduler.hold, decode.scheduler.script = True, lambda request: []


FULL = refuse(503, "queue_full", **{"Retry-After": "3"})
BROKEN = refuse(502, "transfer_failed")


@pytest.mark.parametrize("answer", [FULL, BROKEN], ids=["full", "broken"])
def test_another_server_is_tried_when_one_fails_or_is_full(answer: Answer) -> None:
    async def test() -> None:
        async with world(2, pairing={"disaggregation_prefill_choice": "round_robin"}) as (decode, (bad, good)):
            hold_without_token(decode)
            bad.answer, good.answer = answer, forever
            for _ in range(2):
                task = asyncio.create_task(decode.http.post("/generate", json=PROMPT | {"stream": True}))
                await until(lambda: bool(good.bodies))
                await held(decode)
                assert (await task).status_code == 200
                good.bodies.clear()
            rooms = {request.room.room for request in decode.scheduler.requests if request.room}
            assert len(rooms) == len(decode.scheduler.requests) == 2 + len(bad.bodies) and bad.bodies

    run(test)


def test_the_only_server_s_error_is_the_answer() -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            hold_without_token(decode)
            prefill.answer = FULL
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "3"
            assert "told queue_full" in answer.text and prefill.url in answer.text and len(prefill.bodies) == 1
            prefill.answer = refuse(401, "invalid_api_key")
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 502 and "answered 401" in answer.text
            await until(lambda: not decode.scheduler._held)

    run(test)


def test_the_error_names_each_server_that_was_tried() -> None:
    async def test() -> None:
        async with world(2, pairing={"disaggregation_prefill_choice": "round_robin"}) as (decode, prefills):
            hold_without_token(decode)
            for prefill in prefills:
                prefill.answer = BROKEN
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 502 and all(prefill.url in answer.text for prefill in prefills), answer.text

    run(test)


def test_a_prefill_server_that_is_gone_is_named() -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            assert (await decode.http.post("/generate", json=PROMPT)).status_code == 200
            hold_without_token(decode)
            await prefill.stop()
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code in (502, 503) and prefill.url in answer.text, answer.text
            await until(lambda: not decode.scheduler._held)
            again = await decode.http.post("/generate", json=PROMPT)
            assert again.status_code == 503 and again.json()["error"]["code"] == "no_prefill_server"

    run(test)


def test_a_request_that_ends_here_ends_the_prefill_half() -> None:
    async def test() -> None:
        async with world() as (decode, (prefill,)):
            hold_without_token(decode)
            prefill.answer = forever
            answer = await decode.http.post("/generate", json=PROMPT | {"rid": ""})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "rid"
            prefill.bodies.clear()
            for end in ("client", "transfer"):
                before = prefill.num_gone
                task = asyncio.create_task(decode.http.post("/generate", json=PROMPT))
                await until(lambda: bool(decode.scheduler._held and prefill.bodies))
                if end == "client":
                    task.cancel()
                else:
                    prefill.answer = BROKEN
                    failure = Failure(code="transfer_failed", message="no KV came")
                    decode.scheduler.refuse(next(iter(decode.scheduler._held.values())), FinishReason.failed(failure))
                    answer = await task
                    assert answer.status_code == 502 and "told transfer_failed" in answer.text
                await until(lambda before=before: prefill.num_gone > before)
                await until(lambda: not decode.scheduler._held)
                prefill.bodies.clear()

    run(test)


def test_a_server_of_another_role_is_not_used() -> None:
    async def test() -> None:
        prefill = await FakePrefill().start()
        prefill.mode = "decode"
        pairing = PairingConfig(disaggregation_prefill=prefill.url)
        async with bench(None, "decode", pairing=pairing) as decode:
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 503 and "disaggregation_mode is 'decode'" in answer.text
        await prefill.stop()

    run(test)


@pytest.mark.parametrize("key", ["given", "own"])
def test_the_key_of_the_prefill_servers_is_sent(key: str) -> None:
    async def test() -> None:
        pairing = {"disaggregation_prefill_api_key": "prefill-key"} if key == "given" else {}
        async with world(access=AccessConfig(api_key="own-key,other"), pairing=pairing) as (decode, (prefill,)):
            answer = await decode.http.post("/generate", json=PROMPT, headers={"Authorization": "Bearer other"})
            assert answer.status_code == 200
            expected = "Bearer prefill-key" if key == "given" else "Bearer own-key"
            assert {headers["Authorization"] for headers in prefill.headers} == {expected}

    run(test)


def test_a_missing_room_without_prefill_servers_names_both_ways() -> None:
    async def test() -> None:
        async with bench(None, "decode") as decode:
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "bootstrap_room"
            assert "router" in answer.text and "--disaggregation-prefill" in answer.text

    run(test)


def test_decode_computes_the_prompt_when_its_last_prefill_server_is_lost() -> None:
    async def test() -> None:
        prefill = await FakePrefill().start()
        pairing = PairingConfig(disaggregation_prefill=prefill.url)
        async with bench(None, "decode", pairing=pairing, load_failure_policy="recompute") as decode:
            hold_without_token(decode)
            prefill.answer = forever
            task = asyncio.create_task(decode.http.post("/generate", json=PROMPT))
            await until(lambda: bool(prefill.bodies and decode.scheduler._held))
            await prefill.stop()
            await until(lambda: decode.client.num_live == 1)
            await held(decode)
            assert (await task).status_code == 200 and len(decode.scheduler.requests) == 1

    run(test)


def test_a_control_token_is_proven_instead_of_a_key() -> None:
    async def test() -> None:
        verifier = SessionVerifier(worker_key(TOKEN))
        paths: list[str] = []

        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == CHALLENGE_PATH:
                nonce, proof = verifier.challenge(request.query["nonce"], 5.0)
                return web.json_response({"nonce": nonce, "proof": proof})
            digest = verifier.check(request.headers[PROOF_HEADER], request.method, request.raw_path, 5.0)
            assert body_digest(await request.read()) == digest and "Authorization" not in request.headers
            paths.append(request.path)
            response: web.StreamResponse = await handler(request)
            return response

        prefill = await FakePrefill().start(guarded)
        pairing = PairingConfig(disaggregation_prefill=prefill.url, disaggregation_prefill_api_key="not sent")
        access = AccessConfig(require_control_proof=False)
        async with bench(None, "decode", pairing=pairing, control_token=TOKEN, access=access) as decode:
            answer = await decode.http.post("/generate", json=PROMPT)
            assert answer.status_code == 200, answer.text
            assert {"/generate", "/get_server_info"} <= set(paths)
        await prefill.stop()

    run(test)
