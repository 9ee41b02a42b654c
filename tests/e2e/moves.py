"""Streams of decode servers without a router, and what a test does with them: move them, and compare their tokens."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_server
from tests.e2e.test_retry_streams import LIST, gist

ROOMS = itertools.count(4001)
RIDS = itertools.count(1)
AT = 8
"""The event of a stream after which a test acts."""


def greedy(num_tokens: int = 300, length: int = 70, seed: int = 0) -> dict[str, Any]:
    """A greedy request of `length` prompt tokens below 300."""
    prompt = [3 + (11 * place + seed * (place + 2)) % 290 for place in range(length)]
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
    }


def seeded(num_tokens: int = 300) -> dict[str, Any]:
    """A request with a seed, penalties and log probabilities."""
    body = greedy(num_tokens)
    body["sampling_params"] |= {
        "temperature": 1.0, "sampling_seed": 5, "frequency_penalty": 0.4, "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    return body | {"return_logprob": True, "top_logprobs_num": 2}


def with_grammar(num_tokens: int = 300) -> dict[str, Any]:
    """As `seeded`, and each token is one that a JSON schema allows."""
    body = seeded(num_tokens)
    del body["sampling_params"]["ignore_eos"]
    body["sampling_params"]["json_schema"] = json.dumps(LIST)
    return body


def assert_equal(found: dict[str, Any], expected: dict[str, Any], what: object = "") -> None:
    """Tokens, text and counts are equal, and log probabilities are close."""
    for name in ("ids", "text", "finish_reason", "prompt_tokens", "completion_tokens"):
        assert found[name] == expected[name], (what, name)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        for one, other in zip(flat(found[name]), flat(expected[name]), strict=True):
            assert one == pytest.approx(other, abs=1e-3), (what, name)


def flat(value: Any) -> list[Any]:
    """All numbers of nested lists, in order."""
    if isinstance(value, (list, tuple)):
        return [one for each in value for one in flat(each)]
    return [] if value is None or isinstance(value, str) else [value]


class Servers:
    """One prefill server and decode servers."""

    def __init__(self, prefill: Server, decodes: Sequence[Server]) -> None:
        self.prefill, self.decodes = prefill, list(decodes)

    def events(
        self, source: Server, body: dict[str, Any], act: Callable[[str], object] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The events of a stream of `source`; `act` is called with its rid after event `AT`."""
        rid = f"moving-{next(RIDS)}"
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port}
        body = {**body, **room, "bootstrap_room": next(ROOMS), "rid": rid}
        with ThreadPoolExecutor(1) as pool:
            half = pool.submit(requests.post, f"{self.prefill.url}/generate", json=body, timeout=60)
            with requests.post(
                f"{source.url}/generate", json={**body, "stream": True}, stream=True, timeout=120
            ) as answer:
                assert answer.status_code == 200, answer.text
                lines = (line for line in answer.iter_lines() if line and line != b"data: [DONE]")
                for count, line in enumerate(lines, 1):
                    yield json.loads(line.removeprefix(b"data: "))
                    if count == AT and act is not None:
                        act(rid)
            assert half.result().status_code == 200, half.result().text

    def run(self, source: Server, body: dict[str, Any], act: Callable[[str], object] | None = None) -> dict[str, Any]:
        """The whole content of a stream, see `gist`."""
        return gist("/generate", list(self.events(source, body, act)))

    def moved(self, source: Server, target: Server, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The content of a stream that moves to `target`, and the answer to `/migrate`."""
        answers: list[dict[str, Any]] = []

        def act(rid: str) -> None:
            answer = migrate(source, rid, target.url)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())

        return self.run(source, body, act), answers[0]

    def check_moves(self, source: Server, target: Server, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """Each request gives the same with a migration as without; the answers to `/migrate`."""
        answers = []
        for body in bodies:
            found, answer = self.moved(source, target, body)
            assert_equal(found, self.run(source, body), body)
            assert AT <= answer["num_tokens"] < len(found["ids"])
            answers.append(answer)
        return answers


def migrate(source: Server, rid: str, to: str, **more: Any) -> requests.Response:
    """The answer to `POST /migrate`."""
    return requests.post(f"{source.url}/migrate", json={"rid": rid, "to": to, **more}, timeout=120)


def refusal(answer: requests.Response) -> tuple[int, str, str | None]:
    """Status, code and param of an error, whose message must not be empty."""
    error = answer.json()["error"]
    assert error["message"], answer.text
    return answer.status_code, error["code"], error["param"]


@contextlib.contextmanager
def servers(
    model: str, decodes: Sequence[Sequence[str]], *flags: str, prefill: Sequence[str] = ()
) -> Iterator[Servers]:
    """A prefill server and a decode server for each of `decodes`, which has flags. All must be idle at the end."""
    first = start_server(model, "prefill", *flags, *prefill)
    rest = [start_server(model, "decode", *flags, *more, name=f"decode-{n}") for n, more in enumerate(decodes)]
    with running(first, *rest):
        yield Servers(first, rest)
        assert_idle(first, *rest, deadline_s=40.0)
