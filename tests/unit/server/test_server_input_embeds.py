"""`input_embeds` of `/generate` over a scripted scheduler: lists and base64, and what is refused by name."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from pdserve.errors import RequestError
from pdserve.protocol.hidden_states import salt_of_embeds, unpack_embeds
from pdserve.router.proxy.attempts import batch_size
from pdserve.server.engine_client import live_requests
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

ROWS = [[0.5, 1, 2, 3], [4, 5, 6, 7]]
DATA = np.array(ROWS, dtype="<f4").tobytes()
CODED = base64.b64encode(DATA).decode()
SAMPLING = {"max_new_tokens": 2}


async def test_lists_and_base64_are_the_same(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for value in (ROWS, CODED, [ROWS, [[1, 2, 3, 4]]], [CODED]):
            answer = await b.http.post("/generate", json={"input_embeds": value, "sampling_params": SAMPLING})
            assert answer.status_code == 200, answer.text
            assert isinstance(answer.json(), list) == (value not in (ROWS, CODED))
        salted = {"input_embeds": ROWS, "cache_salt": "mine", "sampling_params": SAMPLING}
        assert (await b.http.post("/generate", json=salted)).json()["meta_info"]["prompt_tokens"] == 2
        requests = b.scheduler.requests
    assert [request.input_embeds == DATA for request in requests] == [True, True, True, False, True, True]
    assert unpack_embeds(requests[3].input_embeds, 1).tolist() == [[1, 2, 3, 4]]
    assert [request.input_ids for request in requests[:4]] == [[0, 0], [0, 0], [0, 0], [0]]
    assert not any(request.sampling.speculative for request in requests)
    salts = [request.cache_salt for request in requests]
    assert salts[0] == salts[1] == salts[2] == salts[4] == salt_of_embeds("", DATA)
    assert len({salts[0], salts[3], salts[5]}) == 3, "other embeddings, and other salts, share no cached KV"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input_embeds": []}, "input_embeds"),
        ({"input_embeds": ""}, "input_embeds"),
        ({"input_embeds": 5}, "input_embeds"),
        ({"input_embeds": [1.0, 2.0]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3]]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3, 4], [1, 2]]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3, "4"]]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3, None]]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3, 1e39]]}, "input_embeds"),
        ({"input_embeds": [ROWS, [[1, 2, 3]]]}, "input_embeds[1]"),
        ({"input_embeds": CODED[:-4]}, "input_embeds"),
        ({"input_embeds": "?"}, "input_embeds"),
        ({"input_embeds": [[0, 0, 0, 0]] * 2000}, "input_embeds"),
        ({"input_embeds": ROWS, "text": "a"}, "input_embeds"),
        ({"input_embeds": ROWS, "session_params": {"id": "a"}}, "input_embeds"),
        ({"input_embeds": ROWS, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(tokenizer: Tokenizer, fields: dict[str, Any], field: str) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", json={"sampling_params": SAMPLING, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert not b.scheduler.requests


async def test_a_model_through_transformers_takes_none(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, ready=False) as b:
        b.scheduler.takes_embeds = False
        b.scheduler.start()
        await b.client.wait_ready(5.0)
        answer = await b.http.post("/generate", json={"input_embeds": ROWS})
        assert answer.status_code == 400 and "transformers" in answer.text
        b.scheduler.stop()


async def test_waiting_embeddings_count_as_the_tokens_of_their_size(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_requests, "MAX_WAITING_TOKENS", 0)
    monkeypatch.setattr(live_requests, "WAITING_CONTEXTS", 0)
    async with bench(tokenizer) as b:
        await b.http.post("/generate", json={"input_embeds": ROWS, "sampling_params": SAMPLING})
        (request,) = b.scheduler.requests
        b.waiting.add(request)
        with pytest.raises(RequestError, match=f"of {2 + len(DATA) // 36} prompt tokens wait already"):
            b.waiting.check([request], 1)
        b.waiting.discard(request.rid)


def test_routers_tell_a_batch_from_a_prompt() -> None:
    sizes = [batch_size("/generate", {"input_embeds": value}) for value in (ROWS, CODED, [ROWS, ROWS], [CODED], 5, [])]
    assert sizes == [None, None, 2, 1, None, None]
