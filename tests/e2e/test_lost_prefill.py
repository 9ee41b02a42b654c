"""Prefill servers are killed while they compute prompts: another one takes the requests, and behind the last one decode
computes the prompts itself. Every answer is what it would have been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = (
    "--max-total-tokens", "65536", "--enable-deterministic-inference", "--chunked-prefill-size", "8",
    "--disaggregation-transfer-backend", "shm",
)  # fmt: skip
PROMPTS = [[5 + number, *(7 + (number + i * i) % 90 for i in range(1500))] for number in range(6)]


@pytest.fixture(scope="module")
def farm(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[tuple[list[Server], Server, Server]]:
    """Two prefill servers, a decode server that recomputes, a router."""
    model = str(tiny_checkpoint("llama"))
    with contextlib.ExitStack() as stack:
        prefills = [start_server(model, "prefill", *FLAGS, "--disable-radix-cache") for _ in range(2)]
        decode = start_server(model, "decode", *FLAGS, "--disaggregation-load-failure-policy", "recompute")
        stack.enter_context(running(*prefills, decode))
        router = start_router(prefills, [decode], "--prefill-policy", "round_robin", "--connect-timeout", "2")
        stack.enter_context(running(router))
        yield prefills, decode, router


def ask(url: str, prompt: list[int]) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    answer = requests.post(f"{url}/generate", json=body, timeout=400)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


def test_prompts_are_computed_elsewhere_when_their_prefill_server_is_killed(farm: Any) -> None:
    prefills, decode, router = farm
    expected = [ask(router.url, prompt) for prompt in PROMPTS]
    for victim in prefills:  # the second time nothing but decode is left
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(ask, router.url, prompt) for prompt in PROMPTS]
            until(lambda victim=victim: victim.state()["num_running_reqs"] > 0, 120, "prompts under way")
            victim.kill()
            assert [answer.result() for answer in answers] == expected
        recomputed = decode.counter("kv_loads_recomputed")
        assert recomputed == 0 if victim is prefills[0] else recomputed > 0
        assert_idle(decode, deadline_s=60)
