"""A router of policy kv_aware before real servers: a prompt goes where it is cached, however it came there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.adapters import write_adapter
from tests.e2e.harness import Server, running, start_router, start_server
from tests.tiny import VOCAB_SIZE, Family
from tests.waiting import wait_until

PAGE = 16
EVENTS = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0"}
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE), "--kv-events-config", json.dumps(EVENTS))
POLICY = ("--policy", "kv_aware", "--log-level", "info")


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(6 * PAGE)]


def cached_tokens(url: str, input_ids: list[int], **fields: Any) -> int:
    """Generate; returns how many tokens of the prompt were cached."""
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, **fields}
    answer = requests.post(f"{url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


def wait_for_index(router: Server, *servers: Server) -> None:
    """Wait until the router knows as many blocks as the servers have cached."""

    def agrees() -> bool:
        listed = requests.get(f"{router.url}/workers", timeout=10).json()["workers"]
        known = {entry["url"]: entry.get("kv_events") for entry in listed}
        states = {server.url: server.state() for server in servers}
        return all(
            known[url]["followed"] and known[url]["num_blocks"] == state["memory"]["pages_cached"]
            for url, state in states.items()
        )

    wait_until(agrees, "the router has the servers' events", pause_s=0.05)


@pytest.fixture(scope="module")
def servers(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[list[Server]]:
    model = str(tiny_checkpoint("llama"))
    flags = (*FLAGS, "--enable-lora")
    started = [start_server(model, "null", *flags, name=f"monolith {n}") for n in range(2)]
    with running(*started):
        yield started


@pytest.fixture(scope="module")
def router(servers: list[Server]) -> Iterator[Server]:
    urls = [server.url for server in servers]
    argv = ["--port", "0", "--health-check-interval", "1", "--worker-urls", *urls, *POLICY]
    started = Server("router", "pdserve.launch_router", argv)
    with running(started):
        yield started


@pytest.mark.slow
def test_a_prompt_goes_where_it_is_cached_and_not_where_it_was_sent(servers: list[Server], router: Server) -> None:
    """The first server gets prompts behind the router's back; then it forgets them, and the second one has them."""
    first, second = servers
    plain, salted = prompt(1), prompt(2)
    assert cached_tokens(first.url, plain) == 0
    assert cached_tokens(first.url, salted, cache_salt="tenant") == 0
    wait_for_index(router, first, second)
    for _ in range(4):
        assert cached_tokens(router.url, plain) == 5 * PAGE, "at least one token is computed"
        assert cached_tokens(router.url, salted, cache_salt="tenant") == 5 * PAGE
    assert second.state()["memory"]["pages_cached"] == 0
    assert requests.post(f"{first.url}/flush_cache?timeout=20", timeout=30).status_code == 200
    assert cached_tokens(second.url, plain) == 0
    wait_for_index(router, first, second)
    for _ in range(4):
        assert cached_tokens(router.url, plain) == 5 * PAGE
    assert first.state()["memory"]["pages_cached"] == 0, "cache_aware would have sent them there"


@pytest.mark.slow
def test_chats_and_prompts_of_adapters_go_where_they_are_cached(
    servers: list[Server], router: Server, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """The adapter is loaded while the router follows the servers, which changes their keys."""
    _, second = servers
    chat = {"messages": [{"role": "user", "content": "one two three four five " * 20}], "max_tokens": 1}

    def cached_of_chat(url: str) -> int:
        answer = requests.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_of_chat(second.url) == 0
    adapter = write_adapter(tmp_path / "poet", tiny_checkpoint("llama"))
    loaded = {"lora_name": "poet", "lora_path": str(adapter)}
    assert requests.post(f"{router.url}/load_lora_adapter", json=loaded, timeout=60).status_code == 200
    given = prompt(7)
    assert cached_tokens(second.url, given, lora_path="poet") == 0
    wait_for_index(router, *servers)

    def hits() -> bool:
        return cached_tokens(router.url, given, lora_path="poet") == 5 * PAGE

    for _ in range(4):
        assert cached_of_chat(router.url) > 5 * PAGE
    wait_until(hits, "the router knows the adapter")
    assert all(hits() for _ in range(4))
    assert cached_tokens(router.url, given) == 0, "the model itself"


@pytest.mark.slow
def test_the_prefill_server_of_a_pair_is_chosen_by_its_cache(tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = str(tiny_checkpoint("llama"))
    prefills = [start_server(model, "prefill", *FLAGS, name=f"prefill {n}") for n in range(2)]
    decode = start_server(model, "decode", *FLAGS[:4])
    with running(*prefills, decode):
        router = start_router(prefills, [decode], "--prefill-policy", "kv_aware")
        with running(router):
            given = [prompt(seed) for seed in range(6)]
            for one in given:
                assert cached_tokens(router.url, one) == 0
            wait_for_prefills(router, prefills)
            computed = [server.state()["memory"]["pages_cached"] for server in prefills]
            for one in given:
                assert cached_tokens(router.url, one) == 5 * PAGE
            assert [server.state()["memory"]["pages_cached"] for server in prefills] == computed
            prefills[0].kill()
            for one in given:
                assert cached_tokens(router.url, one) in (0, 5 * PAGE)


def wait_for_prefills(router: Server, prefills: list[Server]) -> None:
    """Like `wait_for_index`; a server keeps a request's pages until decode has them."""
    wait_until(lambda: all(server.state()["num_running_reqs"] == 0 for server in prefills), "prefill is idle")
    wait_for_index(router, *prefills)
