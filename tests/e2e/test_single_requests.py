"""Clients that know only a decode server: it sends the prefill half itself (`--disaggregation-prefill`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, running_monolith, start_server, until
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = (
    "--max-total-tokens", "65536", "--enable-deterministic-inference", "--chunked-prefill-size", "64",
    "--disaggregation-transfer-backend", "shm",
)  # fmt: skip
PROMPTS = [[5 + number, *(7 + (number + i * i) % 90 for i in range(100 + 40 * number))] for number in range(6)]
LONG = [9, *(7 + (3 * i * i) % 90 for i in range(4000))]


def body(prompt: Any, **sampling: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True, **sampling},
    }


def ask(url: str, given: dict[str, Any], **options: Any) -> Any:
    answer = requests.post(f"{url}/generate", json=given, timeout=200, **options)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [one["output_ids"] for one in found] if isinstance(found, list) else found["output_ids"]


@contextlib.contextmanager
def farm(
    model: str, prefills: Sequence[Sequence[str]], decode: Sequence[str] = (), key: str | None = None
) -> Iterator[tuple[list[Server], Server]]:
    """Prefill servers with these flags, and a decode server that names them."""
    started = [start_server(model, "prefill", *FLAGS, *flags) for flags in prefills]
    for server in started:
        server.headers = {"Authorization": f"Bearer {key}"} if key else {}
    with running(*started):
        urls = [server.url for server in started]
        named = start_server(model, "decode", *FLAGS, *decode, "--disaggregation-prefill", *urls)
        with running(named):
            yield started, named


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """What one aggregated server gives."""
    with running_monolith(model, *FLAGS[:-2]) as server:
        return {
            "alone": [ask(server.url, body(prompt)) for prompt in PROMPTS],
            "several": ask(server.url, body(PROMPTS[:2], n=2, temperature=1.0, sampling_seed=3)),
            "long": ask(server.url, body(LONG)),
        }


def test_batches_streams_aborts_and_a_killed_server(model: str, expected: dict[str, Any]) -> None:
    early = ("--optimistic-prefill-attempts", "2")
    with farm(model, [early, ("--disable-radix-cache",)], ("--disaggregation-prefill-choice", "round_robin")) as (
        prefills,
        decode,
    ):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: ask(decode.url, body(prompt)), PROMPTS)) == expected["alone"]
        assert ask(decode.url, body(PROMPTS[:2], n=2, temperature=1.0, sampling_seed=3)) == expected["several"]
        with requests.post(f"{decode.url}/generate", json=body(PROMPTS[0]) | {"stream": True}, stream=True) as stream:
            events = [line.removeprefix(b"data: ") for line in stream.iter_lines() if line]
        assert json.loads(events[-2])["output_ids"] == expected["alone"][0]
        known = decode.state()["prefill_servers"]
        assert [one["bootstrap_port"] for one in known] == [server.bootstrap_port for server in prefills]
        assert all(one["results"]["ok"] for one in known)

        with contextlib.suppress(requests.Timeout):
            requests.post(f"{decode.url}/generate", json=body(LONG, max_new_tokens=4), timeout=0.1)
        assert_idle(decode, *prefills)

        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, decode.url, body(LONG)) for _ in range(2)]
            until(lambda: prefills[1].state()["num_running_reqs"] > 0, 60, "the prompt is computed")
            prefills[1].kill()
            assert [answer.result() for answer in answers] == [expected["long"]] * 2
        prefills[0].kill()
        refused = requests.post(f"{decode.url}/generate", json=body(PROMPTS[0]), timeout=60)
        assert refused.status_code in (502, 503) and prefills[0].url in refused.text, refused.text
        assert_idle(decode, deadline_s=60)


def test_keys_and_unequal_ranks(model: str, expected: dict[str, Any]) -> None:
    with farm(
        model,
        [
            (
                "--api-key",
                "inner",
                "--tp-size",
                "2",
                "--no-enable-deterministic-inference",
                "--optimistic-prefill-attempts",
                "1",
            )
        ],
        ("--disaggregation-prefill-api-key", "inner", "--no-enable-deterministic-inference"),
        key="inner",
    ) as (prefills, decode):
        assert [ask(decode.url, body(prompt)) for prompt in PROMPTS] == expected["alone"]
        assert_idle(decode, *prefills)
