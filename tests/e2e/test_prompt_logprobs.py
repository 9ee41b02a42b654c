"""Log probabilities of prompts through a pair: transformers', the monolith's, cold and cached, on every endpoint; and
commands to running servers.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.e2e.harness import Pair, Server, assert_idle, running, start_router, start_server, until
from tests.reference import load_reference, reference_logits
from tests.tiny import VOCAB_SIZE, make_tiny

FLAGS = ("--dtype", "float32", "--page-size", "16", "--chunked-prefill-size", "64")
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
LENGTHS = (2, 50, 700)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A pair behind a router, the monolith, and what transformers says of each prompt."""

    pair: Pair
    monolith: Server
    prompts: list[list[int]]
    expected: list[torch.Tensor]

    def both(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """The pair's answer and the monolith's."""
        answers = [requests.post(f"{url}{path}", json=body, timeout=120) for url in (self.pair.url, self.monolith.url)]
        assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
        return answers[0].json(), answers[1].json()

    def own(self, index: int) -> list[float]:
        """Of each token of a prompt but its first."""
        lines = self.expected[index]
        return [float(lines[i, token]) for i, token in enumerate(self.prompts[index][1:])]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    loaded = load_reference(model)
    expected = [reference_logits(loaded, prompt).log_softmax(-1) for prompt in prompts]
    prefill, decode = (start_server(str(model), mode, *FLAGS) for mode in ("prefill", "decode"))
    monolith = start_server(str(model), "null", *FLAGS, name="monolith")
    with running(prefill, decode, monolith):
        router = start_router([prefill], [decode])
        with running(router):
            yield Deployment(Pair(prefill, decode, router), monolith, prompts, expected)


def _close(one: list[Any], other: list[Any], tolerance: float = 1e-5) -> None:
    assert len(one) == len(other)
    assert [value is None for value in one] == [value is None for value in other]
    values = [[value for value in values if value is not None] for values in (one, other)]
    assert values[0] == pytest.approx(values[1], abs=tolerance)


@pytest.mark.slow
def test_lm_eval_scores_continuations_through_the_router(deployment: Deployment) -> None:
    """The very request that lm-eval's `local-completions` sends, cold and cached; alone and as a list."""
    for index, prompt in enumerate(deployment.prompts):
        for form in (prompt, [prompt]):
            body = {"prompt": form, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
            routed, direct = (answer["choices"][0]["logprobs"] for answer in deployment.both("/v1/completions", body))
            _close(routed["token_logprobs"], direct["token_logprobs"])
            _close(routed["token_logprobs"][:-1], [None, *deployment.own(index)], 1e-3)
            assert routed["tokens"] == direct["tokens"] and len(routed["tokens"]) == len(prompt) + 1
            assert routed["text_offset"] == direct["text_offset"] == sorted(routed["text_offset"])
            best = deployment.expected[index].max(-1).values.tolist()
            assert [max(top.values()) for top in routed["top_logprobs"][1:]] == pytest.approx(best, abs=1e-3)
            for logprob, top in zip(routed["token_logprobs"][1:], routed["top_logprobs"][1:], strict=True):
                assert logprob in top.values(), "is_greedy compares for equality"
    assert_idle(*deployment.pair.workers, deployment.monolith)


def test_the_prompt_alone(deployment: Deployment) -> None:
    body = {"prompt": "The quick brown fox", "max_tokens": 0, "logprobs": 0, "echo": True}
    for answer in deployment.both("/v1/completions", body):
        choice = answer["choices"][0]
        assert choice["text"] == "The quick brown fox" and choice["finish_reason"] == "length"
        assert "".join(choice["logprobs"]["tokens"]) == "The quick brown fox"
        assert answer["usage"]["completion_tokens"] == 0
        assert choice["logprobs"]["token_logprobs"][0] is None
    routed, direct = deployment.both("/generate", {"text": "The fox", "sampling_params": {"max_new_tokens": 0}})
    assert routed["output_ids"] == direct["output_ids"] == [] and routed["text"] == ""
    assert routed["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    chat = {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 0, "n": 2}
    for answer in deployment.both("/v1/chat/completions", chat):
        assert [(one["message"]["content"], one["finish_reason"]) for one in answer["choices"]] == [("", "length")] * 2
    assert_idle(*deployment.pair.workers, deployment.monolith)


@pytest.mark.parametrize("start", [0, 3, 49, 50])
def test_generate_in_sglangs_shapes(deployment: Deployment, start: int) -> None:
    prompt, expected = deployment.prompts[1], deployment.expected[1]
    ids = [7, 200]
    body = {
        "input_ids": prompt,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "token_ids_logprob": ids,
    }
    metas = [answer["meta_info"] for answer in deployment.both("/generate", body)]
    for meta in metas:
        own = meta["input_token_logprobs"]
        assert [row[1] for row in own] == prompt[start:]
        _close([row[0] for row in own], [None, *deployment.own(1)[start:]][: len(own)], 1e-3)
        tops, picks = meta["input_top_logprobs"], meta["input_token_ids_logprobs"]
        assert len(tops) == len(picks) == len(prompt) - start and [*tops[:1], *picks[:1]] in ([None, None], [])
        for place, (top, pick) in enumerate(zip(tops[1:], picks[1:], strict=True), start=start):
            assert [row[1] for row in top] == expected[place].topk(2).indices.tolist()
            assert [row[1] for row in pick] == ids
            assert [row[0] for row in pick] == pytest.approx(expected[place][ids].tolist(), abs=1e-3)
        assert [len(meta[f"output_{name}"]) for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")] == [
            4
        ] * 3
        first = [row[0] for row in meta["output_token_ids_logprobs"][0]]
        assert first == pytest.approx(expected[-1][ids].tolist(), abs=1e-3), "the first token's came beside the KV"
    for name, value in metas[1].items():
        if name.endswith("_logprobs"):
            assert json.dumps(metas[0][name])[:40] == json.dumps(value)[:40]
    assert_idle(*deployment.pair.workers, deployment.monolith)


def test_only_the_output_unless_asked(deployment: Deployment) -> None:
    body = {"input_ids": deployment.prompts[1], "sampling_params": GREEDY, "return_logprob": True}
    for answer in deployment.both("/generate", body):
        assert answer["meta_info"]["input_token_logprobs"] == []
        assert len(answer["meta_info"]["output_token_logprobs"]) == 4


def test_128_top_logprobs_of_every_token_the_first_one_s_beside_the_kv(deployment: Deployment) -> None:
    body = {"input_ids": deployment.prompts[1], "sampling_params": GREEDY, "return_logprob": True}
    tops = [
        answer["meta_info"]["output_top_logprobs"]
        for answer in deployment.both("/generate", {**body, "top_logprobs_num": 128})
    ]
    assert [[len(rows) for rows in top] for top in tops] == [[128] * 4] * 2
    assert [row[1] for row in tops[0][0]] == [row[1] for row in tops[1][0]]
    expected = deployment.expected[1][-1].topk(128).values.tolist()
    assert [row[0] for row in tops[0][0]] == pytest.approx(expected, abs=1e-3)


def test_batches_and_streams_have_the_prompts_as_well(deployment: Deployment) -> None:
    prompts = deployment.prompts[:2]
    logprob_params = {"return_logprob": True, "logprob_start_len": [0, 5], "sampling_params": GREEDY}
    for answers in deployment.both("/generate", {"input_ids": prompts, **logprob_params}):
        assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [2, 45]
    body = {"input_ids": prompts[1], **logprob_params, "logprob_start_len": 5, "stream": True}
    for url in (deployment.pair.url, deployment.monolith.url):
        lines = requests.post(f"{url}/generate", json=body, timeout=60).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert all(len(event["meta_info"]["input_token_logprobs"]) == 45 for event in events)
        assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 4
    body = {"prompt": prompts[1], "stream": True, "echo": True, "logprobs": 1, "max_tokens": 3, "ignore_eos": True}
    for url in (deployment.pair.url, deployment.monolith.url):
        lines = requests.post(f"{url}/v1/completions", json=body, timeout=60).text.split("\n\n")
        choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in lines if one and "[DONE]" not in one]
        assert len(choices[0]["logprobs"]["tokens"]) == 50 and choices[0]["text"]
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 53
    assert_idle(*deployment.pair.workers, deployment.monolith)


def test_vllms_prompt_logprobs(deployment: Deployment) -> None:
    prompt, expected = deployment.prompts[1], deployment.expected[1]
    body = {"prompt": prompt, "prompt_logprobs": 2, "max_tokens": 2, "n": 2}
    for answer in deployment.both("/v1/completions", body):
        for choice in answer["choices"]:
            assert choice["logprobs"] is None
            lines = choice["prompt_logprobs"]
            assert lines[0] is None and len(lines) == 50
            for place, line in enumerate(lines[1:]):
                own = line[str(prompt[place + 1])]
                assert own["rank"] == int((expected[place] > expected[place, prompt[place + 1]]).sum()) + 1
                assert {str(token) for token in expected[place].topk(2).indices.tolist()} <= line.keys()
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0, "max_tokens": 2}
    for answer in deployment.both("/v1/chat/completions", chat):
        assert answer["choices"][0]["logprobs"] is None
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert all(len(line) == 1 for line in answer["prompt_logprobs"][1:])


def test_best_of_answers_the_best(deployment: Deployment) -> None:
    body = {"prompt": "Once", "n": 2, "best_of": 6, "seed": 3, "max_tokens": 5, "logprobs": 0, "temperature": 1.5}
    for answer in deployment.both("/v1/completions", body):
        means = [sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1] and means[0] >= means[1]
        assert answer["usage"]["completion_tokens"] == 30
    assert_idle(*deployment.pair.workers, deployment.monolith)


def test_commands_to_a_running_pair(deployment: Deployment, tmp_path: Path) -> None:
    """Paused and retracted in the midst of an answer, the tokens are those of one that was left alone."""
    decode = deployment.pair.decode
    body = {"input_ids": deployment.prompts[1], "sampling_params": {**GREEDY, "max_new_tokens": 600}}
    expected = requests.post(f"{deployment.monolith.url}/generate", json=body, timeout=60).json()["output_ids"]
    profile = {"output_dir": str(tmp_path), "activities": ["CPU"], "profile_id": "p", "num_steps": 20}
    assert requests.post(f"{decode.url}/start_profile", json=profile, timeout=60).status_code == 200
    with ThreadPoolExecutor() as pool:
        for mode in ("retract", "in_place"):
            answer = pool.submit(requests.post, f"{deployment.pair.url}/generate", json=body, timeout=120)
            until(lambda: decode.state()["num_running_reqs"] == 1, 30.0, "it runs")
            assert requests.post(f"{decode.url}/pause_generation", json={"mode": mode}, timeout=60).status_code == 200
            assert decode.state()["num_running_reqs"] == (1 if mode == "in_place" else 0)
            busy = requests.post(f"{decode.url}/flush_cache", timeout=60).status_code
            assert busy == (200 if mode == "retract" else 400)
            assert requests.post(f"{decode.url}/continue_generation", timeout=60).status_code == 200
            assert answer.result().json()["output_ids"] == expected
    until((tmp_path / "p-decode-DP-0.trace.json.gz").exists, 60.0, "it ended by itself after so many steps")
    assert requests.post(f"{decode.url}/stop_profile", timeout=60).status_code == 400
    assert len(requests.get(f"{decode.url}/v1/loads", timeout=30).json()["loads"]) == 1
    assert_idle(*deployment.pair.workers, deployment.monolith)
