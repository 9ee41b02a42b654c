"""SIGKILL of one server under load: every client has an answer or an error in time, the survivor goes on, nothing
stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.clients import Outcome, chat_all
from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.tiny import Family

LIMIT_S = 15.0
NUM_CLIENTS = 24


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


@pytest.mark.parametrize("victim_mode", ["decode", "prefill"])
def test_kill_under_load(victim_mode: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = str(tiny_checkpoint("llama"))
    flags = ("--served-model-name", "tiny", "--max-total-tokens", "65536")
    prefill, decode = start_server(model, "prefill", *flags), start_server(model, "decode", *flags)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(prefill, decode))
        router = start_router([prefill], [decode])
        stack.enter_context(running(router))
        assert short_answer(router.url)
        victim, survivor = (decode, prefill) if victim_mode == "decode" else (prefill, decode)
        ports = ["--port", port_of(victim)]
        if victim_mode == "prefill":
            ports += ["--disaggregation-bootstrap-port", str(prefill.bootstrap_port)]
        with loaded(router.url, decode) as outcomes:
            victim.kill()
            killed_at = time.monotonic()
        assert len(outcomes) == NUM_CLIENTS
        for outcome in outcomes:
            good = outcome.status == 200 and outcome.finish == "length" and outcome.error is None
            failed = outcome.status is not None and outcome.status >= 500
            broken_stream = outcome.status == 200 and outcome.error is not None
            assert good or failed or broken_stream, outcome
            if not good:
                assert outcome.ended_at - killed_at < LIMIT_S, outcome
        assert any(outcome.finish != "length" for outcome in outcomes), "the kill must have hit somebody"
        assert_idle(survivor, deadline_s=40)
        reborn = start_server(model, victim_mode, *flags, *ports, name=f"{victim_mode} again")
        stack.enter_context(running(reborn))
        until(lambda: short_answer(router.url), 30, "service with the new partner")
        assert_idle(survivor, reborn)
