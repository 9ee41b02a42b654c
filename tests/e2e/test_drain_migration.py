"""Streams of a decode server that is drained move to another one with their KV, as if nothing had been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from pdserve.server.text.tokenizer import read_template
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.e2e.test_retry_streams import CALLS, FLAGS, assert_same, cut_in, events, gist
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Farm:
    """One prefill and two decode servers, and a router that drains by migration."""

    def __init__(self, model: str, *flags: str, stack: contextlib.ExitStack) -> None:
        self.prefill = start_server(model, "prefill", *flags)
        self.decodes = [start_server(model, "decode", *flags) for _ in range(2)]
        stack.enter_context(running(self.prefill, *self.decodes))
        self.router = start_router([self.prefill], self.decodes, "--drain-migrate", "--decode-policy", "round_robin")
        stack.enter_context(running(self.router))

    @property
    def url(self) -> str:
        return self.router.url

    def drain(self, number: int, *, draining: bool = True) -> None:
        url = f"{self.url}/workers/{self.decodes[number].url}"
        assert requests.put(url, json={"draining": draining}, timeout=30).status_code == 202

    def load(self, number: int) -> int:
        """Requests of the router at a decode server."""
        shown = requests.get(f"{self.url}/workers/{self.decodes[number].url}", timeout=30).json()
        return int(shown["load"])

    def counters(self) -> dict[str, float]:
        """The router's counters of migrations, by name and result."""
        lines = requests.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "_total{result" in line}


MOVED = 'pdserve_router_migrations_total{result="moved"}'
ATTACHED = 'pdserve_router_migrated_streams_total{result="attached"}'
RECOMPUTED = 'pdserve_router_migrated_streams_total{result="recomputed"}'


@pytest.fixture(scope="module")
def farm(tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    closed = "{{- '<think></think>' if add_generation_prompt and enable_thinking is false else '' }}"
    template.write_text(read_template("hermes") + closed)
    with contextlib.ExitStack() as stack:
        yield Farm(str(tiny_checkpoint("llama")), *FLAGS, "--chat-template", str(template), stack=stack)


def test_streams_move_and_are_those_of_a_server_that_stays(farm: Farm) -> None:
    """Logprobs, penalties, grammars, tools, stop strings: ten kinds of streams, two of each, at both servers."""
    expected = {name: gist(path, events(farm.url, path, body)) for name, (path, body) in CALLS.items()}
    runs = [name for name in CALLS for _ in range(2)]
    moved: list[float] = []

    def drain_both() -> None:
        farm.drain(0)
        until(lambda: farm.load(0) == 0, 60, "the drained server has no streams")
        moved.append(farm.counters()[ATTACHED])
        farm.drain(0, draining=False)
        farm.drain(1)

    assert_same(runs, cut_in(farm.url, runs, drain_both), expected)
    [num_moved] = moved
    counters = farm.counters()
    assert num_moved >= 4, "the drain must have met streams"
    assert counters[MOVED] >= counters[ATTACHED] >= num_moved and not counters.get(RECOMPUTED), counters
    farm.drain(1, draining=False)
    assert_idle(farm.prefill, *farm.decodes, deadline_s=60)


def test_plain_answers_move_behind_their_server(farm: Farm) -> None:
    sampling = {"temperature": 0.8, "sampling_seed": 9, "max_new_tokens": 600, "ignore_eos": True}
    body = {"input_ids": [[5 + number] * 40 for number in range(6)], "sampling_params": sampling}

    def ask(input_ids: list[int]) -> list[int]:
        answer = requests.post(f"{farm.url}/generate", json={**body, "input_ids": input_ids}, timeout=240)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])

    expected = [ask(prompt) for prompt in body["input_ids"]]
    before = farm.counters().get(MOVED, 0)

    def decoding(server: Server) -> int:
        return int(server.state()["num_running_reqs"])

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, prompt) for prompt in body["input_ids"]]
        until(lambda: decoding(farm.decodes[0]) >= 2, 60, "some run at the first server")
        farm.drain(0)
        found = [answer.result() for answer in answers]
    assert found == expected and farm.counters()[MOVED] > before
    farm.drain(0, draining=False)
    assert_idle(farm.prefill, *farm.decodes, deadline_s=60)
