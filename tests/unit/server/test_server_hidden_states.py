"""`return_hidden_states` of `/generate` over a scripted scheduler: form, limits, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.config.embedding_group import EmbeddingConfig
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.server.sglang_api import hidden_states
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench, sse
from tests.waiting import until

STATES = EmbeddingConfig(enable_return_hidden_states=True)
ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
PROMPT = [5, 6, 7, 8]


def _body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True, **fields}


def _vector(position: int) -> list[float]:
    return [position, 1, 0, 0]


WHOLE = [[_vector(position) for position in range(4)], _vector(4), _vector(5)]


async def test_the_list_has_sglangs_form(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, embedding=STATES) as b:
        b.scheduler.script = lambda request: [73, 74, 75]
        answer = (await b.http.post("/generate", json=_body())).json()
        events = sse((await b.http.post("/generate", json=_body(stream=True))).text)
        prompt_only = (await b.http.post("/generate", json=_body(sampling_params={"max_new_tokens": 0}))).json()
        mixed = _body(input_ids=[PROMPT, PROMPT], return_hidden_states=[False, True])
        first, second = (await b.http.post("/generate", json=mixed)).json()
        requests = b.scheduler.requests
    assert answer["meta_info"]["hidden_states"] == WHOLE
    *some, last, _ = (json.loads(event) if event != "[DONE]" else {} for event in events)
    assert last["meta_info"]["hidden_states"] == WHOLE
    assert not any("hidden_states" in event["meta_info"] for event in some)
    assert prompt_only["meta_info"]["hidden_states"] == WHOLE[:1]
    assert "hidden_states" not in first["meta_info"] and second["meta_info"]["hidden_states"] == WHOLE
    assert requests[0].hidden == HiddenParams() and not requests[0].sampling.speculative
    assert sorted(request.hidden is None for request in requests[-2:]) == [False, True]


@pytest.mark.parametrize("fields", [{}, {"return_hidden_states": [True]}], ids=["flag", "list"])
async def test_it_needs_its_flag(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", json=_body(**fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_hidden_states")
        assert "--enable-return-hidden-states" in answer.text
        assert (await b.http.post("/generate", json=_body(return_hidden_states=False))).status_code == 200


async def test_the_numbers_of_a_body_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "MAX_VALUES", 4 * 7)
    async with bench(tokenizer, embedding=STATES) as b:
        assert (await b.http.post("/generate", json=_body())).status_code == 200
        longer = await b.http.post("/generate", json=_body(input_ids=[*PROMPT, 9]))
        assert (longer.status_code, longer.json()["error"]["param"]) == (400, "return_hidden_states")


async def test_across_a_pair_each_server_has_its_part(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode", embedding=STATES) as b:
        b.scheduler.script = lambda request: [73, 74, 75]
        b.scheduler.first_hidden = len(PROMPT)
        answer = (await b.http.post("/generate", json=_body(**ROOM))).json()
        assert answer["meta_info"]["hidden_states"] == [[], *WHOLE[1:]]
        for fields in ({"stream": True}, {"input_ids": [PROMPT]}, {"pdserve_single_request": True}):
            refused = await b.http.post("/generate", json=_body(**ROOM, **fields))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_hidden_states")
    async with bench(tokenizer, "prefill", embedding=STATES) as b:
        answer = (await b.http.post("/generate", json=_body(**ROOM))).json()
        assert answer["meta_info"]["hidden_states"][0] == WHOLE[0]


async def test_such_a_request_is_not_extracted(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, embedding=STATES) as b:
        b.scheduler.hold = True
        running = asyncio.create_task(b.http.post("/generate", json=_body(rid="a")))
        await until(lambda: b.client.num_live == 1)
        answer = await b.http.post("/extract", json={"rid": "a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")
        await b.http.post("/abort_request", json={"rid": "a"})
        assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
