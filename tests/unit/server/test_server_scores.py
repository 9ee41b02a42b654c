"""`/v1/score` and `/v1/rerank` over a scripted scheduler: forms of bodies and answers, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.config.embedding_group import EmbeddingConfig
from pdserve.http.access import COHERE_RERANK_PATH, RERANK_PATH, SCORE_PATH
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.pooling_api.scoring import is_reranker
from pdserve.server.text.tokenizer import Tokenizer, built_in_names, read_template
from tests.unit.server.server_kit import ScriptedScheduler, bench, tiny_hf_tokenizer, token_ids

EMBEDS = EmbeddingConfig(is_embedding=True)
PICKED = -0.75
"""The scripted log probability of each label."""


@pytest.fixture
def reranker() -> Tokenizer:
    """A tokenizer with the template of a reranker, for which "yes" and "no" are tokens."""
    hf_tokenizer = tiny_hf_tokenizer()
    hf_tokenizer.add_tokens(["yes", "no"])
    return Tokenizer(hf_tokenizer, read_template("qwen3_reranker"))


def _script_labels(scheduler: ScriptedScheduler, scores: dict[int, float]) -> None:
    """Give the first label of a prompt of N tokens the probability `scores[N]`, and the second one the rest."""

    def picked(request: GenerateRequest) -> list[float]:
        own = scores.get(len(request.input_ids), 0.5)
        return [math.log(own), math.log(1 - own)]

    scheduler.picked = picked


async def test_labels_behind_query_and_items(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"query": "hello ", "items": ["world", "fox"], "label_token_ids": [5, 6, 7], "model": "m"}
        answer = (await b.http.post(SCORE_PATH, json=body)).json()
        shares = (await b.http.post(SCORE_PATH, json=body | {"apply_softmax": True, "item_first": True})).json()
        ids = {"query": [1, 2], "items": [[3], []], "label_token_ids": [5]}
        assert (await b.http.post(SCORE_PATH, json=ids)).status_code == 200
        requests = b.scheduler.requests
    assert answer["object"] == "scoring" and answer["model"] == "m"
    assert answer["scores"] == [[pytest.approx(math.exp(PICKED))] * 3] * 2
    assert shares["scores"] == [[pytest.approx(1 / 3)] * 3] * 2
    assert [request.input_ids for request in requests[:4]] == [
        token_ids(tokenizer, text) for text in ("hello world", "hello fox", "worldhello ", "foxhello ")
    ]
    assert [request.input_ids for request in requests[4:]] == [[1, 2, 3], [1, 2]]
    assert answer["usage"]["prompt_tokens"] == sum(len(request.input_ids) for request in requests[:2])
    assert all(request.sampling.max_new_tokens == 1 and request.sampling.greedy for request in requests)


async def test_a_reranker_ranks_by_yes_and_no(reranker: Tokenizer) -> None:
    documents = ["hello", "hello hello hello hello hello", "hello hello hello"]
    async with bench(reranker) as b:
        probe = await b.http.post(RERANK_PATH, json={"query": "fox", "documents": documents})
        sizes = [len(request.input_ids) for request in b.scheduler.requests]
        assert probe.status_code == 200 and len(set(sizes)) == 3
        _script_labels(b.scheduler, dict(zip(sizes, (0.2, 0.9, 0.6), strict=True)))
        whole = (await b.http.post(RERANK_PATH, json={"query": "fox", "documents": documents})).json()
        body = {"query": "fox", "documents": [{"text": text} for text in documents], "top_n": 2}
        best = (await b.http.post(COHERE_RERANK_PATH, json=body | {"return_documents": False})).json()
        scored = (await b.http.post(SCORE_PATH, json={"text_1": "fox", "text_2": documents})).json()
        request = b.scheduler.requests[0]
        told = await b.http.post(RERANK_PATH, json={"query": "fox", "documents": ["a"], "instruct": "Find."})
        assert told.status_code == 200
        last = b.scheduler.requests[-1]
    assert [result["index"] for result in whole["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in whole["results"]] == [pytest.approx(p) for p in (0.9, 0.6, 0.2)]
    assert whole["results"][0]["document"] == {"text": documents[1]}
    assert [result["index"] for result in best["results"]] == [1, 2] and "document" not in best["results"][0]
    assert [one["score"] for one in scored["data"]] == [pytest.approx(p) for p in (0.2, 0.9, 0.6)]
    assert scored["object"] == "list" and [one["object"] for one in scored["data"]] == ["score"] * 3
    text = reranker.decode(request.input_ids, skip_special=False)
    assert "<Query>: fox\n<Document>: hello<|im_end|>" in text and text.endswith("</think>\n\n")
    assert "<Instruct>: Given a web search query" in text
    assert "<Instruct>: Find.\n" in reranker.decode(last.input_ids, skip_special=False)


async def test_an_embedding_model_compares_vectors(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, embedding=EMBEDS) as b:
        body = {"query": "fox", "documents": ["fox", "hello world hello world"]}
        answer = (await b.http.post(RERANK_PATH, json=body)).json()
        assert len(b.scheduler.requests) == 2, "equal texts are computed once"
        pairs = {"text_1": ["fox", "hello world hello world"], "text_2": ["fox", "fox"]}
        scored = (await b.http.post(SCORE_PATH, json=pairs)).json()
        for field, refused in (
            ("label_token_ids", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
            ("instruct", {"text_1": "a", "text_2": "b", "instruct": "Find."}),
        ):
            other = await b.http.post(SCORE_PATH, json=refused)
            assert (other.status_code, other.json()["error"]["param"]) == (400, field)
    assert [result["index"] for result in answer["results"]] == [0, 1]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert scored["data"][0]["score"] == pytest.approx(1.0)
    assert scored["data"][1]["score"] == pytest.approx(answer["results"][1]["relevance_score"])


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (SCORE_PATH, {}, "label_token_ids"),
        (SCORE_PATH, {"query": "a", "items": ["b"]}, "label_token_ids"),
        (SCORE_PATH, {"query": "a", "items": ["b"], "label_token_ids": [320]}, "label_token_ids"),
        (SCORE_PATH, {"query": "a", "items": ["b"], "label_token_ids": [5] * 1025}, "label_token_ids"),
        (SCORE_PATH, {"items": ["b"], "label_token_ids": [5]}, "query"),
        (SCORE_PATH, {"query": "a", "items": [], "label_token_ids": [5]}, "items"),
        (SCORE_PATH, {"query": "a", "items": ["b", [5]], "label_token_ids": [5]}, "items[1]"),
        (SCORE_PATH, {"query": [5], "items": [[320]], "label_token_ids": [5]}, "items[0]"),
        (SCORE_PATH, {"text_1": "a", "text_2": ["b"], "query": "a"}, "query"),
        (SCORE_PATH, {"text_1": ["a", "b"], "text_2": ["b"]}, "text_1"),
        (SCORE_PATH, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (SCORE_PATH, {"text_1": "a"}, "text_2"),
        (RERANK_PATH, {"documents": ["a"]}, "query"),
        (RERANK_PATH, {"query": "a"}, "documents"),
        (RERANK_PATH, {"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        (RERANK_PATH, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        (RERANK_PATH, {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (RERANK_PATH, {"query": "a", "documents": ["a"]}, "documents"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], field: str
) -> None:
    """The last one is right, but the model is no reranker."""
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert not b.scheduler.requests


async def test_servers_of_a_pair_refuse(tokenizer: Tokenizer) -> None:
    for path, body in ((SCORE_PATH, {"text_1": "a", "text_2": "b"}), (RERANK_PATH, {"query": "a", "documents": ["b"]})):
        async with bench(tokenizer, "prefill") as b:
            answer = await b.http.post(path, json=body)
            assert answer.status_code == 400 and "prefill" in answer.text


def test_only_templates_with_both_roles_are_those_of_rerankers() -> None:
    assert [name for name in built_in_names() if is_reranker(read_template(name))] == ["qwen3_reranker"]
