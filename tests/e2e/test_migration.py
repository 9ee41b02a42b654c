"""Running streams move between decode servers, and their clients get the tokens as if nothing had moved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.base.stream_state import EVENT_END, STATE_HEADER, EventState, split_event
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server
from tests.e2e.test_retry_streams import CALLS, FLAGS, gist
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAST = (b"data: [DONE]", b'data: {"type":"message_stop"}')
"""The last event of a stream."""


class Cluster:
    """A prefill server, two decode servers, and a router before them."""

    def __init__(self, prefill: Server, decodes: list[Server], router: Server) -> None:
        self.prefill, self.decodes, self.router = prefill, decodes, router

    def move(self, rid: str, **more: Any) -> list[dict[str, Any]]:
        """Ask both decode servers to move a request to the other one; the answers of those that have it."""
        found = []
        for server, other in (self.decodes, self.decodes[::-1]):
            answer = requests.post(f"{server.url}/migrate", json={"rid": rid, "to": other.url, **more}, timeout=60)
            if answer.status_code != 404:
                found.append(answer.json() | {"status": answer.status_code})
        return found

    def stream(self, path: str, body: dict[str, Any], at: int | None = None) -> tuple[dict[str, Any], list[Any]]:
        """A stream's content, and the answers to `/migrate`, which is asked after event number `at`."""
        found: list[dict[str, Any]] = []
        moves: list[Any] = []
        with requests.post(self.router.url + path, json={**body, "stream": True}, stream=True, timeout=120) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if not line.startswith(b"data: ") or line in LAST:
                    continue
                found.append(json.loads(line.removeprefix(b"data: ")))
                if len(found) == at:
                    moves += self.move(body["rid"])
        return gist(path, found), moves


def start(model: str, *flags: str, decode_flags: tuple[str, ...] = ()) -> Iterator[Cluster]:
    prefill = start_server(model, "prefill", *flags)
    decodes = [start_server(model, "decode", *flags, *decode_flags) for _ in range(2)]
    with running(prefill, *decodes):
        router = start_router([prefill], decodes)
        with running(router):
            yield Cluster(prefill, decodes, router)


@pytest.fixture(scope="module")
def cluster(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Cluster]:
    yield from start(str(tiny_checkpoint("llama")), *FLAGS)


def test_a_stream_moves_and_its_client_gets_the_same_tokens(cluster: Cluster) -> None:
    path, body = CALLS["native"]
    body = {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 60}}
    expected, _ = cluster.stream(path, {**body, "rid": "a"})
    found, moves = cluster.stream(path, {**body, "rid": "b"}, at=8)
    assert [move["status"] for move in moves] == [200], moves
    assert moves[0]["num_tokens"] >= 8 and moves[0]["migrated_rid"]
    assert found == expected
    assert sum(server.counter("migrations_out") for server in cluster.decodes) == 1
    assert_idle(cluster.prefill, *cluster.decodes)


def test_all_kinds_of_requests_move(cluster: Cluster) -> None:
    calls = {name: call for name, call in CALLS.items() if name not in ("tools", "ollama")}
    expected = {name: cluster.stream(path, body)[0] for name, (path, body) in calls.items()}

    def run(name: str) -> tuple[dict[str, Any], list[Any]]:
        path, body = calls[name]
        return cluster.stream(path, {**body, "rid": f"{name}-x"}, at=9)

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = dict(zip(calls, pool.map(run, calls), strict=True))
    for name, (found, moves) in answers.items():
        assert [move["status"] for move in moves] == [200], (name, moves)
        assert found == expected[name], name
    assert_idle(cluster.prefill, *cluster.decodes)


def states(answer: requests.Response) -> Iterator[tuple[EventState | None, bytes]]:
    """The events of a stream with resume state."""
    rest = b""
    for chunk in answer.iter_content(None):
        *events, rest = (rest + chunk).split(EVENT_END)
        yield from map(split_event, events)


