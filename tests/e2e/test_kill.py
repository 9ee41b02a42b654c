"""SIGKILL, SIGSTOP or SIGTERM of one server under load: every client has an answer or an error in time, the other goes
on, nothing stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.clients import Outcome, chat_all
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.share import rest_slow
from tests.tiny import Family

LIMIT_S = 15.0
STOPPED_LIMIT_S = 20.0
"""Health checks need 8 s to tell that a server is stopped; the rest is for a machine that is busy."""
NUM_CLIENTS = 24
FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "65536")


def port_of(server: Server) -> str:
    return server.url.rsplit(":", 1)[1]


def load(url: str, outcomes: list[Outcome]) -> None:
    """Clients that come over some seconds and want long answers; half of them stream."""
    bodies: list[dict[str, Any]] = [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "word " * (10 + 20 * (i % 5))}],
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": i % 2 == 0,
        }
        for i in range(NUM_CLIENTS)
    ]
    delays = [i * 0.1 for i in range(NUM_CLIENTS)]
    outcomes += asyncio.run(chat_all(url, bodies, delays, [None] * NUM_CLIENTS))


def short_answer(url: str) -> bool:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}
    with contextlib.suppress(requests.RequestException):
        return requests.post(f"{url}/v1/chat/completions", json=body, timeout=30).status_code == 200
    return False


@contextlib.contextmanager
def loaded(url: str, decode: Server) -> Iterator[list[Outcome]]:
    """Run the load in a thread; the body runs once decode is busy; ends when every client has ended."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=load, args=(url, outcomes))
    thread.start()
    try:
        until(lambda: decode.state()["num_running_reqs"] >= 4, 60, "load on decode")
        yield outcomes
    finally:
        thread.join(timeout=120)
        assert not thread.is_alive(), "clients hang"


class Farm:
    """One server of each mode, which change as they are killed and born again, and the router before them."""

    def __init__(self, model: str, stack: contextlib.ExitStack) -> None:
        self._model, self._stack = model, stack
        self.servers = {mode: start_server(model, mode, *FLAGS) for mode in ("prefill", "decode")}
        stack.enter_context(running(*self.servers.values()))
        self.router = start_router([self.servers["prefill"]], [self.servers["decode"]], probes=True)
        stack.enter_context(running(self.router))

    def start_again(self, mode: str) -> Server:
        """A new server on the ports of the one of that mode, in its place."""
        before = self.servers[mode]
        ports = ["--port", port_of(before)]
        if mode == "prefill":
            ports += ["--disaggregation-bootstrap-port", str(before.bootstrap_port)]
        reborn = start_server(self._model, mode, *FLAGS, *ports, name=f"{mode} again")
        self._stack.enter_context(running(reborn))
        self.servers[mode] = reborn
        return reborn


@pytest.fixture(scope="module")
def farm(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Farm]:
    """One for all tests: who is killed comes back."""
    with contextlib.ExitStack() as stack:
        yield Farm(str(tiny_checkpoint("llama")), stack)


def assert_all_ended(outcomes: list[Outcome], hit_at: float, limit_s: float) -> None:
    """With all they asked for, or with an error that the router sent within `limit_s` of the blow; somebody was hit.

    An error of a stream that has begun is an event.
    """
    assert len(outcomes) == NUM_CLIENTS
    for outcome in outcomes:
        good = outcome.status == 200 and outcome.finish == "length" and outcome.error is None
        failed = outcome.status is not None and outcome.status >= 500
        ended_stream = outcome.status == 200 and outcome.error is not None
        assert good or failed or ended_stream, outcome
        assert not outcome.was_cut, outcome
        if not good:
            assert outcome.ended_at - hit_at < limit_s, outcome
    assert any(outcome.finish != "length" for outcome in outcomes), "the blow must have hit somebody"


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """All its processes are stopped as long as the block."""
    root = psutil.Process(server.child.pid)
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        process.suspend()
    try:
        yield
    finally:
        for process in tree:
            process.resume()


def test_stopped_decode_under_load(farm: Farm) -> None:
    """What is not dead but silent breaks no connection: only the router can end what runs there."""
    decode = farm.servers["decode"]
    assert short_answer(farm.router.url)
    with contextlib.ExitStack() as stack:
        with loaded(farm.router.url, decode) as outcomes:
            stack.enter_context(stopped(decode))
            stopped_at = time.monotonic()
        assert_all_ended(outcomes, stopped_at, STOPPED_LIMIT_S)
        assert any("the router ended" in (outcome.error or "") for outcome in outcomes), "no stream was ended"
        assert requests.get(f"{farm.router.url}/readiness", timeout=30).status_code == 503
    until(lambda: short_answer(farm.router.url), 60, "service when it goes on")
    assert_idle(*farm.servers.values(), deadline_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_sigterm_under_load(mode: str, farm: Farm) -> None:
    victim = farm.servers[mode]
    assert short_answer(farm.router.url)
    with loaded(farm.router.url, farm.servers["decode"]) as outcomes:
        os.kill(victim.child.pid, signal.SIGTERM)
        told_at = time.monotonic()
    assert victim.child.wait_exit(60.0) and victim.child.end(1.0) == 0
    assert len(outcomes) == NUM_CLIENTS
    for outcome in outcomes:
        assert outcome.finish == "length" or outcome.error is not None, outcome
        assert not outcome.was_cut, outcome
        if outcome.finish != "length":
            assert outcome.ended_at - told_at < STOPPED_LIMIT_S, outcome
            assert any(text in (outcome.error or "") for text in ("shutting down", "no healthy")), outcome
    farm.start_again(mode)
    until(lambda: short_answer(farm.router.url), 60, "service with the new partner")
    assert_idle(*farm.servers.values(), deadline_s=60)


@pytest.mark.parametrize(("victim_mode", "survivor_mode"), rest_slow([("decode", "prefill"), ("prefill", "decode")]))
def test_kill_under_load(victim_mode: str, survivor_mode: str, farm: Farm) -> None:
    victim, survivor = farm.servers[victim_mode], farm.servers[survivor_mode]
    assert short_answer(farm.router.url)
    with loaded(farm.router.url, farm.servers["decode"]) as outcomes:
        victim.kill()
        killed_at = time.monotonic()
    assert_all_ended(outcomes, killed_at, LIMIT_S)
    assert_idle(survivor, deadline_s=40)
    reborn = farm.start_again(victim_mode)
    until(lambda: short_answer(farm.router.url), 30, "service with the new partner")
    assert_idle(survivor, reborn)
