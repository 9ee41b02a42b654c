"""`/generate` over a scripted scheduler, and what a PD worker makes of its bootstrap fields."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.protocol.messages import FinishReason, RoomAddress
from pdserve.server.http import json_http as streaming
from pdserve.server.sglang_api import generate as native
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench, sse
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]
TEXT = "héllo 👩‍👧 世"


async def test_single_and_stream_of_cumulative_text(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids(TEXT)
        body: dict[str, Any] = {"text": "hi", "rid": "mine", "model": None, "sampling_params": {"temperature": 0}}
        whole = (await b.http.post("/generate", json=body)).json()
        assert whole["text"] == TEXT
        assert whole["output_ids"] == [*ids(TEXT), 0]
        meta = whole["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "stop", "matched": 0}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(ids(TEXT)) + 1, 3)
        assert meta["timing"]["kv_pages"] == 2
        assert "output_token_logprobs" not in meta
        assert b.scheduler.requests[0].sampling.max_new_tokens == 126

        answer = await b.http.post("/generate", json={**body, "stream": True})
        events = sse(answer.text)
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["text"] for event in events[:-1]]
        assert texts[-1] == TEXT
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert "\ufffd" not in answer.text


async def test_a_stream_of_what_is_new_makes_the_whole_answer(
    tokenizer: Tokenizer, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[dict[str, Any]] = []

    def event(content: dict[str, Any]) -> bytes:
        parts.append(content)
        return streaming.event(content)

    monkeypatch.setattr(native, "event", event)
    async with bench(tokenizer, incremental_streaming_output=True) as b:
        b.scheduler.script = lambda request: ids(TEXT)
        body = {"text": "hi", "return_logprob": True, "sampling_params": {"temperature": 0}}
        whole = (await b.http.post("/generate", json=body)).json()
        assert whole["text"] == TEXT and not parts, "an answer that is no stream is whole"
        b.scheduler.hold = True
        pending = asyncio.create_task(b.http.post("/generate", json={**body, "stream": True}))
        await until(lambda: len(parts) > 0)
        b.scheduler.finish(b.scheduler.requests[-1])
        sent = sse((await pending).text)
    assert sent[-1] == "[DONE]" and list(map(json.loads, sent[:-1])) == parts
    metas = [part["meta_info"] for part in parts]
    assert len(parts) > 1 and "".join(part["text"] for part in parts) == TEXT
    assert list(itertools.chain(*(part["output_ids"] for part in parts))) == whole["output_ids"]
    logprobs = [meta["output_token_logprobs"] for meta in metas]
    assert list(itertools.chain(*logprobs)) == whole["meta_info"]["output_token_logprobs"]
    counts = itertools.accumulate(len(part["output_ids"]) for part in parts)
    assert [meta["completion_tokens"] for meta in metas] == list(counts)
    assert [meta["finish_reason"] is None for meta in metas] == [True] * (len(parts) - 1) + [False]


async def test_batches_keep_their_order_and_may_differ_in_sampling(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: request.input_ids
        body = {
            "input_ids": [[5, 6], [7, 8]],
            "rid": ["a", "b"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        }
        answer = (await b.http.post("/generate", json=body)).json()
        assert [entry["output_ids"] for entry in answer] == [[5], [7, 8]]
        assert [entry["meta_info"]["id"] for entry in answer] == ["a", "b"]
        assert answer[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        one = (await b.http.post("/generate", json={"text": ["hi"]})).json()
        assert isinstance(one, list)
        both = (await b.http.post("/generate", json={"text": "hi", "sampling_params": {"n": 2}})).json()
        assert len(both) == 2
        events = sse((await b.http.post("/generate", json={**body, "stream": True})).text)
        last = {part["index"]: part["output_ids"] for part in map(json.loads, events[:-1])}
        assert last == {0: [5], 1: [7, 8]}


async def test_logprobs_are_triples_and_the_input_list_is_empty(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: [73]
        body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
        meta = (await b.http.post("/generate", json=body)).json()["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs"] == [[-0.25, 73, None], [-0.25, 0, None]]
        assert meta["output_top_logprobs"][0] == [[-0.5, 2, None], [-0.5, 3, None]]
        body = {**body, "return_text_in_logprobs": True, "top_logprobs_num": 0}
        meta = (await b.http.post("/generate", json=body)).json()["meta_info"]
        assert meta["output_token_logprobs"][0] == [-0.25, 73, tokenizer.token_text(73)]
        assert "output_top_logprobs" not in meta


async def test_a_tokenizerless_server_takes_token_ids_only() -> None:
    async with bench(None) as b:
        answer = (await b.http.post("/generate", json={"input_ids": [5]})).json()
        assert (answer["text"], answer["output_ids"]) == ("", [73, 74, 0])


async def test_abort_by_rid_ends_the_stream_as_aborted(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        call = b.http.post("/generate", json={"text": "hi", "rid": "r1"})
        pending = asyncio.create_task(call)
        await until(lambda: b.client.num_live == 1)
        again = await b.http.post("/generate", json={"text": "hi", "rid": "r1"})
        assert (again.status_code, again.json()["param"]) == (400, "rid")
        assert (await b.http.post("/abort_request", json={"rid": "nobody"})).json() == {"num_aborted": 0}
        assert (await b.http.post("/abort_request", json={"rid": "r1"})).json() == {"num_aborted": 1}
        answer = (await pending).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        b.scheduler.hold = False
        assert (await b.http.post("/generate", json={"text": "hi", "rid": "r1"})).status_code == 200


async def test_an_aborted_stream_keeps_its_text_and_says_abort(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        body = {"prompt": "hi", "rid": "r1", "stream": True}
        pending = asyncio.create_task(b.http.post("/v1/completions", json=body))
        await until(lambda: b.client.num_live == 1)
        await b.http.post("/abort_request", json={"rid": "r1"})
        answer = await pending
        *chunks, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert (answer.status_code, done) == (200, "[DONE]")
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "abort"


PD = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998}


async def rooms(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> list[RoomAddress | None]:
    async with bench(tokenizer, "decode") as b:
        answer = await b.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return [request.room for request in b.scheduler.requests]


def at(*numbers: int) -> list[RoomAddress | None]:
    return [RoomAddress(host="10.0.0.1", port=8998, room=number) for number in numbers]


async def test_rooms_of_the_three_endpoints(tokenizer: Tokenizer) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], **PD}
    listed = {"bootstrap_host": ["10.0.0.1"] * 2, "bootstrap_port": [8998] * 2, "bootstrap_room": [7, 3]}
    assert await rooms(tokenizer, "/generate", {"text": "x", **PD, "bootstrap_room": 7}) == at(7)
    assert await rooms(tokenizer, "/generate", {"input_ids": [[5], [6]], **listed}) == at(7, 3)
    n2: dict[str, Any] = {"text": "x", "sampling_params": {"n": 2}, **PD, "bootstrap_room": 7}
    assert await rooms(tokenizer, "/generate", n2) == at(7, 8)
    assert await rooms(tokenizer, "/v1/completions", {"prompt": "x", "n": 2, **PD, "bootstrap_room": 7}) == at(7, 8)
    assert await rooms(tokenizer, "/v1/completions", {"prompt": ["x", "y"], **listed}) == at(7, 3)
    assert await rooms(tokenizer, "/v1/completions", {"prompt": ["x"], **PD, "bootstrap_room": [9]}) == at(9)
    assert await rooms(tokenizer, "/v1/chat/completions", {**chat, "bootstrap_room": (1 << 63) - 1}) == at(
        (1 << 63) - 1
    )
    assert await rooms(tokenizer, "/v1/chat/completions", {**chat, "n": 2, **listed}) == at(7, 3)
    spelled = {"text": "x", **PD, "bootstrap_host": "0x0A.1", "bootstrap_room": 7}
    assert await rooms(tokenizer, "/generate", spelled) == at(7), "a host has one spelling"


async def test_a_request_without_a_port_goes_to_the_port_of_decode_s_flag(tokenizer: Tokenizer) -> None:
    host = {"bootstrap_host": "10.0.0.1"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "x", **host, "bootstrap_port": None, "bootstrap_room": 7}),
        ("/v1/completions", {"prompt": "x", **host, "bootstrap_room": 7}),
        ("/health_pair", {**host, "bootstrap_room": 7}),
        ("/generate", {"text": "x", **host, "bootstrap_port": 8998, "bootstrap_room": 7}),
    ]
    async with bench(tokenizer, "decode", bootstrap_port=9001, allowed_prefill="10.0.0.1:9001,10.0.0.1:8998") as b:
        for path, body in bodies:
            assert (await b.http.post(path, json=body)).status_code == 200
        assert [request.room for request in b.scheduler.requests] == [
            *[RoomAddress(host="10.0.0.1", port=9001, room=7)] * 3, *at(7),
        ]  # fmt: skip
        b.scheduler.requests.clear()
        batch = {"input_ids": [[5], [6]], "bootstrap_host": ["10.0.0.1"] * 2, "bootstrap_port": [None, 8998]}
        assert (await b.http.post("/generate", json={**batch, "bootstrap_room": [7, 8]})).status_code == 200
        assert [request.room and request.room.port for request in b.scheduler.requests] == [9001, 8998]
    async with bench(tokenizer, "decode", bootstrap_port=9001, allowed_prefill="10.0.0.1:8998") as b:
        refused = await b.http.post("/generate", json=bodies[0][1])
        assert refused.status_code == 400 and "10.0.0.1:9001 is not listed" in refused.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "bootstrap_room"),
        ({**PD}, "bootstrap_room"),
        ({**PD, "bootstrap_room": -1}, "bootstrap_room"),
        ({**PD, "bootstrap_room": 1.5}, "bootstrap_room"),
        ({**PD, "bootstrap_room": "7"}, "bootstrap_room"),
        ({**PD, "bootstrap_room": True}, "bootstrap_room"),
        ({**PD, "bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({**PD, "bootstrap_room": [1, 2, 3]}, "bootstrap_room"),
        ({**PD, "bootstrap_room": [1, 1]}, "bootstrap_room"),
        ({**PD, "bootstrap_room": []}, "bootstrap_room"),
        ({"bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": 5, "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": ["a", "b", "c"], "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "2.2.2.2", "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": ["a", "2.2.2.2"], "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "2.2.2.2.", "bootstrap_port": 1, "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "0x2.2.514", "bootstrap_port": 1, "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "a b", "bootstrap_port": 1, "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "u@a/x?y#z", "bootstrap_port": 1, "bootstrap_room": 7}, "bootstrap_host"),
        ({"bootstrap_host": "a", "bootstrap_port": 70000, "bootstrap_room": 7}, "bootstrap_port"),
        ({"bootstrap_host": "a", "bootstrap_port": "x", "bootstrap_room": 7}, "bootstrap_port"),
    ],
)
async def test_bad_bootstrap_fields_are_named(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    async with bench(tokenizer, "decode") as b:
        for path, body in (("/generate", {"text": ["x", "y"]}), ("/v1/completions", {"prompt": ["x", "y"]})):
            answer = await b.http.post(path, json={**body, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert param in answer.json()["message"]
        assert b.scheduler.requests == []


async def test_a_client_may_name_the_fake_host_where_nothing_is_transferred(tokenizer: Tokenizer) -> None:
    body = {"input_ids": [5, 6], "bootstrap_host": "2.2.2.2", "bootstrap_room": 7}
    async with bench(tokenizer, "decode", backend="fake") as b:
        assert (await b.http.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_only_prefill_servers_on_the_list_may_be_named(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer, "decode", allowed_prefill="10.0.0.0/24:8998, prefill.svc") as b:
        for host, port in (("10.0.1.1", 8998), ("10.0.0.1", 22), ("10.0.0.1", None), ("2.2.2.2", 8998), ("evil", 8998)):
            fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 7}
            answer = await b.http.post(path, json=body | fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "bootstrap_host"
        assert b.scheduler.requests == []
        answer = await b.http.post(path, json={**body, **PD, "bootstrap_room": 7})
        assert answer.status_code == 200


async def test_a_monolith_ignores_bootstrap_fields(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", json={"text": "x", **PD, "bootstrap_room": "junk"})
        assert answer.status_code == 200
        assert b.scheduler.requests[0].room is None


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_prefill_answers_plain_json_and_leaves_stop_strings_to_decode(tokenizer: Tokenizer, path: str) -> None:
    async with bench(tokenizer, "prefill") as b:
        b.scheduler.script = lambda request: [73]
        text = tokenizer.token_text(73)
        body: dict[str, Any] = {"stream": True, "bootstrap_room": 7, **PD}
        if path == "/generate":
            body |= {"text": "x", "sampling_params": {"stop": text, "max_new_tokens": 1}}
        elif path == "/v1/completions":
            body |= {"prompt": "x", "stop": text, "max_tokens": 1}
        else:
            body |= {"messages": [{"role": "user", "content": "x"}], "stop": text, "max_tokens": 1}
        answer = await b.http.post(path, json=body)
        assert answer.headers["content-type"] == "application/json"
        assert text in answer.text
        assert b.scheduler.aborts == []


async def test_a_live_room_is_409(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode") as b:
        b.scheduler.script = lambda request: FinishReason(
            type="abort", message="room 7 is live", status_code=409, err_type="room_in_use"
        )
        body = {"text": "x", **PD, "bootstrap_room": 7}
        answer = await b.http.post("/generate", json=body)
        assert (answer.status_code, answer.json()["param"]) == (409, "bootstrap_room")
