"""`/migrate` between two applications over scripted schedulers: who sends which tokens, and what a refusal leaves."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import orjson
import pytest
from msgspec.structs import replace
from yarl import URL

from pdserve.base.stream_state import EVENT_END, STATE_HEADER, split_event
from pdserve.config.groups import ServerConfig
from pdserve.errors import RequestError
from pdserve.protocol.failure import MIGRATED, Failure
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import (
    CommandReply,
    EndMigration,
    EngineCoreOutput,
    FinishReason,
    GenerateRequest,
    MigrateOut,
    MigrationCommand,
    MigrationOffer,
    RoomAddress,
    SenderAddress,
    SendPrefix,
    TokenLogprob,
)
from pdserve.protocol.sampling import CoreSamplingParams, ProcessorParams
from pdserve.server.engine_client import migration
from pdserve.server.generation import Resume, to_wire
from pdserve.server.http.json_http import event
from pdserve.server.migration_client import MigrateStreamBody, TakeInBody, _refusal, base_url, decode_output
from pdserve.server.request.custom_params import ANY_TEXT
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

TO = "http://other:30000"
ALL = [73, 74, 75, 76, 77]
ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
BODY = {"input_ids": [5, 6, 7], "rid": "x", "stream": True, "sampling_params": {"max_new_tokens": 9}, **ROOM}


class DirectClient:
    """Calls the other application without a socket."""

    other: Bench | None = None

    def __init__(self, token: str, key: str | None, ca_certs: str | None) -> None:
        pass

    async def reach(self, url: URL) -> None:
        assert self.other is not None
        await self.other.http.get("/health")

    async def take_in(self, url: URL, taken: TakeInBody) -> None:
        assert self.other is not None
        answer = await self.other.http.post("/migrate_in", content=msgspec.json.encode(taken))
        if answer.status_code != 200:
            raise _refusal(url, answer.status_code, answer.content)

    async def outputs(self, url: URL, rid: str) -> AsyncIterator[EngineCoreOutput]:
        assert self.other is not None
        answer = await self.other.http.post("/migrate_stream", content=msgspec.json.encode(MigrateStreamBody(rid)))
        assert answer.status_code == 200, answer.text
        for line in answer.content.splitlines():
            if line.startswith(b"data: {"):
                yield msgspec.json.decode(line.removeprefix(b"data: "), type=EngineCoreOutput)

    async def close(self) -> None:
        pass


def moves(request: GenerateRequest, *, commits: bool = True, prefixes: bool = False, retracted: bool = False) -> Any:
    """What S's scheduler replies: the request is stopped behind its third token, or was `retracted` there."""

    def reply(command: MigrationCommand) -> CommandReply:
        match command:
            case MigrateOut() if retracted:
                value = msgspec.structs.replace(
                    request, prior_output_ids=ALL[:3], room=None, local=True, taken_over=True
                )
                payload = msgspec.msgpack.encode(MigrationOffer(request=value, num_output_tokens=3))
                return CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload)
            case MigrateOut():
                sender = SenderAddress(instance="i", endpoint="h:1")
                room = RoomAddress(host="migration", port=None, room=command.room, sender=sender)
                value = msgspec.structs.replace(request, prior_output_ids=ALL[:2], room=room)
                payload = msgspec.msgpack.encode(MigrationOffer(request=value, num_output_tokens=3))
                return CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload)
            case EndMigration():
                ok = commits or not command.commit
                return CommandReply(query_id=command.query_id, ok=ok, message="ok")
            case SendPrefix(count_only=True):
                payload = msgspec.msgpack.encode(2 if prefixes else 0)
                return CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload)
            case SendPrefix(after=0) if prefixes:
                sender = SenderAddress(instance="i", endpoint="h:1")
                room = RoomAddress(host="migration", port=None, room=command.room, sender=sender)
                sampling = msgspec.structs.replace(request.sampling, max_new_tokens=0)
                value = msgspec.structs.replace(request, room=room, sampling=sampling)
                payload = msgspec.msgpack.encode(MigrationOffer(request=value, num_output_tokens=0))
                return CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload)
            case _:
                return CommandReply(query_id=command.query_id, ok=False, message="no pages")

    return reply


