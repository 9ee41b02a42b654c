"""Structured output over HTTP: a monolith and a pair give the same answers, and these follow what was asked for."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.harness import Pair, Server, assert_idle, running, running_pair, start_server, until
from tests.e2e.schema_run import FLAGS, MODEL, Answer, try_schema
from tests.schemas import check, random_schema

pytestmark = pytest.mark.timeout(600)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOO_COMPLEX = "a{900}{1000}"
"""The engine takes it, and finds after the first token that it cannot follow it."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Pair]]:
    monolith = start_server(MODEL, "null", *FLAGS)
    with running(monolith), running_pair(MODEL, *FLAGS) as pair:
        yield monolith, pair
        assert_idle(monolith, pair.prefill, pair.decode)


def generate(url: str, **sampling: Any) -> requests.Response:
    params = {"temperature": 0, "max_new_tokens": 60, **sampling}
    return requests.post(f"{url}/generate", json={"text": "An example: ", "sampling_params": params}, timeout=300)


def both(servers: tuple[Server, Pair], **sampling: Any) -> tuple[str, dict[str, Any], int]:
    """The text, the reason to finish and the number of tokens, which must be equal."""
    answers = []
    for server in servers:
        answer = generate(server.url, **sampling)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        answers.append((answer.json()["text"], meta["finish_reason"], meta["completion_tokens"]))
    assert answers[0] == answers[1]
    return answers[0]


def test_schemas_are_followed_streamed_or_not_by_monolith_and_pair(servers: tuple[Server, Pair]) -> None:
    urls = [server.url for server in servers]
    schemas = [PERSON, {"enum": ["one", {"two": [2]}]}]
    schemas += [random_schema(random.Random(seed), depth=1) for seed in range(2)]
    with ThreadPoolExecutor(len(schemas)) as threads:
        assert all(threads.map(lambda schema: try_schema(urls, schema, "Invent an example."), schemas))


def test_every_kind_of_grammar_and_the_ways_it_ends(servers: tuple[Server, Pair]) -> None:
    text, finish, _ = both(servers, regex="(yes|no)")
    assert text in ("yes", "no") and finish["type"] == "stop"
    assert both(servers, regex="[0-9]{3}", ignore_eos=True, min_new_tokens=50)[1]["type"] == "stop"
    assert both(servers, regex="[a-z ]*", ignore_eos=True, max_new_tokens=5)[1] == {"type": "length", "length": 5}
    assert re.fullmatch("a*b", both(servers, ebnf='root ::= "b" | "a" root', temperature=1, sampling_seed=4)[0])
    text, finish, count = both(servers, regex="(yes|no) [a-z]+", max_new_tokens=1)
    assert finish["type"] == "length" and count == 1 and text[0] in "yn"
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
        "triggers": ["<f"],
    }
    biased = both(servers, structural_tag=json.dumps(tag), regex=None, max_new_tokens=2)
    assert biased[2] == 2
    assert both(servers, regex="one two three", stop="two")[:2] == ("one ", {"type": "stop", "matched": "two"})


def test_openai_fields(servers: tuple[Server, Pair]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 80}
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 3},
        {"guided_choice": ["red", "blue (dark)"]},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"guided_json": PERSON},
    ]
    found = []
    for server in servers:
        answers = [requests.post(f"{server.url}/v1/chat/completions", json=chat | body, timeout=300) for body in asked]
        assert [answer.status_code for answer in answers] == [200] * len(asked), [a.text for a in answers]
        found.append([answer.json()["choices"][0]["message"]["content"] for answer in answers])
        tops = [
            top for entry in answers[0].json()["choices"][0]["logprobs"]["content"] for top in entry["top_logprobs"]
        ]
        assert all(isinstance(top["logprob"], float) for top in tops)
    assert found[0] == found[1]
    assert isinstance(json.loads(found[0][0]), dict)
    assert found[0][1] in ("red", "blue (dark)") and found[0][2].isdigit()
    check(found[0][3], PERSON)