def test_a_stream_goes_on_at_the_other_server(cluster: Cluster) -> None:
    """As a router does it: S ends its stream, and the rest is opened at D by the number of tokens."""
    path, body = CALLS["native"]
    body = {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 60}, "stream": True}
    expected, _ = cluster.stream(path, {**body, "rid": "a"})
    source, target = cluster.decodes
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": cluster.prefill.bootstrap_port, "bootstrap_room": 77}
    body |= {"rid": "attached", **room}
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(requests.post, cluster.prefill.url + path, json=body, timeout=60)
        token_ids: list[int] = []
        logprobs: list[Any] = []
        head: dict[str, Any] = {}
        with requests.post(
            source.url + path, json=body, headers={STATE_HEADER: "1"}, stream=True, timeout=60
        ) as answer:
            for count, (state, shown) in enumerate(states(answer)):
                if state is None:
                    error = json.loads(shown.removeprefix(b"data: "))
                    break
                head = head or state.head or {}
                token_ids += state.token_ids
                logprobs += state.logprobs or []
                if count == 8:
                    moved = cluster.move("attached", attach=True)
        assert half.result().status_code == 200
    assert [move["status"] for move in moved] == [200], moved
    assert (error["code"], error["error"]["code"]) == (503, "migrated")
    assert error["error"]["to"] == target.url
    assert error["error"]["next_token_index"] == len(token_ids) == moved[0]["num_tokens"]
    resume = {"head": head, "token_ids": token_ids, "cached_tokens": 0, "attach": moved[0]["migrated_rid"]}
    resume["logprobs"] = logprobs
    wrong = requests.post(target.url + path, json={**body, "pdserve_resume": {**resume, "attach": "x"}}, timeout=60)
    assert wrong.status_code == 404, wrong.text
    with requests.post(target.url + path, json={**body, "pdserve_resume": resume}, stream=True, timeout=60) as answer:
        assert answer.status_code == 200, answer.text
        events = [json.loads(one.removeprefix(b"data: ")) for _, one in states(answer) if b"[DONE]" not in one]
    last = gist(path, events)
    assert {name: value for name, value in last.items() if value != expected[name]} == {}
    assert_idle(cluster.prefill, *cluster.decodes)


def test_the_router_copies_a_hot_prefix(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """The worker that answered has the prefix; after the copy both have it, and a request at the other one finds it."""
    flags = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "1024")
    radix = ("--disaggregation-decode-enable-radix-cache",)
    for cluster in start(str(tiny_checkpoint("llama")), *flags, decode_flags=radix):
        prompt = list(range(3, 103))
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}

        def copy(asked: dict[str, Any], url: str = cluster.router.url) -> requests.Response:
            return requests.post(f"{url}/replicate", json=asked, timeout=60)

        assert copy({"input_ids": prompt}).status_code == 404, "it is cached nowhere"
        first = requests.post(f"{cluster.router.url}/generate", json=body, timeout=60).json()
        counted = [copy({"input_ids": prompt}, server.url).json()["num_tokens"] for server in cluster.decodes]
        assert sorted(counted) == [0, 96]
        source, target = cluster.decodes if counted[0] else cluster.decodes[::-1]
        answer = copy({"input_ids": prompt}).json()
        copied = {"url": target.url, "success": True, "num_tokens": 96, "copied": True}
        assert answer == {"success": True, "from": source.url, "num_tokens": 96, "to": [copied]}
        again = copy({"input_ids": prompt}).json()
        assert again["success"] and [one["copied"] for one in again["to"]] == [False]
        assert source.counter("prefixes_sent") == 1
        drained = requests.put(f"{cluster.router.url}/workers/{source.url}", json={"draining": True}, timeout=10)
        assert drained.status_code == 202, drained.text
        found = requests.post(f"{cluster.router.url}/generate", json=body, timeout=60).json()
        assert found["output_ids"] == first["output_ids"]
        assert target.counter("decode_cached_tokens") == 96
        assert_idle(cluster.prefill, *cluster.decodes)
