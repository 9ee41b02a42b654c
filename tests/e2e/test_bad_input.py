"""What is wrong is refused by name, on real servers, and the servers go on serving."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import zmq

from tests.e2e.fuzzed_router import play_all
from tests.e2e.harness import Pair, Server, assert_idle, running, running_pair, start_server, until
from tests.hostile_http import REFUSED, error_of, send
from tests.tiny import Family, make_tiny

FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "8192")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    with running_pair(str(tiny_checkpoint("llama")), *FLAGS, "--strict-model-name") as started:
        yield started


def still_serves(pair: Pair) -> None:
    answer = requests.post(f"{pair.router.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.status_code == 200, answer.text
    assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.slow
def test_no_request_breaks_the_router(pair: Pair, count: int) -> None:
    seen = play_all(pair, count, all_paths=count > 10)
    assert seen[200] and seen[400], seen
    still_serves(pair)


@pytest.mark.parametrize(
    ("path", "change", "status", "field"),
    [
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"max_tokens": -1}, 400, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 100_000}, 400, "max_tokens"),
        ("/v1/chat/completions", {"temperature": -0.5}, 400, "temperature"),
        ("/v1/chat/completions", {"temperature": float("nan")}, 400, "temperature"),
        ("/v1/chat/completions", {"top_p": 0}, 400, "top_p"),
        ("/v1/chat/completions", {"model": "another"}, 404, "model"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/generate", {"input_ids": []}, 400, "input_ids"),
        ("/generate", {"input_ids": [5] * 5000}, 400, "context"),
        ("/generate", {"input_ids": [5], "sampling_params": {"top_k": -7}}, 400, "sampling_params.top_k"),
        ("/generate", {"input_ids": ["five"]}, 400, "input_ids"),
    ],
)
def test_bad_requests_through_the_router(
    pair: Pair, path: str, change: dict[str, Any], status: int, field: str
) -> None:
    body = (CHAT if "chat" in path else {"model": "tiny"} if "completions" in path else {}) | change
    answer = requests.post(f"{pair.router.url}{path}", json=None, data=_json(body), headers=JSON, timeout=30)
    assert answer.status_code == status, answer.text
    assert field in answer.text
    still_serves(pair)


LARGE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a b " * 500_000}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 500_000}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 5000}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 4096, "n": 3}, "n"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 100_000}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 100_000}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 100_000}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 500_000}]}, "messages"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 10_000}, "input"),
    ("/generate", {"text": "a b " * 500_000}, "text"),
    ("/tokenize", {"prompt": "a b " * 1_000_000}, "prompt"),
]
"""Path, body, and the field that the refusal names."""


def test_a_client_on_every_port_changes_nothing(pair: Pair) -> None:
    """Each hostile request has its status, and afterwards all counts and answers are what they were."""
    servers = (pair.router, pair.prefill, pair.decode)
    still_serves(pair)
    before = [server.state()["memory"] for server in (pair.prefill, pair.decode)]
    ask = functools.partial(requests.post, f"{pair.router.url}/v1/chat/completions", json=CHAT | {"temperature": 0})
    first = ask(timeout=60).json()["choices"]
    for server in servers:
        port = int(server.url.rpartition(":")[2])
        for name, (data, status, code) in REFUSED.items():
            found, answer = asyncio.run(send(port, data))
            assert found == status or (name == "a long path" and found == 414), (name, answer[:300])
            assert code is None or error_of(answer)["code"] == code, (name, answer[:300])
        for path, body, field in LARGE:
            rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
            answered = requests.post(f"{server.url}{path}", json=body | rooms, timeout=60)
            assert (answered.status_code, answered.json()["error"]["param"]) == (400, field), answered.text[:300]
    fake = {"text": "a", "bootstrap_host": "2.2.2.2", "bootstrap_port": 1, "bootstrap_room": 5}
    for direct in (pair.prefill, pair.decode):
        refused = requests.post(f"{direct.url}/generate", json=fake, timeout=30)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_host")
    still_serves(pair)
    changing = ("pages_free", "pages_cached", "pages_evictable")  # by what the prefix cache keeps of good requests
    for server, held in zip((pair.prefill, pair.decode), before, strict=True):
        now = server.state()["memory"]
        assert {name: now[name] for name in now if name not in changing} == {
            name: held[name] for name in held if name not in changing
        }
    assert ask(timeout=60).json()["choices"] == first


JSON = {"content-type": "application/json"}


def _json(body: dict[str, Any]) -> str:
    import json

    return json.dumps(body, allow_nan=True)


def test_malformed_json(pair: Pair) -> None:
    for url in (pair.router.url, pair.prefill.url, pair.decode.url):
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            answer = requests.post(url + path, data="{nope", headers=JSON, timeout=30)
            assert answer.status_code == 400, (url, path, answer.text)
    still_serves(pair)


@pytest.mark.parametrize(
    ("rooms", "field"),
    [
        ({}, "bootstrap_room"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1.5}, "bootstrap_room"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": [1, 2]}, "bootstrap_room"),
    ],
)
def test_bad_rooms_at_the_workers(pair: Pair, rooms: dict[str, Any], field: str) -> None:
    for server in (pair.prefill, pair.decode):
        answer = requests.post(f"{server.url}/generate", json={"input_ids": [5, 6], **rooms}, timeout=30)
        assert answer.status_code == 400, answer.text
        assert field in answer.text
    still_serves(pair)


def test_a_batch_whose_rooms_differ_in_number(pair: Pair) -> None:
    rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": [1, 2, 3]}
    for server in (pair.prefill, pair.decode):
        answer = requests.post(f"{server.url}/generate", json={"input_ids": [[5], [6]], **rooms}, timeout=30)
        assert answer.status_code == 400
        assert "bootstrap_room" in answer.text
    still_serves(pair)


def test_a_live_room_is_refused_with_409(pair: Pair) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "first", "sampling_params": {"max_new_tokens": 2}}
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": 42}
    for room, server in ((42, pair.prefill), (43, pair.decode)):
        body["bootstrap_room"] = room
        first = threading.Thread(
            target=lambda server=server: requests.post(f"{server.url}/generate", json=body, timeout=60)
        )
        first.start()
        until(lambda server=server: server.state()["memory"]["rooms_live"] == 1, 20, "the first request's room")
        second = requests.post(f"{server.url}/generate", json=body | {"rid": "second"}, timeout=30)
        assert second.status_code == 409, second.text
        assert str(room) in second.text
        requests.post(f"{server.url}/abort_request", json={"rid": "first"}, timeout=30)
        first.join(timeout=30)
        assert not first.is_alive()
    still_serves(pair)


def test_junk_on_the_control_port_is_counted(pair: Pair) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for server in (pair.prefill, pair.decode):
        before = server.state()["counters"].get("control_frames_refused", 0)
        socket = context.socket(zmq.PUSH)
        socket.connect(f"tcp://{server.state()['facts']['control_endpoint']}")
        for frame in (b"", b"junk", b"\x80\x04\x95pickle", bytes(200)):
            socket.send(frame)
        until(
            lambda server=server, before=before: (
                server.state()["counters"].get("control_frames_refused", 0) == before + 4
            ),
            20,
            "four refusals",
        )
        socket.close(linger=0)
        assert "control_frames_refused" in requests.get(f"{server.url}/metrics", timeout=30).text
    context.term()
    still_serves(pair)


def test_junk_on_the_bootstrap_server_is_refused_by_field_and_counted(pair: Pair) -> None:
    url = f"http://127.0.0.1:{pair.prefill.bootstrap_port}/route"
    assert requests.put(url, data=b"\x80junk", timeout=10).status_code in (400, 401)
    wrong = {"instance": "x", "host": "h", "port": "seven", "page_size": 1, "kv_cache_dtype": "a", "model": "m"}
    answer = requests.put(url, json=wrong, timeout=10)
    assert answer.status_code == 400
    assert "port" in answer.text
    metrics = requests.get(f"{pair.prefill.url}/metrics", timeout=30).text
    line = next(line for line in metrics.splitlines() if "bootstrap_routes_refused" in line and line[0] != "#")
    assert float(line.rsplit(" ", 1)[1]) >= 2
    still_serves(pair)


@contextlib.contextmanager
def stranger(pair: Pair, model: str, *flags: str) -> Iterator[Server]:
    decode = start_server(model, "decode", *FLAGS, *flags, name="stranger")
    with running(decode):
        yield decode


@pytest.mark.parametrize(
    ("field", "flags", "overrides"),
    [
        ("page_size", ("--page-size", "32"), {}),
        pytest.param("kv_cache_dtype", ("--dtype", "bfloat16"), {}, marks=pytest.mark.slow),
        pytest.param("kv_cache_dtype", ("--kv-cache-dtype", "int8"), {}, marks=pytest.mark.slow),
        pytest.param("num_layers", (), {"num_hidden_layers": 2}, marks=pytest.mark.slow),
        ("model", (), {"intermediate_size": 128}),
        ("pp_size", ("--pp-size", "2"), {}),
    ],
)
def test_a_peer_that_differs_is_refused_by_the_name_of_the_field(
    pair: Pair,
    tmp_path: Path,
    tiny_checkpoint: Callable[[Family], Path],
    field: str,
    flags: tuple[str, ...],
    overrides: dict[str, Any],
) -> None:
    model = str(make_tiny("llama", tmp_path, **overrides) if overrides else tiny_checkpoint("llama"))
    refused = pair.prefill.state()["counters"].get("handshakes_refused", 0)
    rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": 4711}
    with stranger(pair, model, *flags) as decode:
        answer = requests.post(f"{decode.url}/generate", json={"input_ids": [5, 6], **rooms}, timeout=10)
        assert answer.status_code == 500, answer.text
        assert field in answer.text
        for server in (decode, pair.prefill):
            assert field in server.state()["facts"]["last_handshake_refusal"]
        assert_idle(decode)
    assert pair.prefill.state()["counters"]["handshakes_refused"] > refused
    still_serves(pair)