@pytest.mark.parametrize(
    "text", ["emoji 👩‍👩‍👧 and 🇫🇷 flags", "世界の言葉 한국어", "combining e\u0301 a\u0308\u0323 العربية"]
)
def test_any_script_streams_as_it_is_answered_whole(servers: tuple[Server, Pair], text: str) -> None:
    """The grammar makes a real model say it, in tokens that are parts of characters."""
    chat = {"messages": [{"role": "user", "content": "Say it."}], "temperature": 0, "max_tokens": 100, "regex": text}
    for server in servers:
        url = f"{server.url}/v1/chat/completions"
        whole = requests.post(url, json=chat, timeout=300)
        assert whole.json()["choices"][0]["message"]["content"] == text
        deltas = []
        with requests.post(url, json=chat | {"stream": True}, stream=True, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    deltas.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
        assert "".join(deltas) == text
        assert len([delta for delta in deltas if delta]) > 1
        assert not any("\ufffd" in delta for delta in deltas)


def test_a_grammar_that_fails_ends_its_request_alone(servers: tuple[Server, Pair]) -> None:
    for server in servers:
        with ThreadPoolExecutor(2) as threads:
            other = threads.submit(generate, server.url, regex="[a-z]{40}")
            failed = generate(server.url, regex=TOO_COMPLEX)
            assert (failed.status_code, failed.json()["error"]["code"]) == (400, "grammar_failed")
            assert other.result().status_code == 200
        assert generate(server.url, regex="(").status_code == 400


HOSTILE: list[dict[str, Any]] = [
    {"stop_regex": "(?:ab?c*){1500000}x"},
    {"stop_regex": "(?:(?:(?:(?:xy){1000}){1000}){1000}){1000}z"},
    {"regex": "(?:ab?c*){1500000}x"},
    {"json_schema": {"type": "integer", "multipleOf": 99_999_989}},
    {"ebnf": "start: r0\n" + "\n".join(f'r{i}: "a{i}" r{(i + 1) % 4000}?' for i in range(4000))},
]


def test_hostile_grammars_keep_no_other_waiting_and_leave_nothing(servers: tuple[Server, Pair]) -> None:
    """`/health` answers meanwhile, and a small grammar passes six large ones of the same client."""
    server = servers[0]
    url, process = server.url, psutil.Process(server.child.pid)
    assert generate(url, regex="[a-z]{3}").status_code == 200  # the compile worker is there
    before = process.memory_info().rss
    latencies: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert requests.get(f"{url}/health", timeout=60).status_code == 200
            latencies.append(time.monotonic() - began)
            done.wait(0.05)

    with ThreadPoolExecutor(20) as threads:
        watching = threads.submit(watch)
        large = [
            {"type": "object", "properties": {f"{letter}{i}": {"type": "string"} for i in range(2000)}}
            for letter in "abcdef"
        ]
        asked = [threads.submit(generate, url, json_schema=schema) for schema in large]
        refused = [threads.submit(generate, url, **fields) for fields in HOSTILE]
        until(lambda: any(answer.done() for answer in refused), 60, "an answer to a hostile request")
        assert generate(url, regex="[0-9]{3}").status_code == 200
        assert not all(answer.done() for answer in asked), "it has not waited for them"
        for fields, answer in zip(HOSTILE, refused, strict=True):
            assert answer.result().status_code == 400, answer.result().text
            assert next(iter(fields)) in answer.result().json()["error"]["message"]
        assert {answer.result().status_code for answer in asked} <= {200, 400}
        done.set()
        watching.result()
    assert max(latencies) < 10, "none of it is compiled on the event loop"
    assert process.memory_info().rss < before + (200 << 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_schemas(servers: tuple[Server, Pair]) -> None:
    urls = [server.url for server in servers]

    def one(seed: int) -> Answer:
        return try_schema(urls, random_schema(random.Random(seed), depth=2), "Invent an example.")

    with ThreadPoolExecutor(32) as threads:
        assert len(list(threads.map(one, range(200)))) == 200