@contextlib.asynccontextmanager
async def two(tokenizer: Tokenizer, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Bench, Bench]]:
    """S, which holds requests after three tokens, and D."""
    patch.setattr("pdserve.server.app.MigrationClient", DirectClient)
    async with bench(tokenizer, "decode") as source, bench(tokenizer, "decode") as target:
        patch.setattr(DirectClient, "other", target)
        source.scheduler.script, source.scheduler.hold = (lambda request: ALL[:3]), True
        target.scheduler.script = lambda request: ALL
        yield source, target


async def begin(source: Bench, **headers: str) -> asyncio.Task[Any]:
    """A stream at S, of which three tokens have been generated."""
    stream = asyncio.create_task(source.http.post("/generate", json=BODY, headers=headers))
    await until(lambda: source.scheduler.requests)
    state = source.client.find_one("x")
    assert state is not None
    await until(lambda: state.completion_tokens == 3)
    return stream


def results(content: bytes) -> list[Any]:
    return [orjson.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]


async def test_the_client_gets_the_rest_through_the_first_server(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0])
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_tokens"] == 3
        extracted = await source.http.post("/extract", json={"rid": "x"})
        assert (extracted.status_code, extracted.json()["error"]["code"]) == (409, "migrated")
        last = results((await stream).content)[-1]
        assert last["output_ids"] == [*ALL, 0]
        assert last["meta_info"]["completion_tokens"] == 6
        assert [type(command) for command in source.scheduler.commands][-2:] == [MigrateOut, EndMigration]
        assert not source.client.num_live and not len(source.client.moved) and not len(target.client.incoming)
        (moved,) = target.scheduler.requests
        assert moved.prior_output_ids == ALL[:2] and moved.rid == answer.json()["migrated_rid"]


async def test_a_router_opens_the_rest_at_the_other_server(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source, **{STATE_HEADER: "1"})
        source.scheduler.on_migration = moves(source.scheduler.requests[0])
        answer = (await source.http.post("/migrate", json={"rid": "x", "to": TO, "attach": True})).json()
        content = (await stream).content
        states = [split_event(event)[0] for event in content.split(EVENT_END)]
        token_ids = [token for state in states if state is not None for token in state.token_ids]
        error = results(content)[-1]
        assert token_ids == ALL[:3] and error["code"] == 503
        assert error["error"]["code"] == "migrated" and error["error"]["next_token_index"] == 3
        assert (error["error"]["to"], error["error"]["migrated_rid"]) == (TO, answer["migrated_rid"])
        resume = {"head": {"id": "x"}, "token_ids": token_ids, "attach": answer["migrated_rid"]}
        body = {name: value for name, value in BODY.items() if name not in ROOM}
        early = await target.http.post("/generate", json={**body, "pdserve_resume": {**resume, "token_ids": [73]}})
        assert early.status_code == 400 and "output tokens" in early.text
        rest = await target.http.post("/generate", json={**body, "pdserve_resume": resume})
        assert rest.status_code == 200, rest.text
        assert results(rest.content)[-1]["output_ids"] == [*ALL, 0]
        again = await target.http.post("/generate", json={**body, "pdserve_resume": resume})
        assert (again.status_code, again.json()["param"]) == (404, "pdserve_resume.attach")
        assert not source.client.num_live and not target.client.num_live and not len(target.client.incoming)


@pytest.mark.parametrize("has_cache", [False, True])
async def test_stages_go_to_a_prefix_cache(
    has_cache: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerConfig, "wants_prefix_cache", property(lambda self: has_cache))
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0], prefixes=True)
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_stages"] == has_cache
        assert results((await stream).content)[-1]["output_ids"] == [*ALL, 0]
        kinds = [type(command) for command in source.scheduler.commands]
        tried = [SendPrefix, SendPrefix] if has_cache else [SendPrefix, EndMigration]
        assert kinds == [*tried, MigrateOut, EndMigration]
        names = {request.migration_id for request in target.scheduler.requests}
        assert len(target.scheduler.requests) == 1 + has_cache and len(names) == 1 and names != {""}
        assert not len(target.client.incoming)
        body = {"input_ids": [5, 6, 7], "to": TO}
        copied = await source.http.post("/replicate", json=body)
        assert copied.status_code == (200 if has_cache else 404), copied.text
        assert {request.migration_id for request in target.scheduler.requests} == names | ({""} if has_cache else set())
        assert copied.json()["num_tokens" if has_cache else "param"] == (3 if has_cache else "input_ids")
        counted = await source.http.post("/replicate", json={"input_ids": [5, 6, 7]})
        assert counted.json() == {"success": True, "to": None, "num_tokens": 2}
        body |= {"cache_salt": "s", "extra_key": "e"}
        assert (await source.http.post("/replicate", json=body)).status_code == copied.status_code
        sent = [it.prompt.cache_salt for it in source.scheduler.commands if isinstance(it, SendPrefix) and it.prompt]
        assert sent[-1] == "s\0e"
        salted = await source.http.post("/replicate", json={"input_ids": [5, 6, 7], "cache_salt": "x" * 5000})
        assert (salted.status_code, salted.json()["param"]) == (400, "cache_salt")


