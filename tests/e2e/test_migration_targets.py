"""Targets that cannot take a request, prefixes that are copied, stages, and retracted requests: on real servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_server, until
from tests.e2e.moves import Servers, assert_equal, greedy, migrate, refusal, seeded, servers
from tests.tiny import Family, make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = ("--dtype", "float32", "--max-total-tokens", "16384", "--disaggregation-transfer-backend", "shm")
CACHED = "--disaggregation-decode-enable-radix-cache"


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Servers]:
    """Two decode servers with a prefix cache; the prefill server has none."""
    flags = ("--disable-radix-cache",)
    with servers(str(tiny_checkpoint("llama")), [(CACHED,), (CACHED,)], *COMMON, prefill=flags) as made:
        yield made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory, pair: Servers) -> Iterator[dict[str, Server]]:
    """Decode servers of another model and of other weights, and a monolith of another role."""
    path = tmp_path_factory.mktemp("others")
    started = {
        "weights": start_server(str(make_tiny("llama", path / "w", seed=1)), "decode", *COMMON, name="weights"),
        "model": start_server(str(make_tiny("qwen3", path / "m")), "decode", *COMMON, name="model"),
        "monolith": start_server(str(make_tiny("llama", path / "n", seed=1)), "null", *COMMON, name="monolith"),
    }
    with running(*started.values()):
        yield started
        assert_idle(*started.values())


def nothing_listens() -> str:
    """The URL of a port that is closed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_request_goes_on_after_every_refusal(pair: Servers, strangers: dict[str, Server]) -> None:
    source = pair.decodes[0]
    expected = pair.run(source, seeded())
    targets = {
        strangers["weights"].url: {(409, "migration_refused", "weights")},
        strangers["model"].url: {(409, "migration_refused", name) for name in ("head_dim", "weights")},
        strangers["monolith"].url: {(409, "migration_refused", "disaggregation_mode")},
        pair.prefill.url: {(409, "migration_refused", "disaggregation_mode")},
        nothing_listens(): {(502, "migration_failed", "to")},
        "decode-2": {(400, "invalid_request", "to")},
        f"{source.url}/v1": {(400, "invalid_request", "to")},
        source.url: {(409, "migration_refused", "to")},
    }
    for target, errors in targets.items():

        def act(rid: str, target: str = target, errors: set[Any] = errors) -> None:
            assert refusal(migrate(source, rid, target)) in errors, target

        assert_equal(pair.run(source, seeded(), act), expected, target)
    assert_idle(pair.prefill, *pair.decodes, *strangers.values())


def test_a_copied_prefix_is_found_there(pair: Servers) -> None:
    """With and without a salt; a prefix of another salt is none."""
    source, target = pair.decodes
    for number, salt in enumerate(({}, {"cache_salt": "ours"})):
        body = greedy(8, 100, seed=7 + number) | salt
        expected = pair.run(source, body)
        asked = {"input_ids": body["input_ids"], "to": target.url, **salt}
        wrong = requests.post(f"{source.url}/replicate", json={**asked, "cache_salt": "theirs"}, timeout=60)
        assert refusal(wrong) == (404, "no_prefix", "input_ids")
        answer = requests.post(f"{source.url}/replicate", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_tokens"] == 96
        events = list(pair.events(target, body))
        assert events[-1]["meta_info"]["cached_tokens"] == 96
        assert events[-1]["output_ids"] == expected["ids"]
        other = list(pair.events(target, {**body, "cache_salt": "theirs"}))
        assert other[-1]["meta_info"]["cached_tokens"] == 0, "salts do not share pages"


def test_a_long_request_moves_in_stages(pair: Servers) -> None:
    source, target = pair.decodes
    sent = source.counter("prefixes_sent")
    (answer,) = pair.check_moves(source, target, greedy(300, 1500, seed=3))
    assert answer["num_stages"] >= 1
    assert source.counter("prefixes_sent") - sent == answer["num_stages"]


def test_a_retracted_request_moves(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Requests that grow beyond the memory of their server go on at another one, with the same tokens."""
    small = (*COMMON[:2], "--max-total-tokens", "512", *COMMON[4:])
    bodies = [greedy(300, 40, seed=seed) for seed in range(4)]
    with servers(str(tiny_checkpoint("llama")), [small, COMMON], prefill=COMMON) as made:
        source, target = made.decodes
        expected = [made.run(target, body)["ids"] for body in bodies]
        moved: list[dict[str, Any]] = []

        def act(rid: str) -> None:
            """Ask until the request was retracted and has moved, or ended."""

            def is_done() -> bool:
                if not source.metrics()["sglang:num_retracted_reqs"]:
                    return bool(source.state()["num_running_reqs"] == 0)
                answer = migrate(source, rid, target.url)
                moved.extend([answer.json()] * (answer.status_code == 200))
                return answer.status_code in (200, 404)

            until(is_done, 60, "the request has moved or ended")

        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(lambda body: made.run(source, body, act)["ids"], bodies))
        assert found == expected
        assert source.counter("requests_retracted") and moved
        assert target.counter("realtime_tokens.prefill_compute"), "the KV of one at least was computed again"
