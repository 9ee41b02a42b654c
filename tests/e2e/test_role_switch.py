"""Servers that change their role while clients talk to the router before them: every answer is the monolith's."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.tiny import Family

pytestmark = pytest.mark.timeout(300)
FLAGS = ("--max-total-tokens", "8192", "--dtype", "float32")
PAUSE_S = 0.05
"""Between the requests of a client: engines that start need the cores, too."""


def body(number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 24 + 8 * number, "temperature": 0.8 * (number % 2), "sampling_seed": number}
    return {
        "input_ids": [7 + number, *range(20, 40 + 9 * number)],
        "sampling_params": {**sampling, "ignore_eos": True},
    }


BODIES = [body(number) for number in range(6)]


def tokens(url: str, body: dict[str, Any]) -> list[int]:
    answer = requests.post(f"{url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


class Clients:
    """Ask the router again and again, and compare each answer with the monolith's."""

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self.num_answers = 0
        self.wrong: list[str] = []

    def _talk(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stop.wait(PAUSE_S) or self.wrong:
                return
            which = turn % len(BODIES)
            try:
                found = tokens(self._url, BODIES[which])
                if found != self._expected[which]:
                    self.wrong.append(f"body {which}: {found} instead of {self._expected[which]}")
            except (AssertionError, requests.RequestException) as error:
                self.wrong.append(f"body {which}: {error!r}")
            self.num_answers += 1

    @contextlib.contextmanager
    def talking(self) -> Iterator[Clients]:
        """Until the block has ended, and the answers under way have come."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            for number in range(2):
                pool.submit(self._talk, number)
            try:
                yield self
            finally:
                self._stop.set()
        assert not self.wrong, self.wrong

    def go_on(self, num_more: int = 8) -> None:
        """Wait for some more answers."""
        enough = self.num_answers + num_more
        until(lambda: self.wrong or self.num_answers >= enough, 60.0, "answers")


def switch(url: str, **body: Any) -> dict[str, Any]:
    answer = requests.post(f"{url}/pd_role_switch", json=body, timeout=120)
    assert answer.status_code == (200 if body.get("wait", True) else 202), answer.text
    return dict(answer.json())


def role(router: Server, server: Server) -> str | None:
    """The pool in which a router uses a server."""
    state = requests.get(f"{router.url}/workers/{server.url}", timeout=30).json()
    return str(state["worker_type"]) if state["is_healthy"] and not state["draining"] else None


def test_decode_becomes_prefill_and_decode_again_while_clients_talk(
    tiny_checkpoint: Callable[[Family], Path],
) -> None:
    model = str(tiny_checkpoint("llama"))
    prefill, decode = start_server(model, "prefill", *FLAGS), start_server(model, "decode", *FLAGS)
    third = start_server(model, "null", *FLAGS, name="third", num_engines=4)
    with running(prefill, decode, third):
        expected = [tokens(third.url, body) for body in BODIES]
        assert switch(third.url, new_role="decode", wait=False)["old_role"] == "null"
        router = start_router([prefill], [decode, third], "--policy", "round_robin")
        with running(router), Clients(router.url, expected).talking() as clients:
            until(lambda: role(router, third) == "decode", 60.0, "it is taken in when it is a decode server")
            clients.go_on()
            assert third.counter("requests") > 0, "it serves as decode"
            done = switch(router.url, worker_url=third.url, new_role="prefill")
            assert (done["old_role"], done["new_role"]) == ("decode", "prefill")
            assert role(router, third) == "prefill", "as soon as the router says that it is done"
            clients.go_on()
            until(lambda: third.counter("requests") > 0, 30.0, "it serves as prefill, on its new bootstrap port")
            assert third.state()["disaggregation_mode"] == "prefill"
            switch(third.url, new_role="decode")
            until(lambda: role(router, third) == "decode", 30.0, "the router finds out by itself")
            clients.go_on()
            until(lambda: third.counter("requests") > 0, 30.0, "it serves as decode again")
        assert_idle(prefill, decode, third, deadline_s=40.0)  # as long as pages rest of which a peer has taken leave
