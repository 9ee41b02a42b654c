"""Extract, restore, suspend and resume over HTTP: answers of all endpoints go on where they stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pdserve.http.access import SNAPSHOT_TYPE
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.snapshot import RequestSnapshot, decode, encode
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

Ids = Callable[[str], list[int]]
TEXT = "hello world the quick"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "logprobs": True, "top_logprobs": 1}
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"text": "hi", "return_logprob": True, "sampling_params": {"max_new_tokens": 20, "stop": ["zz"]}}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 20, "logprobs": 1, "stop": ["zz"]}),
    ("/v1/chat/completions", CHAT),
)


@contextlib.asynccontextmanager
async def stopped(
    b: Bench, path: str, body: dict[str, Any], ids: Ids, num_tokens: int, **wish: Any
) -> AsyncIterator[tuple[httpx.Response, bytes]]:
    """Call `path`, and extract the request behind `num_tokens` tokens: the response of the call, and the snapshot."""
    tokens = ids(TEXT)
    b.scheduler.script = lambda request: tokens[:num_tokens]
    b.scheduler.hold = True
    call = asyncio.create_task(b.http.post(path, json={**body, "rid": "r"}))
    await until(lambda: bool(b.scheduler._held))
    await asyncio.sleep(0)
    snapshot = await b.http.post("/extract", json={"rid": "r", **wish})
    assert snapshot.status_code == 200, snapshot.text
    assert snapshot.headers["content-type"] == SNAPSHOT_TYPE
    b.scheduler.script, b.scheduler.hold = lambda request: tokens, False
    if not wish.get("keep"):
        yield await call, snapshot.content
    else:
        yield snapshot, snapshot.content
        call.cancel()


async def restore(b: Bench, data: bytes, query: str = "") -> httpx.Response:
    return await b.http.post(f"/restore{query}", content=data, headers={"Content-Type": SNAPSHOT_TYPE})


def same(answer: Any) -> Any:
    """An answer without ids and times."""
    if isinstance(answer, dict):
        gone = ("id", "created", "e2e_latency", "timing", "cached_tokens")
        return {name: same(value) for name, value in answer.items() if name not in gone}
    return [same(one) for one in answer] if isinstance(answer, list) else answer


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_a_whole_answer_is_that_of_a_request_that_never_stopped(
    path: str, body: dict[str, Any], num_tokens: int, tokenizer: Tokenizer, ids: Ids
) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids(TEXT)
        whole = (await b.http.post(path, json=body)).json()
        async with stopped(b, path, body, ids, num_tokens) as (first, data):
            assert first.status_code == 200 and "suspended" in first.text
            answer = await restore(b, data)
        assert answer.status_code == 200, answer.text
        assert same(answer.json()) == same(whole)
        last = b.scheduler.requests[-1]
        assert last.local and last.prior_output_ids == ids(TEXT)[:num_tokens]
        assert last.sampling.seed == b.scheduler.requests[-2].sampling.seed is not None


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
async def test_a_stream_goes_on_behind_its_last_event(
    path: str, body: dict[str, Any], tokenizer: Tokenizer, ids: Ids
) -> None:
    async with bench(tokenizer) as b:
        body = {**body, "stream": True}
        b.scheduler.script = lambda request: ids(TEXT)
        whole = events((await b.http.post(path, json=body)).text)
        async with stopped(b, path, body, ids, 3) as (stream, data):
            begun = events(stream.text)
            assert "suspended" in json.dumps(begun[-1])
            rest = events((await restore(b, data)).text)
        if path == "/generate":
            assert rest[-1]["text"] == whole[-1]["text"] and rest[-1]["output_ids"] == whole[-1]["output_ids"]
        else:
            assert {event["id"] for event in begun} == {event["id"] for event in rest}
            texts = ["".join(text_of(event) for event in some) for some in (whole, begun + rest)]
            assert texts[0] == texts[1] == TEXT
        if path == "/v1/completions":
            assert offsets_of(begun + rest) == offsets_of(whole)
        else:
            assert same(rest[-1]) == same(whole[-1])


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def offsets_of(found: list[dict[str, Any]]) -> list[int]:
    logprobs = [event["choices"][0]["logprobs"] for event in found]
    return [offset for one in logprobs if one is not None for offset in one["text_offset"]]


async def test_held_back_text_is_sent_once(tokenizer: Tokenizer, ids: Ids) -> None:
    """A possible stop string and half a character are not shown before the request goes on."""
    tokens = ids("a z") + ids("é")
    async with bench(tokenizer) as b:
        body = {"prompt": "hi", "max_tokens": 20, "stop": ["zz"], "stream": True, "rid": "r"}
        for count in range(len(tokens)):
            b.scheduler.script, b.scheduler.hold = lambda request, count=count: tokens[:count], True
            call = asyncio.create_task(b.http.post("/v1/completions", json=body))
            await until(lambda: bool(b.scheduler._held))
            data = (await b.http.post("/extract", json={"rid": "r"})).content
            begun = events((await call).text)
            b.scheduler.script, b.scheduler.hold = lambda request: tokens, False
            rest = events((await restore(b, data)).text)
            assert "".join(map(text_of, begun + rest)) == "a zé"


async def test_kept_requests_go_on_and_their_copies_too(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        async with stopped(b, *CALLS[0], ids, 2, keep=True) as (_, data):
            assert b.client.num_live == 1
            refused = await restore(b, data)
            assert refused.status_code == 400 and refused.json()["param"] == "rid"
            b.scheduler.finish(b.scheduler.requests[0])
            await until(lambda: b.client.num_live == 0)
            answer = (await restore(b, data)).json()
            assert answer["output_ids"][:-1] == ids(TEXT)


async def test_kv_bytes_come_before_their_request(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.kv = [b"abcdefgh", b"ABCDEF"]
        async with stopped(b, *CALLS[0], ids, 3, kv="bytes") as (_, data):
            pass
        snapshot, kv = decode(data)
        assert snapshot.kv is not None and snapshot.kv.num_tokens == 4 and bytes(kv) == b"abcdefghABCDEF"
        assert (await restore(b, data)).status_code == 200
        assert [(part.group, part.data) for part in b.scheduler.kv_parts] == [(0, b"abcdefgh"), (1, b"ABCDEF")]
        last = b.scheduler.requests[-1]
        assert {part.rid for part in b.scheduler.kv_parts} == {last.rid} and last.kv_tokens == 4

        other = changed(data, identity=msgspec.structs.replace(snapshot.identity, dtype="bfloat16"))
        answer = await restore(b, other)
        assert answer.status_code == 409 and answer.json()["param"] == "snapshot.identity.dtype"
        for query in ("?kv=prefer", "?kv=ignore"):
            assert (await restore(b, other, query)).status_code == 200
            assert b.scheduler.requests[-1].kv_tokens == 0
        assert len(b.scheduler.kv_parts) == 2


def changed(data: bytes, **fields: Any) -> bytes:
    snapshot, kv = decode(data)
    return encode(msgspec.structs.replace(snapshot, **fields), [kv] if snapshot.kv is not None else [])


HOSTILE: tuple[tuple[str, int, Callable[[RequestSnapshot], dict[str, Any]]], ...] = (
    ("snapshot.identity.model", 409, lambda s: {"identity": msgspec.structs.replace(s.identity, model="with YaRN")}),
    ("snapshot.identity.weights", 409, lambda s: {"identity": msgspec.structs.replace(s.identity, weights="other")}),
    ("snapshot.input_ids", 409, lambda s: {"input_ids": [5, 6, 7]}),
    ("snapshot.output_ids", 400, lambda s: {"output_ids": [319, 320, 5]}),
    ("snapshot.origin.path", 400, lambda s: {"origin": msgspec.structs.replace(s.origin, path="/flush_cache")}),
    ("snapshot.origin.body", 400, lambda s: {"origin": msgspec.structs.replace(s.origin, body=b"[]")}),
    ("snapshot.origin.body", 400, lambda s: {"origin": msgspec.structs.replace(s.origin, body=b"{")}),
    ("text", 400, lambda s: {"origin": msgspec.structs.replace(s.origin, body=b"{}")}),
    ("snapshot.logprobs", 400, lambda s: {"logprobs": None, "output_logprobs": []}),
    (
        "snapshot.sampling.max_new_tokens",
        400,
        lambda s: {"sampling": msgspec.structs.replace(s.sampling, max_new_tokens=1000)},
    ),
    ("snapshot.sampling.seed", 400, lambda s: {"sampling": msgspec.structs.replace(s.sampling, seed=-1)}),
    ("snapshot.sampling", 400, lambda s: {"sampling": msgspec.structs.replace(s.sampling, min_new_tokens=99)}),
    ("snapshot.lora", 409, lambda s: {"lora": "a"}),
    ("sampling_params.temperature", 400, lambda s: {"origin": None, "sampling": negative(s)}),
)


def negative(snapshot: RequestSnapshot) -> Any:
    return msgspec.structs.replace(snapshot.sampling, temperature=-1.0)


async def test_a_hostile_snapshot_is_refused_by_the_field(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        async with stopped(b, *CALLS[0], ids, 3) as (_, data):
            pass
        count = len(b.scheduler.requests)
        for field, status, change in HOSTILE:
            answer = await restore(b, changed(data, **change(decode(data)[0])))
            assert (answer.status_code, answer.json()["param"]) == (status, field), answer.text
        for bad, field in ((b"", "snapshot.length"), (b"x" * 100, "snapshot.magic"), (data[:-1], "snapshot.length")):
            answer = await restore(b, bad)
            assert (answer.status_code, answer.json()["param"]) == (400, field)
        assert len(b.scheduler.requests) == count and b.client.num_live == 0


async def test_other_requests_go_on_in_the_form_of_generate(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        body = {"input": "hi", "max_output_tokens": 20, "cache_salt": "a", "extra_key": "b"}
        async with stopped(b, "/v1/responses", body, ids, 3) as (_, data):
            assert decode(data)[0].origin is None
            answer = (await restore(b, data)).json()
        assert answer["output_ids"][:-1] == ids(TEXT) and answer["text"] == TEXT
        assert b.scheduler.requests[-1].cache_salt == "a\0b"


async def test_what_is_not_there_is_said(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer, snapshot_store_gb=0.0, snapshot_max_gb=1e-6) as b:
        for path, status in (("/extract", 404), ("/suspend", 404), ("/resume", 404)):
            assert (await b.http.post(path, json={"rid": "x"})).status_code == status
        assert (await restore(b, b"x" * 2000)).status_code == 413
        b.scheduler.hold = True
        call = asyncio.create_task(b.http.post("/generate", json={"text": ["a", "b"], "rid": "r"}))
        await until(lambda: len(b.scheduler._held) == 2)
        assert (await b.http.post("/extract", json={"rid": "r"})).status_code == 409
        full = await b.http.post("/suspend", json={"rid": "r_0"})
        assert full.status_code == 503 and full.json()["error"]["code"] == "snapshot_store_full"
        b.client.abort("r")
        await call
    async with bench(tokenizer, "prefill") as b:
        for path in ("/extract", "/suspend", "/resume", "/restore"):
            answer = await b.http.post(path, json={"rid": "x"})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize("in_files", [False, True])
async def test_a_suspended_request_is_resumed(in_files: bool, tokenizer: Tokenizer, ids: Ids, tmp_path: Path) -> None:
    directory = str(tmp_path / "kept") if in_files else None
    async with bench(tokenizer, snapshot_dir=directory) as b:
        held: list[GenerateRequest] = b.scheduler.requests
        tokens = ids(TEXT)
        b.scheduler.script, b.scheduler.hold = lambda request: tokens[:2], True
        call = asyncio.create_task(b.http.post("/generate", json={**CALLS[0][1], "rid": "r"}))
        await until(lambda: bool(b.scheduler._held))
        said = (await b.http.post("/suspend", json={"rid": "r"})).json()
        assert (await call).json()["meta_info"]["finish_reason"]["type"] == "suspended"
        assert (said["rid"], said["completion_tokens"], said["kv_tokens"]) == ("r", 2, 0)
        assert (await b.http.post("/suspend", json={"rid": "r"})).status_code == 404
        again = asyncio.create_task(b.http.post("/generate", json={**CALLS[0][1], "rid": "r"}))
        await until(lambda: len(held) == 2)
        assert (await b.http.post("/suspend", json={"rid": "r"})).status_code == 409
        assert (await b.http.post("/resume", json={"rid": "r"})).status_code == 409
        b.client.abort("r")
        await again
        b.scheduler.script, b.scheduler.hold = lambda request: tokens, False
        assert (await b.http.get("/get_server_info")).json()["suspended_requests"] == 1
        if not in_files:
            answer = (await b.http.post("/resume", json={"rid": "r"})).json()
            assert answer["output_ids"][:-1] == tokens
            assert (await b.http.post("/resume", json={"rid": "r"})).status_code == 404
            b.scheduler.script, b.scheduler.hold = lambda request: tokens[:2], True
            call = asyncio.create_task(b.http.post("/generate", json={**CALLS[0][1], "rid": "r"}))
            await until(lambda: bool(b.scheduler._held))
            assert (await b.http.post("/suspend", json={"rid": "r"})).status_code == 200
            await call
            for count in (1, 0):
                assert (await b.http.post("/abort_request", json={"rid": "r"})).json() == {"num_aborted": count}
    if in_files:  # another server finds the file
        async with bench(tokenizer, snapshot_dir=directory) as b:
            b.scheduler.script = lambda request: tokens
            answer = (await b.http.post("/resume", json={"rid": "r"})).json()
            assert answer["output_ids"][:-1] == tokens
        assert not list((tmp_path / "kept").iterdir())


async def test_a_suspended_request_stays_in_memory_if_it_cannot_be_written_and_is_resumed_once(
    tokenizer: Tokenizer, ids: Ids, tmp_path: Path
) -> None:
    directory = tmp_path / "kept"
    async with bench(tokenizer, snapshot_dir=str(directory)) as b:
        tokens = ids(TEXT)
        b.scheduler.script, b.scheduler.hold = lambda request: tokens[:2], True
        call = asyncio.create_task(b.http.post("/generate", json={**CALLS[0][1], "rid": "r"}))
        await until(lambda: bool(b.scheduler._held))
        directory.rmdir()
        assert (await b.http.post("/suspend", json={"rid": "r"})).status_code == 200
        await call
        assert (await b.http.post("/suspend", json={"rid": "r"})).status_code == 404
        b.scheduler.script, b.scheduler.hold = lambda request: tokens, False
        answers = await asyncio.gather(*(b.http.post("/resume", json={"rid": "r"}) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
        assert len(b.scheduler.requests) == 2
        assert (await b.http.post("/resume", json={"rid": "r"})).status_code == 404
