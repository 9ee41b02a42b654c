"""A store that goes away under load, with a real master of Mooncake Store: right tokens, and one deadline at most.

    owner (prefill)     computes and stores prompts; its client's process owns the store's memory
    reader (prefill)    has none of them; before it and a decode server stands the router that the load goes to
    control (prefill)   has no store; some clients send the same load to it and the same decode server

While streams run and further requests come, the master or the owner's client is stopped or killed. TTFT is the time to
the first event of a stream. It is compared with the longest one of the same load before the fault, and at the control
server at the same time, so that what else the machine does counts for both. All clients send some requests at once, as
those whose deadlines end together come to prefill at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, running_monolith, start_router, start_server, until
from tests.e2e.test_storage import PAGE, TIER, body, is_connected, mooncake_flags, outputs, prompts_of, until_stored
from tests.mooncake_master import Master
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE_S = 1.0
NUM_STREAMS, NUM_CONTROL = 8, 4
"""Streams that run all the time, and as many clients beside them that send one request after the other; clients of the
control server."""
SPREAD = 1.5
"""Largest ratio of the longest TTFTs of two equal loads on a busy machine."""
NUM_AT_ONCE, NUM_BEFORE, NUM_AFTER = 5, 8, 8
"""First requests of each client, which all clients send at once; least requests before the fault; those behind it."""
LONGEST = 3000
"""Tokens of a stream that runs all the time; it is cut at the end."""


@dataclasses.dataclass
class Asked:
    """One request: when it was sent and when its first event came, in seconds, and its tokens."""

    prompt: list[int]
    begun_s: float = 0.0
    first_s: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds until the first event."""
        return self.first_s - self.begun_s

    def run(self, url: str, num_tokens: int, cut: threading.Event) -> None:
        """Read the stream to its end, or until `cut` is set."""
        self.begun_s = time.monotonic()
        asked = {**body(self.prompt, num_tokens), "stream": True}
        with requests.post(f"{url}/generate", json=asked, stream=True, timeout=60) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                self.first_s = self.first_s or time.monotonic()
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                self.tokens = event["output_ids"]
                if cut.is_set():
                    return


class Load:
    """Streams that run all the time, and clients that send requests beside them until the fault, and then some more."""

    def __init__(self, url: str, control_url: str, stored: list[list[int]]) -> None:
        """`stored`: prompts that the store has, for each client's first request, and its first behind the fault."""
        self._url, self._control_url, self._stored = url, control_url, stored
        self._missing = iter(prompts_of(31, 4000))
        self._lock = threading.Lock()
        self._never, self._ended = threading.Event(), threading.Event()
        self._at_once = threading.Barrier(NUM_STREAMS, timeout=60.0)
        self._control_at_once = threading.Barrier(NUM_CONTROL, timeout=60.0)
        self.fault_s: float | None = None
        self.long = [Asked(prompt) for prompt in prompts_of(32, NUM_STREAMS, 40)]
        self.short: list[list[Asked]] = [[] for _ in range(NUM_STREAMS)]
        self.control: list[Asked] = []

    def run(self, fault: Callable[[], None]) -> None:
        """Run the load; `fault` happens when all streams run and all clients have sent some requests."""
        with ThreadPoolExecutor(2 * NUM_STREAMS + NUM_CONTROL) as pool:
            try:
                background = [pool.submit(one.run, self._url, LONGEST, self._ended) for one in self.long]
                until(lambda: all(one.tokens for one in self.long), 60.0, "all streams run")
                background += [pool.submit(self._ask_control) for _ in range(NUM_CONTROL)]
                clients = [pool.submit(self._ask, number) for number in range(NUM_STREAMS)]
                until(lambda: all(len(one) > NUM_BEFORE for one in self.short), 60.0, "all clients have sent requests")
                fault()
                self.fault_s = time.monotonic()
                for client in clients:
                    client.result()
                assert all(len(one.tokens) < LONGEST for one in self.long), "the streams have ended too early"
            finally:
                self.fault_s = self.fault_s or 0.0
                self._ended.set()
                self._control_at_once.abort()
            for one in background:
                one.result()

    def _ask(self, number: int) -> None:
        behind = 0
        for count in itertools.count():
            is_behind = self.fault_s is not None
            if behind == NUM_AFTER or self._ended.is_set():
                return
            with self._lock:
                of_store = count == 0 or (is_behind and behind == 0)
                asked = Asked(self._stored.pop() if of_store else next(self._missing))
            behind += is_behind
            self.short[number].append(asked)
            if count < NUM_AT_ONCE:
                self._at_once.wait()
            asked.run(self._url, 8, self._never)

    def _ask_control(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            while not self._ended.is_set():
                with self._lock:
                    asked = Asked(next(self._missing))
                self._control_at_once.wait()
                asked.run(self._control_url, 8, self._never)
                self.control.append(asked)

    def before(self) -> list[Asked]:
        """Requests whose first event came before the fault."""
        assert self.fault_s is not None
        return [one for client in self.short for one in client if one.first_s < self.fault_s]

    def after(self) -> list[list[Asked]]:
        """The other ones, by client."""
        assert self.fault_s is not None
        return [[one for one in client if one.first_s >= self.fault_s] for client in self.short]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("llama"))


