"""Responses in the background at a server, as the real client sees them."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.http import response_events
from pdserve.http.response_store import HISTORY_FIELD
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import long_context, openai_bench
from tests.unit.server.server_kit import bench
from tests.unit.server.test_single_requests import FakePrefill
from tests.waiting import seen_until, settle, until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
TEXT = "héllo 世界!"
NAME = f"resp_{0:032x}"


@pytest.fixture(autouse=True)
def known_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client here gets a stream as a whole, so tests know the id of their first response."""
    names = itertools.count()
    monkeypatch.setattr(
        response_events, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(names):032x}"))
    )


async def running(b: Any, client: Any) -> None:
    """The first response runs."""
    await until(lambda: b.scheduler.requests)
    await seen_until(lambda: client.responses.retrieve(NAME), lambda found: found.status == "in_progress")


async def ended(client: Any, name: str) -> Any:
    return await seen_until(
        lambda: client.responses.retrieve(name), lambda found: found.status not in ("queued", "in_progress")
    )


@pytest.mark.asyncio
async def test_a_response_is_queued_at_once_and_read_later(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        made = await client.responses.create(model="tiny", input="one", background=True, metadata={"a": "b"})
        assert (made.status, made.background, made.output, made.metadata) == ("queued", True, [], {"a": "b"})
        found = await ended(client, made.id)
        assert (found.status, found.output_text, found.background) == ("completed", TEXT, True)
        assert found.id == made.id and found.created_at == made.created_at and found.usage.output_tokens > 0
        plain = await client.responses.create(model="tiny", input="one", store=False)
        assert set(plain.model_dump()) <= set(made.model_dump()) and plain.background is False
        items = await client.responses.input_items.list(made.id)
        assert [item.role for item in items.data] == ["user"]
        second = await client.responses.create(model="tiny", input="two", previous_response_id=made.id)
        assert TEXT in tokenizer.decode(b.scheduler.requests[-1].input_ids) and second.status == "completed"
        assert (await client.responses.cancel(made.id)).status == "completed", "it has ended"
        with pytest.raises(openai.BadRequestError, match="made with background and stream"):
            await client.responses.retrieve(made.id, stream=True)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


@pytest.mark.asyncio
async def test_a_stream_is_read_again_from_any_event(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        b.scheduler.hold = True
        create = client.responses.create(model="tiny", input="one", background=True, stream=True)
        stream, name = asyncio.create_task(create), NAME
        await running(b, client)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        await settle()
        assert (await client.responses.retrieve(name)).status == "in_progress", "it goes on without its client"
        again_task = asyncio.create_task(client.responses.retrieve(name, stream=True))
        b.scheduler.finish(b.scheduler.requests[-1])
        again = [event async for event in await again_task]
        assert [event.sequence_number for event in again] == list(range(len(again)))
        assert [event.type for event in again[:3]] == [
            "response.created", "response.queued", "response.in_progress"
        ]  # fmt: skip
        assert [event.response.status for event in again[:3]] == ["queued", "queued", "in_progress"]
        assert again[-1].type == "response.completed" and not b.scheduler.aborts
        assert again[-1].response.id == name and again[-1].response.output_text == TEXT
        assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == TEXT
        rest = [event async for event in await client.responses.retrieve(name, stream=True, starting_after=3)]
        assert rest == again[4:]
        last = len(again) - 1
        assert not [event async for event in await client.responses.retrieve(name, stream=True, starting_after=last)]
        assert (await client.responses.retrieve(name)).model_dump() == again[-1].response.model_dump()
        for query in ({"stream": "maybe"}, {"stream": "true", "starting_after": "x"}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.retrieve(name, extra_query=query)


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["cancel", "delete"])
async def test_a_running_response_is_cancelled(tokenizer: Tokenizer, by: str) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        b.scheduler.hold = True
        create = client.responses.create(model="tiny", input="one", background=True, stream=True)
        stream, name = asyncio.create_task(create), NAME
        await running(b, client)
        if by == "cancel":
            assert (await client.responses.cancel(name)).status == "cancelled"
            assert (await client.responses.cancel(name)).status == "cancelled"
            assert (await client.responses.retrieve(name)).status == "cancelled"
            with pytest.raises(openai.BadRequestError, match="is cancelled, and cannot be continued"):
                await client.responses.create(model="tiny", input="two", previous_response_id=name)
        else:
            await client.responses.delete(name)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(name)
        last = [event async for event in await stream][-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        await until(lambda: b.scheduler.aborts)
        assert [abort.rid for abort in b.scheduler.aborts] == [b.scheduler.requests[-1].rid]


@pytest.mark.asyncio
async def test_what_is_wrong_is_refused_at_once(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        for fields, text in (
            ({"store": False}, "background needs a stored response"),
            ({"temperature": -1}, "temperature"),
            ({"extra_body": {"background": "yes"}}, "background"),
            ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ):
            with pytest.raises(openai.APIStatusError, match=text) as caught:
                await client.responses.create(model="tiny", input="a", **{"background": True, **fields})
            assert caught.value.status_code in (400, 404)
        assert not b.scheduler.requests
    async with bench(tokenizer, mode="prefill") as b:
        answer = await b.http.post("/v1/responses", json={"bootstrap_room": 5, "input": "a", "background": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "background"


@pytest.mark.asyncio
async def test_a_dead_engine_fails_the_response_which_stays(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        b.scheduler.hold = True
        made = await client.responses.create(model="tiny", input="one", background=True)
        await running(b, client)
        b.die()
        found = await ended(client, made.id)
        assert (found.status, found.error.code) == ("failed", "server_error")


@pytest.mark.asyncio
async def test_keys_and_the_number_of_responses(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="a,b")) as b:
        b.scheduler.hold = True
        head = {"Authorization": "Bearer a"}
        made = (await b.http.post("/v1/responses", json={"input": "x", "background": True}, headers=head)).json()
        path = f"/v1/responses/{made['id']}"
        for method, tail in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await b.http.request(method, path + tail, headers={"Authorization": "Bearer b"})
            assert answer.status_code == 404
        assert (await b.http.get(path, headers=head)).json()["status"] in ("queued", "in_progress")


@pytest.mark.asyncio
async def test_a_running_response_has_its_clients_slot(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(max_concurrent_requests_per_client=1)) as b:
        b.scheduler.hold = True
        body = {"input": "x", "background": True}
        made = (await b.http.post("/v1/responses", json=body)).json()
        for more in ({}, {"background": True}):
            answer = await b.http.post("/v1/responses", json={"input": "y", **more})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        await until(lambda: b.scheduler.requests)
        b.scheduler.hold = False
        b.scheduler.finish(b.scheduler.requests[-1])

        async def status() -> Any:
            return (await b.http.get(f"/v1/responses/{made['id']}")).json()["status"]

        assert await seen_until(status, lambda one: one not in ("queued", "in_progress")) == "completed"
        await settle()
        assert (await b.http.post("/v1/responses", json={"input": "y"})).status_code == 200


@pytest.mark.asyncio
async def test_a_decode_server_that_sends_the_prefill_half_has_them_too(tokenizer: Tokenizer) -> None:
    prefill = await FakePrefill().start()
    try:
        pairing = PairingConfig(disaggregation_prefill=prefill.url)
        async with bench(tokenizer, "decode", pairing=pairing) as b:
            made = (await b.http.post("/v1/responses", json={"input": "one", "background": True})).json()
            assert made.get("status") == "queued", made
            path = f"/v1/responses/{made['id']}"

            async def found() -> Any:
                return (await b.http.get(path)).json()

            whole = await seen_until(found, lambda one: one["status"] == "completed")
            assert whole["id"] == made["id"] and prefill.bodies[-1][HISTORY_FIELD] == []
    finally:
        await prefill.stop()