async def test_a_refusal_names_the_field_and_the_request_goes_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0])
        failure = Failure(code="handshake_refused", message="weights: this server has a, the peer has b", status=500)
        target.scheduler.script = lambda request: FinishReason.failed(failure)
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert (answer.status_code, answer.json()["param"]) == (409, "weights")
        assert answer.json()["error"]["code"] == "migration_refused"
        last = source.scheduler.commands[-1]
        assert isinstance(last, EndMigration) and not last.commit
        assert not len(target.client.incoming)
        source.scheduler.finish(source.scheduler.requests[0])
        assert results((await stream).content)[-1]["output_ids"] == [*ALL[:3], 0]


async def test_a_retracted_request_is_computed_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No output of the other server is left out, and it compares the weights: no handshake does."""
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0], retracted=True)
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_tokens"] == 3 and target.scheduler.requests[0].prior_output_ids == ALL[:3]
        assert results((await stream).content)[-1]["output_ids"][: len(ALL)] == ALL
        value = msgspec.structs.replace(target.scheduler.requests[0], rid="y")
        for request, weights, status, param in (
            (value, "others", 409, "weights"),
            (msgspec.structs.replace(value, local=False), "", 400, "request.taken_over"),
        ):
            body = msgspec.json.encode(TakeInBody(request, weights=weights))
            answer = await target.http.post("/migrate_in", content=body)
            assert (answer.status_code, answer.json()["param"]) == (status, param), answer.text


BASE = GenerateRequest(rid="y", input_ids=[5, 6, 7], sampling=CoreSamplingParams(max_new_tokens=9))
Change = Callable[[GenerateRequest], GenerateRequest]
INCOMING: list[tuple[str, int, Change]] = [
    ("request.migration_id", 400, lambda it: replace(it, migration_id="m" * 3000)),
    ("request.rid", 400, lambda r: replace(r, rid="")),
    ("request.input_ids", 400, lambda r: replace(r, input_ids=[])),
    ("request.input_ids", 400, lambda r: replace(r, input_ids=[1 << 30])),
    ("request.prior_output_ids", 400, lambda r: replace(r, prior_output_ids=[5] * 9)),
    ("request.hidden", 400, lambda r: replace(r, input_embeds=b"abcd")),
    ("request.kv_tokens", 400, lambda r: replace(r, kv_tokens=2)),
    ("request.cache_salt", 400, lambda r: replace(r, cache_salt="x" * 9999)),
    ("request.logprobs.top", 400, lambda r: replace(r, logprobs=Logprobs(top=1 << 30))),
    ("request.logprobs.token_ids", 400, lambda r: replace(r, logprobs=Logprobs(token_ids=(-1,)))),
    ("request.sampling.temperature", 400, lambda r: _sampled(r, temperature=-1.0)),
    ("request.sampling.logit_bias", 400, lambda r: _sampled(r, logit_bias={1 << 30: 1.0})),
    ("request.sampling.seed", 400, lambda r: _sampled(r, seed=-1)),
    ("request.sampling.grammar", 400, lambda r: _sampled(r, processor=ProcessorParams(name="x"))),
    ("request.sampling.top_k", 400, lambda r: _sampled(r, top_k=1 << 63)),
    ("request.sampling.processor.params", 400, lambda r: _processed(r, "no JSON")),
    ("request.sampling.processor.params", 400, lambda r: _processed(r, "[1]")),
    ("request.sampling.processor.params", 400, lambda r: _processed(r, '{"a":' * 5000 + "1" + "}" * 5000)),
    ("request.sampling.processor.params", 400, lambda r: _processed(r, f'{{"a": "{"x" * (1 << 17)}"}}')),
    ("custom_logit_processor", 409, lambda r: _sampled(r, processor=ProcessorParams(name="x"), grammar=ANY_TEXT)),
    ("context_length", 409, lambda r: _sampled(r, max_new_tokens=1 << 40)),
]


def _sampled(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, **changes))


def _processed(request: GenerateRequest, params: str) -> GenerateRequest:
    return _sampled(request, processor=ProcessorParams(name="x", params=params), grammar=ANY_TEXT)


async def test_the_value_of_a_request_is_checked(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that no body could ask for comes to the scheduler, and what this server lacks is named."""
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        value = replace(source.scheduler.requests[0], room=None, local=True, taken_over=True, prior_output_ids=ALL[:2])
        for field, status, change in INCOMING:
            taken = TakeInBody(change(value), weights="w", dtype="float32")
            answer = await target.http.post("/migrate_in", content=msgspec.json.encode(taken))
            assert (answer.status_code, answer.json()["param"]) == (status, field), answer.text
        for endpoint in ("nowhere", ":5", "h:0", "h:99999"):
            room = RoomAddress(host="h", port=None, room=5, sender=SenderAddress(instance="i", endpoint=endpoint))
            taken = TakeInBody(replace(value, room=room, local=False, taken_over=False))
            answer = await target.http.post("/migrate_in", content=msgspec.json.encode(taken))
            assert (answer.status_code, answer.json()["param"]) == (400, "request.room.sender"), answer.text
        other = TakeInBody(value, weights="w", dtype="float32", model="with YaRN")
        answer = await target.http.post("/migrate_in", content=msgspec.json.encode(other))
        assert (answer.status_code, answer.json()["param"]) == (409, "model")
        assert not target.scheduler.requests
        biased = TakeInBody(_sampled(value, logit_bias={7: 2.0}), weights="w", dtype="float32")
        answer = await target.http.post("/migrate_in", content=msgspec.json.encode(biased))
        assert answer.status_code == 200, answer.text
        assert target.scheduler.requests[0].sampling.logit_bias == {7: 2.0}
        source.scheduler.finish(source.scheduler.requests[0])
        await stream