Deployment = tuple[Server, Server, str, str]
"""The owner, the reader, and the URLs of the routers of the reader and of the control server."""


def with_stored_prompts(model: str, master: Master, prompts: list[list[int]]) -> Iterator[Deployment]:
    """Start the servers, and store `prompts` through the owner. Yields one `Deployment`."""
    flags = (*TIER, "--max-total-tokens", "8192")
    options = {"prefetch_timeout_per_ki_token": 0.0, "prefetch_timeout_base": DEADLINE_S}
    owner = start_server(model, "prefill", *flags, *mooncake_flags(master, "64mb", **options), name="owner")
    reader = start_server(model, "prefill", *flags, *mooncake_flags(master, "0", **options), name="reader")
    control = start_server(model, "prefill", *flags, name="control")
    decode = ("--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", str(10 * LONGEST))
    decoder = start_server(model, "decode", *decode)
    with running(owner, reader, control, decoder):
        for server in (owner, reader):
            until(lambda server=server: is_connected(server), 30.0, "the store is connected")
        fill = start_router([owner], [decoder])
        with running(fill):
            outputs(fill.url, prompts, 1)
        until_stored(owner, len(prompts) * 192)
        routers = start_router([reader], [decoder]), start_router([control], [decoder])
        with running(*routers):
            yield owner, reader, routers[0].url, routers[1].url
            assert_idle(reader, decoder, deadline_s=60.0)


def happen(event: str, master: Master, owner: Server) -> None:
    """Stop or kill the master, or the process of the owner's client."""
    who, _, what = event.partition(" ")
    pid = master.process.pid
    if who == "owner":
        clients = [one for one in psutil.Process(owner.child.pid).children(recursive=True) if is_client(one)]
        assert len(clients) == 1
        pid = clients[0].pid
    os.kill(pid, signal.SIGSTOP if what == "stopped" else signal.SIGKILL)


def is_client(process: psutil.Process) -> bool:
    """Whether a process is that of Mooncake's client."""
    return "mooncake_child" in " ".join(process.cmdline())


@pytest.mark.parametrize("event", ["master killed", "master stopped", "owner killed", "owner stopped"])
def test_a_store_that_goes_away_under_load_costs_one_deadline(model: str, master: Master, event: str) -> None:
    """No request waits longer than usual and one deadline, and each client waits so once at most."""
    stored = prompts_of(30, 2 * NUM_STREAMS)
    for owner, reader, url, control_url in with_stored_prompts(model, master, stored):
        load = Load(url, control_url, list(stored))
        load.run(lambda owner=owner: happen(event, master, owner))  # type: ignore[misc]
        assert reader.counter("prefetched_tokens") >= 192, "the store was read before the fault"
    took = [[round(one.ttft_s, 3) for one in client] for client in load.after()]
    usual = SPREAD * max(one.ttft_s for one in [*load.before(), *load.control])
    assert max(ttft_s for client in took for ttft_s in client) <= usual + DEADLINE_S, (usual, took)
    for client in took:
        assert sum(ttft_s > max(usual, DEADLINE_S) for ttft_s in client) <= 1, (usual, took)
    asked = [*load.long, *load.control, *(one for client in load.short for one in client)]
    with running_monolith(model, *TIER[:4], "--max-total-tokens", str(10 * LONGEST)) as alone:
        longest = max(len(one.tokens) for one in load.long)
        expected = outputs(alone.url, [one.prompt for one in load.long], longest)
        for first in range(NUM_STREAMS, len(asked), 32):
            expected += outputs(alone.url, [one.prompt for one in asked[first : first + 32]], 8)
    for one, tokens in zip(asked, expected, strict=True):
        assert one.tokens and one.tokens == tokens[: len(one.tokens)]
