"""Stored responses and conversations by `previous_response_id`, as the real client sees them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.errors import RequestError
from pdserve.http.response_store import HISTORY_FIELD, ResponseStore, StoreLimits
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import long_context, openai_bench
from tests.unit.server.server_kit import bench
from tests.unit.server.test_single_requests import FakePrefill

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
TEXT = "héllo 世界!"
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}


def prompt_of(b: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(b.scheduler.requests[-1].input_ids, skip_special=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_its_last_response(tokenizer: Tokenizer, stream: bool) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):

        async def ask(text: str, **fields: Any) -> Any:
            made = await client.responses.create(model="tiny", input=text, stream=stream, **fields)
            return [event async for event in made][-1].response if stream else made

        first = await ask("one", instructions="Be brief.")
        assert first.store and first.previous_response_id is None
        second = await ask("two", previous_response_id=first.id, instructions="Be long.")
        assert second.previous_response_id == first.id
        assert prompt_of(b, tokenizer) == (
            f"<|user|>system: Be long.\n<|user|>user: one\n<|user|>assistant: {TEXT}\n<|user|>user: two\n"
            "<|user|>assistant: "
        )
        await ask("three", previous_response_id=first.id, store=False)
        assert prompt_of(b, tokenizer).count(TEXT) == 1, "a second branch"
        found = await client.responses.retrieve(second.id)
        assert found.model_dump() == second.model_dump()
        items = await client.responses.input_items.list(second.id, order="asc")
        assert [item.role for item in items.data] == ["user", "assistant", "user"]
        page = await client.responses.input_items.list(second.id, limit=2)
        assert [item.role for item in page.data] == ["user", "assistant"] and page.has_more
        assert [item.role async for item in page] == ["user", "assistant", "user"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id: there is no stored response"):
            await ask("four", previous_response_id=first.id)
        await ask("five", previous_response_id=second.id)
        assert prompt_of(b, tokenizer).count(TEXT) == 2, "the second response has its own copy"


@pytest.mark.asyncio
async def test_what_is_not_stored_is_not_found(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (_, client):
        made = await client.responses.create(model="tiny", input="a", store=False)
        assert made.store is False
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(made.id)
            assert caught.value.param == "response_id" and caught.value.code == "response_not_found"
        kept = await client.responses.create(model="tiny", input="a")
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await client.responses.cancel(kept.id)
        for query in ({"order": "up"}, {"limit": 0}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.input_items.list(kept.id, extra_query=query)


@pytest.mark.asyncio
async def test_each_key_has_its_own_responses(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="a,b", admin_api_key="root")) as b:

        def headers(key: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {key}"}

        made = (await b.http.post("/v1/responses", json={"input": "x"}, headers=headers("a"))).json()
        path = f"/v1/responses/{made['id']}"
        assert (await b.http.get(path, headers=headers("a"))).json() == made
        assert (await b.http.get(path)).status_code == 401
        for key in ("b", "root"):
            for answer in (
                await b.http.get(path, headers=headers(key)),
                await b.http.delete(path, headers=headers(key)),
                await b.http.get(f"{path}/input_items", headers=headers(key)),
                await b.http.post("/v1/responses", json={"input": "y", "previous_response_id": made["id"]},
                                  headers=headers(key)),
            ):  # fmt: skip
                assert answer.status_code == 404 and made["output"][0]["id"] not in answer.text
        assert (await b.http.delete(path, headers=headers("a"))).json()["deleted"] is True
        assert (await b.http.get(path, headers=headers("a"))).status_code == 404


@pytest.mark.asyncio
async def test_a_router_sends_the_conversation_and_stores_the_response(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"input": "b", "store": True, "previous_response_id": "resp_of_router",
                HISTORY_FIELD: [{"role": "user", "content": "a"}, ITEM]}  # fmt: skip
        made = (await b.http.post("/v1/responses", json=body)).json()
        assert made["store"] is True and made["previous_response_id"] == "resp_of_router"
        assert "assistant: yes\n<|user|>user: b" in prompt_of(b, tokenizer)
        assert (await b.http.get(f"/v1/responses/{made['id']}")).status_code == 404
        wrong = {"input": "b", HISTORY_FIELD: [{"type": "file"}]}
        answer = await b.http.post("/v1/responses", json=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("previous_response_id")


@pytest.mark.asyncio
async def test_a_server_of_a_pair_stores_nothing_itself(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, mode="prefill") as b:
        room = {"bootstrap_room": 5, "input": "a"}
        answer = await b.http.post("/v1/responses", json={**room, "previous_response_id": "resp_1"})
        assert answer.status_code == 400 and "through pdserve's router" in answer.json()["error"]["message"]
        answer = await b.http.post("/v1/responses", json={**room, "store": True})
        assert answer.status_code == 200 and answer.json()["store"] is False


@pytest.mark.asyncio
async def test_a_decode_server_without_a_router_stores_and_sends_the_conversation(tokenizer: Tokenizer) -> None:
    prefill = await FakePrefill().start()
    try:
        pairing = PairingConfig(disaggregation_prefill=prefill.url)
        async with bench(tokenizer, "decode", pairing=pairing) as b:
            first = (await b.http.post("/v1/responses", json={"input": "one"})).json()
            assert first["store"] is True and prefill.bodies[-1][HISTORY_FIELD] == []
            body = {"input": "two", "previous_response_id": first["id"]}
            second = (await b.http.post("/v1/responses", json=body)).json()
            assert [item["role"] for item in prefill.bodies[-1][HISTORY_FIELD]] == ["user", "assistant"]
            assert "user: one" in prompt_of(b, tokenizer)
            assert (await b.http.get(f"/v1/responses/{second['id']}")).json() == second
    finally:
        await prefill.stop()


def stored(store: ResponseStore, name: str, owner: str = "", size: int = 10) -> bool:
    _, recording = store.begin({"input": "x" * size}, owner)
    assert recording is not None
    recording.keep({"id": name, "status": "completed", "output": []})
    return holds(store, name, owner)


def holds(store: ResponseStore, name: str, owner: str = "") -> bool:
    try:
        return bool(store.get(name, owner))
    except RequestError:
        return False


def test_a_store_is_bounded_by_number_bytes_and_age() -> None:
    now = [0.0]
    store = ResponseStore(StoreLimits(3, 3000, 60.0), lambda: now[0])
    assert all(stored(store, name) for name in "abcd")
    assert not holds(store, "a") and holds(store, "b") and len(store) == 3
    assert stored(store, "e", size=2400) and store.num_bytes <= 3000
    assert not stored(store, "f", size=4000) and holds(store, "e"), "too large for any room"
    now[0] = 61.0
    assert not holds(store, "e") and len(store) == 0 and store.num_bytes == 0


def test_a_store_of_size_0_stores_nothing() -> None:
    store = ResponseStore(StoreLimits(0, 1 << 20, 60.0), lambda: 0.0)
    body, recording = store.begin({"input": "a", "store": True}, "")
    assert recording is None and body["store"] is False
    with pytest.raises(RequestError, match="--response-store-size 0"):
        store.begin({"input": "a", "previous_response_id": "resp_1"}, "")
    for response in ({"status": "failed", "id": "x"}, {"status": "completed"}, {"id": "x"}):
        full = ResponseStore(StoreLimits(1, 1 << 20, 60.0), lambda: 0.0)
        made = full.begin({"input": "a"}, "")[1]
        assert made is not None
        made.keep(response)
        assert len(full) == 0
