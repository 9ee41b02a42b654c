"""Decode servers are killed while they write streams, and every stream goes on from the other pair as if it had not
broken.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.server.text.tokenizer import read_template
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.tiny import Family, make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = (
    "--max-total-tokens", "65536", "--enable-deterministic-inference", "--reasoning-parser", "qwen3",
    "--enable-ollama-api", "--disaggregation-transfer-backend", "shm",
)  # fmt: skip
STORY = "Once upon a time there was a small town by the sea, and in it lived"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 200, "maxItems": 220}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[a-z ]{300,400}$"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (
        "/v1/completions",
        {"prompt": STORY, "max_tokens": 600, **GREEDY, "stream_options": {"include_usage": True}},
    ),
    "text_offset": ("/v1/completions", {"prompt": STORY, "max_tokens": 500, **GREEDY, "logprobs": 2, "echo": True}),
    "seeded": (
        "/v1/completions",
        {
            "prompt": [STORY], "max_tokens": 600, "temperature": 1.1, "seed": 7, "ignore_eos": True,
            "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1,
        },
    ),
    "native": (
        "/generate",
        {
            "text": STORY, "return_logprob": True, "top_logprobs_num": 2, "rid": "native-1",
            "sampling_params": {"max_new_tokens": 400, "temperature": 0.9, "sampling_seed": 3, "ignore_eos": True},
        },
    ),
    "stop": (
        "/generate",
        {"text": STORY, "sampling_params": {"max_new_tokens": 800, **GREEDY, "stop": ["STOP"], "stop_regex": r"Q\d+Z"}},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": ASK, "max_tokens": 800, "temperature": 0.8, "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": LIST}},
        },
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 800, "temperature": 0,
         "reasoning_effort": "none", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 600, **GREEDY}),
    "ollama": (
        "/api/generate",
        {"prompt": STORY, "raw": True, "ignore_eos": True, "options": {"temperature": 0, "num_predict": 600}},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 600, **GREEDY, "logprobs": True, "top_logprobs": 1},
    ),
}  # fmt: skip


class Farm:
    """One prefill and two decode servers, of which one is killed and comes back, and the router before them."""

    def __init__(self, model: str, *flags: str, stack: contextlib.ExitStack) -> None:
        self._stack, self._start = stack, lambda *more: start_server(model, "decode", *flags, *more)
        self.prefill = start_server(model, "prefill", *flags)
        self.decodes = [self._start() for _ in range(2)]
        stack.enter_context(running(self.prefill, *self.decodes))
        more = ("--retry-streams", "2", "--decode-policy", "round_robin")
        self.router = start_router([self.prefill], self.decodes, *more)
        stack.enter_context(running(self.router))

    def start_again(self, index: int) -> None:
        """A new server on the port of the one that was killed."""
        port = self.decodes[index].url.rsplit(":", 1)[1]
        self.decodes[index] = self._start("--port", port)
        self._stack.enter_context(running(self.decodes[index]))
        until(lambda: len(healthy(self.router)) == 3, 60, "three healthy workers")


def healthy(router: Server) -> list[dict[str, Any]]:
    workers = requests.get(f"{router.url}/workers", timeout=30).json()["workers"]
    return [worker for worker in workers if worker["is_healthy"]]


@pytest.fixture(scope="module")
def farm(tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    closed = "{{- '<think></think>' if add_generation_prompt and enable_thinking is false else '' }}"
    template.write_text(read_template("hermes") + closed)
    with contextlib.ExitStack() as stack:
        yield Farm(str(tiny_checkpoint("llama")), *FLAGS, "--chat-template", str(template), stack=stack)


def events(url: str, path: str, body: dict[str, Any], seen: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """The events of a stream; `seen` is called at each. It ends with one last event, and holds nothing but events."""
    found: list[bytes] = []
    is_ollama = path.startswith("/api/")
    last = b'{"type":"message_stop"}' if path == "/v1/messages" else b"[DONE]"
    with requests.post(url + path, json={**body, "stream": True}, stream=True, timeout=300) as answer:
        assert answer.status_code == 200, answer.text
        for line in answer.iter_lines():
            if line and not (path == "/v1/messages" and line.startswith(b"event: ")):
                assert is_ollama or line.startswith(b"data: "), line
                found.append(line.removeprefix(b"data: "))
                seen()
    if is_ollama:
        lines = [json.loads(line) for line in found]
        assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True], lines[-1]
        return lines
    assert found.count(last) == 1 and found[-1] == last, found[-3:]
    return [json.loads(one) for one in found[:-1]]


def gist(path: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, and what must not change within it. No error, no repeat, no gap."""
    assert not any("error" in event for event in found), found[-1]
    if path == "/generate":
        assert len({event["meta_info"]["id"] for event in found}) == 1
        counts = [event["meta_info"]["completion_tokens"] for event in found]
        assert counts == sorted(set(counts)), counts
        for before, after in itertools.pairwise(found):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last = found[-1]
        meta = last["meta_info"]
        kept = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs", "output_top_logprobs")
        return {"text": last["text"], "ids": last["output_ids"], **{name: meta.get(name) for name in kept}}
    if path == "/v1/messages":
        kinds = [event["type"] for event in found]
        assert [kinds.count(kind) for kind in ("message_start", "ping", "message_delta")] == [1, 1, 1]
        texts = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        return {
            "text": "".join(delta.get("text", delta.get("thinking", "")) for delta in texts),
            "blocks": kinds.count("content_block_start"),
            "end": found[-1]["delta"],
            "tokens": found[-1]["usage"]["output_tokens"],
        }
    if path.startswith("/api/"):
        ends = {name: found[-1][name] for name in ("done_reason", "prompt_eval_count", "eval_count")}
        return {"text": "".join(event["response"] for event in found), **ends}
    assert len({(event["id"], event["created"], event["model"], event["system_fingerprint"]) for event in found}) == 1
    choices = [choice for event in found for choice in event["choices"]]
    deltas = [choice.get("delta") or {} for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    usages = [event["usage"] for event in found if event.get("usage")]
    return {
        "text": "".join([choice.get("text") or "" for choice in choices]),
        "content": "".join([delta.get("content") or "" for delta in deltas]),
        "reasoning": "".join([delta.get("reasoning_content") or "" for delta in deltas]),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "calls": [call["function"]["name"] for call in calls if "id" in call],
        "arguments": "".join(call["function"].get("arguments") or "" for call in calls),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "offsets": [offset for one in logprobs for offset in one.get("text_offset", [])],
        "logprobs": [value for one in logprobs for value in one.get("token_logprobs", [])],
        "content_logprobs": [entry for one in logprobs for entry in one.get("content", [])],
        "usage": {name: usages[-1][name] for name in ("prompt_tokens", "completion_tokens")} if usages else None,
    }


def with_late_stop(url: str) -> None:
    """Stop strings that the answer comes to late, so that the break is before them, and that fall between tokens."""
    path, body = CALLS["stop"]
    text = gist(path, events(url, path, body))["text"]
    middle = len(text) * 3 // 4
    body["sampling_params"]["stop"] = [text[middle : middle + 9]]


def cut_in(url: str, runs: Sequence[str], act: Callable[[], None]) -> list[dict[str, Any]]:
    """Run one stream of `CALLS` for each of `runs`, and call `act` once each has sent 8 events; the streams' gists."""
    started = threading.Semaphore(0)

    def run(number: int) -> dict[str, Any]:
        path, body = CALLS[runs[number]]
        body = {**body, "rid": f"{runs[number]}-{number}"} if "rid" in body else body
        counts = iter(range(10_000))

        def seen() -> None:
            if next(counts) == 8:
                started.release()

        return gist(path, events(url, path, body, seen))

    with ThreadPoolExecutor(len(runs)) as pool:
        answers = [pool.submit(run, number) for number in range(len(runs))]
        for _ in runs:
            assert started.acquire(timeout=120)
        act()
        return [answer.result() for answer in answers]


def assert_same(runs: Sequence[str], found: Sequence[dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    for name, answer in zip(runs, found, strict=True):
        wrong = {
            field: (value, expected[name][field]) for field, value in answer.items() if value != expected[name][field]
        }
        assert not wrong, name


@pytest.mark.parametrize("victim", [0, 1])
def test_streams_go_on_when_their_decode_server_is_killed(victim: int, farm: Farm) -> None:
    url = farm.router.url
    if CALLS["stop"][1]["sampling_params"]["stop"] == ["STOP"]:
        with_late_stop(url)
    expected = {name: gist(path, events(url, path, body)) for name, (path, body) in CALLS.items()}
    runs = [name for name in CALLS for _ in range(2)]  # one for each decode server
    found = cut_in(url, runs, lambda: farm.decodes[victim].kill())
    assert_same(runs, found, expected)
    retries = farm.router.metrics()["pdserve_router_stream_retries_total"]
    assert retries >= 4 * (victim + 1), "the kill must have hit streams"
    assert_idle(farm.prefill, farm.decodes[1 - victim], deadline_s=60)
    farm.start_again(victim)


def test_a_stream_waits_until_the_other_pair_has_its_weights(tmp_path: Path) -> None:
    """The other decode server has other weights when the stream breaks, and the former ones seconds later."""
    models = [make_tiny("llama", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]

    def update(server: Server, model: Path, version: str) -> None:
        body = {"model_path": str(model), "weight_version": version}
        answer = requests.post(f"{server.url}/update_weights_from_disk", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    with contextlib.ExitStack() as stack:
        farm = Farm(str(models[0]), *FLAGS, "--weight-version", "first", stack=stack)
        path, body = CALLS["seeded"]
        expected = gist(path, events(farm.router.url, path, body))
        update(farm.decodes[1], models[1], "second")

        def num_retries() -> float:
            return farm.router.metrics()["pdserve_router_retries_total"]

        def act() -> None:
            farm.decodes[0].kill()
            before = num_retries()
            until(lambda: num_retries() >= before + 3, 30, "the other pair refuses")
            update(farm.decodes[1], models[0], "first")

        assert_same(["seeded"], cut_in(farm.router.url, ["seeded"], act), {"seeded": expected})
        assert farm.router.metrics()["pdserve_router_stream_retries_total"] >= 1
        assert_idle(farm.prefill, farm.decodes[1], deadline_s=60)