async def test_a_second_migration_does_not_end_the_first(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(tokenizer, monkeypatch) as (source, _):
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0])
        gate, take_in = asyncio.Event(), DirectClient.take_in

        async def late(client: DirectClient, url: URL, taken: TakeInBody) -> None:
            await gate.wait()
            await take_in(client, url, taken)

        monkeypatch.setattr(DirectClient, "take_in", late)
        first = asyncio.create_task(source.http.post("/migrate", json={"rid": "x", "to": TO}))
        await until(lambda: any(isinstance(command, MigrateOut) for command in source.scheduler.commands))
        second = await source.http.post("/migrate", json={"rid": "x", "to": "http://elsewhere:1"})
        assert (second.status_code, second.json()["error"]["code"]) == (409, "migration_under_way")
        gate.set()
        assert (await first).status_code == 200
        assert results((await stream).content)[-1]["output_ids"] == [*ALL, 0]


async def test_a_server_that_drains_waits_for_the_requests_of_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no further ones, and those that do not end in time end with its reason, at their reader."""
    why = RequestError("the role changes", status=503, code="role_switching", retry_after_s=1)
    async with two(tokenizer, monkeypatch) as (_, target):
        value = replace(BASE, room=None, local=True, taken_over=True, prior_output_ids=ALL[:2])
        target.scheduler.hold = True
        for rid in ("a", "b"):
            taken = TakeInBody(replace(value, rid=rid), weights="w", dtype="float32")
            assert (await target.http.post("/migrate_in", content=msgspec.json.encode(taken))).status_code == 200
        assert target.drain_gate.num_inside == 2, "their readers have not come"
        target.drain_gate.close(why)
        reader = asyncio.create_task(target.http.post("/migrate_stream", json={"rid": "a"}))
        await until(lambda: target.client.incoming._requests["a"].is_attached)
        assert target.drain_gate.num_inside == 2
        taken = TakeInBody(replace(value, rid="c"), weights="w", dtype="float32")
        answer = await target.http.post("/migrate_in", content=msgspec.json.encode(taken))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "role_switching")
        target.client.abort_all(why)
        last = decode_output((await reader).content.split(b"data: ")[-2])
        assert last.finish is not None and last.finish.err_type == "role_switching"
        await until(lambda: len(target.scheduler.aborts) == 2)
        assert not len(target.client.incoming) and not target.drain_gate.num_inside


async def test_a_request_does_not_move_to_its_own_server(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(tokenizer, monkeypatch) as (source, _):
        monkeypatch.setattr(DirectClient, "other", source)
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0])
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert (answer.status_code, answer.json()["param"]) == (409, "to")
        assert answer.json()["error"]["code"] == "migration_refused"
        source.scheduler.finish(source.scheduler.requests[0])
        await stream


def test_other_weights_of_an_adapter_are_a_refusal() -> None:
    body = {"error": {"code": "lora_mismatch", "message": "different LoRA adapters", "param": None}}
    error = _refusal(URL(TO), 500, orjson.dumps(body))
    assert (error.status, error.code, error.field) == (409, "migration_refused", "lora_path")


def test_a_server_without_room_is_asked_again_later() -> None:
    body = {"error": {"code": "migration_no_room", "message": "no row or KV memory is free", "param": None}}
    error = _refusal(URL(TO), 503, orjson.dumps(body))
    assert (error.status, error.code, error.field) == (503, "migration_no_room", "to")


async def test_without_a_commit_the_other_copy_ends(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "ATTACH_S", 0.05)
    async with two(tokenizer, monkeypatch) as (source, target):
        target.scheduler.hold = True
        stream = await begin(source)
        source.scheduler.on_migration = moves(source.scheduler.requests[0], commits=False)
        answer = await source.http.post("/migrate", json={"rid": "x", "to": TO})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "migration_failed")
        await until(lambda: target.scheduler.aborts)
        assert not len(target.client.incoming)
        source.scheduler.finish(source.scheduler.requests[0])
        assert results((await stream).content)[-1]["output_ids"] == [*ALL[:3], 0]


async def test_a_client_does_not_wait_for_a_commit_without_an_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "FOLLOW_S", 0.05)
    async with two(tokenizer, monkeypatch) as (source, target):
        target.scheduler.hold = True
        stream = await begin(source)
        request = source.scheduler.requests[0]
        source.scheduler.on_migration = moves(request, commits=False)
        assert (await source.http.post("/migrate", json={"rid": "x", "to": TO})).status_code == 502
        source.client._on_output(EngineCoreOutput(rid=request.rid, token_ids=[], finish=FinishReason.failed(MIGRATED)))
        error = results((await stream).content)[-1]["error"]
        assert error["code"] == "migration_target_failed"
        assert not source.client.num_live


async def test_what_cannot_move_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(tokenizer, monkeypatch) as (source, target):
        stream = await begin(source)
        for body, status, param in (
            ({"rid": "y", "to": TO}, 404, "rid"),
            ({"rid": "x", "to": "other"}, 400, "to"),
            ({"rid": "x", "to": f"{TO}/v1"}, 400, "to"),
            ({"rid": "x", "to": TO, "attach": True}, 409, "attach"),
            ({"rid": "x"}, 400, "to"),
        ):
            answer = await source.http.post("/migrate", json=body)
            assert (answer.status_code, answer.json()["param"]) == (status, param), answer.text
        request = source.scheduler.requests[0]
        wrong = await target.http.post("/migrate_in", content=msgspec.json.encode(TakeInBody(request)))
        assert (wrong.status_code, wrong.json()["param"]) == (400, "request.room.sender")
        assert (await target.http.post("/migrate_stream", json={"rid": "z"})).status_code == 404
        source.scheduler.finish(request)
        await stream


def test_log_probabilities_of_forbidden_tokens_move() -> None:
    """JSON has no infinity; the output of the other server, and a stream's state, are JSON."""
    lines = [TokenLogprob(-math.inf, [(3, -0.5)], [-1.5, -math.inf])]
    output = EngineCoreOutput(rid="x", token_ids=[3], logprobs=to_wire(lines))
    assert decode_output(event(msgspec.to_builtins(output)).removeprefix(b"data: ")).logprobs == lines
    sent = orjson.loads(orjson.dumps(msgspec.to_builtins(to_wire(lines))))
    resume = msgspec.convert({"head": {"id": "x"}, "token_ids": [3], "logprobs": sent}, Resume)
    assert resume.token_logprobs == lines == resume.update("").logprobs


def test_a_base_url_has_no_path() -> None:
    assert str(base_url("https://h:1/")) == "https://h:1"
