"""Prompt log probabilities come from prefill and reach the client in decode's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.proxy.attempts import merges_prefill
from pdserve.router.proxy.merge import event_merger, merged_body, prefill_metas

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
GENERATE = "/generate"
PROMPT = [[None, 1, None], [-0.5, 2, None]]
PREFILL_META = {"input_token_logprobs": PROMPT, "input_top_logprobs": [None, [[-0.5, 2, None]]], "id": "p"}
DECODE_META = {"input_token_logprobs": [], "input_top_logprobs": [], "output_token_logprobs": [[-1.0, 3, None]]}
MERGED_META = DECODE_META | {name: PREFILL_META[name] for name in ("input_token_logprobs", "input_top_logprobs")}
ASK = {"text": "a", "return_logprob": True, "logprob_start_len": 0}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (GENERATE, ASK, True),
        (GENERATE, ASK | {"return_logprob": [False, True], "logprob_start_len": [0, 0]}, True),
        (GENERATE, ASK | {"logprob_start_len": -1}, False),
        (GENERATE, {"text": "a", "return_logprob": True}, False),
        (GENERATE, ASK | {"return_logprob": False}, False),
        ("/v1/completions", ASK, False),
        (GENERATE, {"text": "a", "return_hidden_states": True}, True),
        (GENERATE, {"text": ["a", "b"], "return_hidden_states": [False, True]}, True),
        (GENERATE, {"text": "a", "return_hidden_states": False}, False),
    ],
)
def test_only_requests_with_prompt_logprobs_wait_for_prefill(path: str, body: dict[str, Any], expected: bool) -> None:
    assert merges_prefill(path, body) is expected


def test_bodies_are_merged_single_and_batch_and_left_alone_otherwise() -> None:
    single = orjson.dumps({"text": "x", "meta_info": DECODE_META})
    metas = prefill_metas(orjson.dumps({"text": "", "meta_info": PREFILL_META}))
    assert orjson.loads(merged_body(single, metas)) == {"text": "x", "meta_info": MERGED_META}
    batch = orjson.dumps([{"meta_info": DECODE_META}] * 2)
    both = prefill_metas(orjson.dumps([{"meta_info": PREFILL_META}, {"meta_info": {"id": "none"}}]))
    assert orjson.loads(merged_body(batch, both)) == [{"meta_info": MERGED_META}, {"meta_info": DECODE_META}]
    full = orjson.dumps({"meta_info": DECODE_META | {"input_token_logprobs": PROMPT, "input_top_logprobs": None}})
    for body in (full, b"not json", b"[1, null]", b'{"meta_info": 7}'):
        assert merged_body(body, metas) == body, "it has its own, or is not what was expected"
    assert prefill_metas(b"nonsense") == []


def test_the_prompts_hidden_states_come_first() -> None:
    metas = prefill_metas(orjson.dumps({"meta_info": {"hidden_states": [[[1.0], [2.0]]]}}))
    for own, merged in (
        ([[], [3.0]], [[[1.0], [2.0]], [3.0]]),
        ([[[5.0]], [3.0]], [[[5.0]], [3.0]]),
        ([], []),
        (None, None),
    ):
        body = orjson.dumps({"meta_info": {"hidden_states": own}})
        assert orjson.loads(merged_body(body, metas)) == {"meta_info": {"hidden_states": merged}}


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), max_size=12), indexed=st.booleans())
def test_a_stream_is_merged_however_it_is_cut(cuts: list[int], indexed: bool) -> None:
    extra = {"index": 0} if indexed else {}
    events = [b"data: " + orjson.dumps({"text": str(i), "meta_info": DECODE_META} | extra) for i in range(3)]
    whole = b"\n\n".join([b": comment", *events, b"data: [DONE]", b""]) + b"tail"
    merge, out, at = event_merger([PREFILL_META]), b"", 0
    for cut in [*cuts, len(whole)]:
        out += merge(whole[at : at + cut], False)
        at += cut
    out += merge(b"", True)
    comment, *merged, done, tail = out.split(b"\n\n")
    assert (comment, done, tail) == (b": comment", b"data: [DONE]", b"tail")
    assert [orjson.loads(event[6:])["meta_info"] for event in merged] == [MERGED_META] * 3


@pytest.mark.parametrize("prefill_streams", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_sees_one_answer(run_world: RunWorld, stream: bool, prefill_streams: bool) -> None:
    async def answer(request: web.Request, meta: dict[str, Any], as_stream: bool) -> web.StreamResponse:
        body = {"text": "x", "meta_info": meta}
        if not as_stream:
            response = web.json_response(body)
            if "Accept-Encoding" in request.headers:
                response.enable_compression(web.ContentCoding.gzip)
            return response
        live = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await live.prepare(request)
        for _ in range(2):
            await live.write(b"data: " + orjson.dumps(body) + b"\n\n")
        await live.write(b"data: [DONE]\n\n")
        return live

    async def prefills(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, PREFILL_META, stream and prefill_streams)

    async def decodes(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, DECODE_META, stream)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", prefills), await world.worker("d", decodes)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json=ASK | {"stream": stream}) as response:
                assert response.status == 200
                text = await response.text()
            if not stream:
                assert orjson.loads(text)["meta_info"] == MERGED_META
            else:
                first, second, done, end = text.split("\n\n")
                assert (done, end) == ("data: [DONE]", "")
                assert [orjson.loads(event[6:])["meta_info"] for event in (first, second)] == [MERGED_META] * 2
            async with world.session.post(url + GENERATE, json=ASK | {"logprob_start_len": -1}) as response:
                assert orjson.dumps(PROMPT) not in await response.read(), "nobody asked for them"

    run_world(scenario)


def test_a_prefill_that_fails_after_decode_began_is_tried_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        begun = asyncio.Event()

        async def late(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await begun.wait()
            return web.json_response({"error": {}}, status=503)

        async def good(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"meta_info": PREFILL_META})

        async def decodes(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            live = web.StreamResponse(headers={"Content-Type": "application/json"})
            await live.prepare(request)
            await live.write(b" ")
            begun.set()
            await live.write(orjson.dumps({"meta_info": DECODE_META}))
            return live

        prefill, decode = await world.worker("p", late, good), await world.worker("d", decodes)
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json=ASK) as response:
                assert response.status == 200
                assert (await response.json())["meta_info"] == MERGED_META
            assert await world.loads(url) == [0, 0]

    run_world(scenario)
