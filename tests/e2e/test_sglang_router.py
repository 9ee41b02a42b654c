"""SGLang's real router before two prefill and two decode servers: what its clients see is what the monolith says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, running_monolith, start_server, until
from tests.e2e.sglang_router import SGLangRouter, running_sglang_router
from tests.tiny import Family

FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "8192", "--dtype", "float32")
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Deployment:
    """Two of each kind behind the real router, and the monolith with the same model."""

    prefill: tuple[Server, Server]
    decode: tuple[Server, Server]
    router: SGLangRouter
    monolith: Server

    @property
    def workers(self) -> tuple[Server, ...]:
        return (*self.prefill, *self.decode)

    def both(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """The router's answer and the monolith's; both must be 200."""
        answers = []
        for url in (self.router.url, self.monolith.url):
            answer = requests.post(f"{url}{path}", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        return answers[0], answers[1]


@pytest.fixture(scope="module")
def deployment(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Deployment]:
    model = str(tiny_checkpoint("qwen3"))
    prefill = tuple(start_server(model, "prefill", *FLAGS, name=f"prefill{i}") for i in range(2))
    decode = tuple(start_server(model, "decode", *FLAGS, name=f"decode{i}") for i in range(2))
    with (
        running_monolith(model, *FLAGS) as monolith,
        running(*prefill, *decode),
        running_sglang_router(prefill, decode, "--policy", "round_robin") as router,
    ):
        yield Deployment((prefill[0], prefill[1]), (decode[0], decode[1]), router, monolith)


def _events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    with requests.post(f"{url}{path}", json={**body, "stream": True}, stream=True, timeout=120) as answer:
        assert answer.status_code == 200, answer.text
        lines = [line.decode() for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_generate_whole_streamed_and_in_batches(deployment: Deployment) -> None:
    for body in (
        {"text": "The quick brown fox", "sampling_params": GREEDY},
        {"input_ids": [5, 6, 7, 8], "sampling_params": GREEDY},
    ):
        routed, direct = deployment.both("/generate", body)
        assert routed["output_ids"] == direct["output_ids"] and len(routed["output_ids"]) == 8
        events = _events(deployment.router.url, "/generate", body)
        assert events[-1]["text"] == direct["text"]
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    routed, direct = deployment.both("/generate", {"input_ids": [[5, 6, 7], [9, 10]], "sampling_params": GREEDY})
    assert [one["output_ids"] for one in routed] == [one["output_ids"] for one in direct]
    routed, direct = deployment.both("/generate", {"text": "two of", "sampling_params": {**GREEDY, "n": 2}})
    assert [one["output_ids"] for one in routed] == [one["output_ids"] for one in direct] and len(routed) == 2
    assert_idle(*deployment.workers)


def test_chat_and_completions_with_the_openai_client(deployment: Deployment) -> None:
    texts = []
    for url in (deployment.router.url, deployment.monolith.url):
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        common: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        messages: Any = [{"role": "user", "content": "Tell me of pages."}]
        whole = api.chat.completions.create(messages=messages, n=2, **common)
        chat = api.chat.completions.create(messages=messages, stream=True, **common)
        streamed = "".join(choice.delta.content or "" for event in chat for choice in event.choices)
        assert [choice.message.content for choice in whole.choices] == [streamed] * 2
        done = api.completions.create(prompt=["one", "two two"], n=2, **common)
        one = api.completions.create(prompt="one", logprobs=2, **common)
        assert one.choices[0].logprobs is not None and one.choices[0].text == done.choices[0].text
        parts = api.completions.create(prompt="one", stream=True, **common)
        assert "".join(part.choices[0].text for part in parts if part.choices) == one.choices[0].text
        texts.append([streamed, *(choice.text for choice in done.choices)])
        with pytest.raises(openai.BadRequestError):
            api.chat.completions.create(messages=messages, model="tiny", extra_body={"min_p": 7.0})
    assert texts[0] == texts[1]
    assert_idle(*deployment.workers)


def test_logprobs_of_prompt_and_answer_are_merged_into_one_sequence(deployment: Deployment) -> None:
    body = {
        "text": "The quick brown fox jumps",
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    routed, direct = (answer["meta_info"] for answer in deployment.both("/generate", body))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [row[1] for row in routed[name]] == [row[1] for row in direct[name]]
        values = [[row[0] for row in answer[name] if row[0] is not None] for answer in (routed, direct)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert len(routed["input_token_logprobs"]) == routed["prompt_tokens"]
    assert len(routed["output_token_logprobs"]) == 8


def test_many_at_once_reach_every_worker(deployment: Deployment) -> None:
    before = [server.counter("requests") for server in deployment.workers]
    bodies = [{"text": f"request number {i}", "sampling_params": GREEDY} for i in range(16)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = list(pool.map(lambda body: deployment.both("/generate", body), bodies))
    assert all(routed["output_ids"] == direct["output_ids"] for routed, direct in answers)
    after = [server.counter("requests") for server in deployment.workers]
    assert all(now > then for now, then in zip(after, before, strict=True)), (before, after)
    assert_idle(*deployment.workers)


def test_a_killed_worker_is_left_out(deployment: Deployment) -> None:
    """Last in this file: one decode server less."""
    deployment.decode[0].kill()
    left = sorted(server.url for server in (*deployment.prefill, deployment.decode[1]))
    until(lambda: deployment.router.healthy() == left, 60.0, "the router without the killed one")
    for i in range(4):
        routed, direct = deployment.both("/generate", {"text": f"after all {i}", "sampling_params": GREEDY})
        assert routed["output_ids"] == direct["output_ids"]
    assert_idle(*deployment.prefill, deployment.decode[1])
