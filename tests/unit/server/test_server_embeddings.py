"""`/v1/embeddings` over a scripted scheduler: forms of body and answer, and what is refused by name."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from pdserve.config.embedding_group import EmbeddingConfig
from pdserve.config.groups import DisaggConfig, DisaggMode, ServerConfig
from pdserve.config.validate import check
from pdserve.errors import ConfigError
from pdserve.http.access import EMBEDDINGS_PATH, GENERATING, POOLING
from pdserve.protocol.hidden_states import HiddenParams, HiddenStates, Pooling
from pdserve.protocol.messages import FinishReason
from pdserve.server.pooling_api.pooling import pool
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

EMBEDS = EmbeddingConfig(is_embedding=True)
GENERATED: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


async def test_each_text_gets_a_vector(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, embedding=EMBEDS) as b:
        b.scheduler.announce(weight_version="step-1")
        response = await b.http.post(EMBEDDINGS_PATH, json={"input": [[5, 6], [7, 8, 9, 10]], "rid": "q"})
        answer = response.json()
        text = (await b.http.post(EMBEDDINGS_PATH, json={"input": "hello world", "model": "m"})).json()
        coded = {"input": [5, 6], "encoding_format": "base64", "dimensions": 1}
        short = (await b.http.post(EMBEDDINGS_PATH, json=coded)).json()
        requests = b.scheduler.requests
    assert response.headers["x-weight-version"] == "step-1"
    assert answer["object"] == "list" and answer["model"] == "tiny" and text["model"] == "m"
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    for one, last in zip(answer["data"], (1, 3), strict=True):
        expected = np.array([last, 1, 0, 0]) / np.hypot(last, 1)
        np.testing.assert_allclose(one["embedding"], expected, atol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert np.frombuffer(base64.b64decode(short["data"][0]["embedding"]), "<f4").tolist() == [1.0]
    assert [request.hidden for request in requests[:2]] == [HiddenParams(start=1), HiddenParams(start=3)]
    assert all(request.sampling.max_new_tokens == 0 and not request.sampling.speculative for request in requests)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input[0]"),
        ({"input": ["a", [5]]}, "input[1]"),
        ({"input": [5, 320]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": [5] * 2000}, "input"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(tokenizer: Tokenizer, body: dict[str, Any], field: str) -> None:
    async with bench(tokenizer, embedding=EMBEDS) as b:
        answer = await b.http.post(EMBEDDINGS_PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert not b.scheduler.requests


async def test_only_the_right_servers_answer(tokenizer: Tokenizer) -> None:
    assert GENERATED.keys() | {*POOLING, "/api/chat", "/api/generate"} == {*GENERATING}
    async with bench(tokenizer, embedding=EMBEDS) as b:
        for path, body in GENERATED.items():
            answer = await b.http.post(path, json=body)
            assert answer.status_code == 400 and "--is-embedding" in answer.text, path
        assert not b.scheduler.requests
        assert (await b.http.get("/server_info")).json()["is_embedding"] is True
    modes: tuple[DisaggMode, ...] = ("null", "prefill", "decode")
    for mode in modes:
        async with bench(tokenizer, mode) as b:
            answer = await b.http.post(EMBEDDINGS_PATH, json={"input": "a"})
            assert answer.status_code == 400 and ("--is-embedding" if mode == "null" else mode) in answer.text


async def test_an_aborted_request_is_an_error(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, embedding=EMBEDS) as b:
        b.scheduler.script = lambda request: FinishReason(type="abort", message="aborted", status_code=499)
        assert (await b.http.post(EMBEDDINGS_PATH, json={"input": "a"})).status_code == 499


@pytest.mark.parametrize(
    ("embedding", "mode", "field"),
    [
        (EMBEDS, "decode", "is_embedding"),
        (EmbeddingConfig(is_embedding=True, enable_return_hidden_states=True), "null", "is_embedding"),
        (EmbeddingConfig(embedding_pooling="mean"), "null", "embedding_pooling"),
    ],
)
def test_flags_that_do_not_fit(embedding: EmbeddingConfig, mode: DisaggMode, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(ServerConfig(embedding=embedding, disagg=DisaggConfig(disaggregation_mode=mode)))
    assert error.value.field == field


def test_pooling() -> None:
    rows = np.array([[3, 4, 1], [6, 8, 1], [0, 0, 4]], dtype=np.float32)
    last, mean = Pooling(normalize=False), Pooling(mode="mean", normalize=False)
    parts = [HiddenStates.pack(0, 2, rows[:2]), HiddenStates.pack(2, 1, rows[2:])]
    sums = [HiddenStates.pack(0, 2, rows[:2].sum(0, keepdims=True)), parts[1]]
    assert pool(parts, last).tolist() == [0, 0, 4]
    assert pool(sums, mean).tolist() == [3, 4, 2]
    assert pool(sums, Pooling(mode="mean"), 2).tolist() == pytest.approx([0.6, 0.8])
    assert pool([HiddenStates.pack(0, 1, np.zeros((1, 3), dtype=np.float32))], Pooling()).tolist() == [0, 0, 0]
