"""A stranger at the data ports of the transfer engines: the servers answer what they answered before, and no page that
they keep has changed. From another address than the peer's it cannot connect. What a stranger on the peer's host can do
who knows an engine's protocol and an address: docs/security.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.transfer.transports.nixl_engine import is_installed
from tests.e2e.harness import Pair, assert_idle, running_pair, until
from tests.e2e.test_keys import data_ports, reachable, say_all
from tests.tiny import Family

PAGE_SIZE, NUM_PAGES = 16, 20
PROMPT = [7 + i % 200 for i in range(PAGE_SIZE * NUM_PAGES + 5)]
BODY = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    "return_logprob": True,
}
NUM_CONNECTIONS = 100
"""As many as Mooncake's engine lets wait while it reads from one."""
DEADLINE_S = 30.0
BRIEFLY_S = 0.25
ELSEWHERE = ("127.0.0.66", "127.1.2.3")
"""Addresses of strangers; both servers are at 127.0.0.1."""

MOONCAKE_HEADER = struct.Struct("<QQB7x")
"""Length, address, and what is to be done; the answer is a status."""
READ, WRITE, ANSWER_ME = 0x00, 0x01, 0x80
REJECTED = struct.pack("<Q", 0x4D435456 << 32 | 1)
FOREIGN = (0, 8, 0x1000, 0x7FFF_FFFF_F000, (1 << 64) - 4096, (1 << 64) - 1)
"""Addresses at which nothing is registered."""


@pytest.fixture(
    scope="module",
    params=[
        "mooncake",
        pytest.param(
            "nixl",
            marks=[pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason="nixl is not installed")],
        ),
    ],
)
def pair(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    """Both servers keep the pages of prompts that they had."""
    flags = ("--disaggregation-transfer-backend", request.param, "--dtype", "float32", "--max-total-tokens", "4096")
    decode = ("--disaggregation-decode-enable-radix-cache",)
    with running_pair(str(tiny_checkpoint("llama")), *flags, decode_flags=decode) as started:
        assert started.decode.state()["facts"]["transfer_backend"] == request.param
        started.generate(**BODY)
        yield started


def ask(pair: Pair) -> tuple[Any, ...]:
    """Tokens and their log probabilities; both servers read the prompt's pages from their caches."""
    answer = pair.generate(**BODY)
    assert answer["meta_info"]["cached_tokens"] >= PAGE_SIZE * (NUM_PAGES - 1)
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


@contextlib.contextmanager
def nothing_changes(pair: Pair) -> Iterator[list[tuple[str, int]]]:
    """With the data ports of decode that prefill reaches. In the answer, in what is free and kept, in the peers and in
    the audits.
    """

    def seen() -> Any:
        answer = ask(pair)
        assert_idle(*pair.workers)
        states = [worker.state() for worker in pair.workers]
        peers = [(peer["endpoint"], peer["instance"], peer["state"]) for one in states for peer in one["peers"]]
        return answer, [(one["memory"], one["failures"], one["audit"]) for one in states], peers

    before = seen()
    ports = reachable(data_ports(pair.decode))
    assert ports, "decode has an engine for prefill"
    yield ports
    assert seen() == before


def test_from_another_address_no_port_is_reached(pair: Pair) -> None:
    """From the peer's not all are: base engines accept no connection, nor do Mooncake's engines that send."""
    with nothing_changes(pair) as admitting:
        ports = [data_ports(worker) for worker in pair.workers]
        assert set(admitting) < set(ports[1])
        for source in ELSEWHERE:
            assert [reachable(each, source) for each in ports] == [[], []]
        sending = reachable(ports[0])
        assert set(sending) < set(ports[0])
        assert not sending or pair.decode.state()["facts"]["transfer_backend"] == "nixl"


def test_junk(pair: Pair) -> None:
    with nothing_changes(pair) as ports:
        for host, port in ports:
            say_all(host, port)
            for size in (1, 8, 24, 100, 1 << 16):
                with socket.create_connection((host, port), timeout=DEADLINE_S) as stranger:
                    stranger.settimeout(BRIEFLY_S)
                    with contextlib.suppress(OSError):  # it takes no more, or has had enough
                        stranger.sendall(os.urandom(size))


def test_an_http_request(pair: Pair) -> None:
    with nothing_changes(pair) as ports:
        for host, port in ports:
            with pytest.raises(requests.RequestException):
                requests.post(f"http://{host}:{port}/generate", json=BODY, timeout=BRIEFLY_S)


def test_connections_that_stay_open(pair: Pair) -> None:
    """Silent ones, and ones that have said the beginning of something; requests are answered beside them."""
    with contextlib.ExitStack() as opened, nothing_changes(pair) as ports:
        for address in ports:
            for said in (b"", b"\x00", b"\x10\x00\x00\x00", bytes(7)):
                stranger = opened.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(said)


def test_many_connections(pair: Pair) -> None:
    """All at once, and gone again; no descriptor of a server is lost by them. A NIXL agent that sends looks at its
    connections when it sends: hence the questions.
    """
    with nothing_changes(pair) as ports:
        before = num_established(ports)
        for address in ports:
            with contextlib.ExitStack() as opened:
                for _ in range(NUM_CONNECTIONS):
                    opened.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
        until(lambda: ask(pair) and num_established(ports) <= before, DEADLINE_S, "their connections are closed")


def num_established(ports: list[tuple[str, int]]) -> int:
    """Connections that listeners at these ports have, half-closed ones as well."""
    wanted = {f"{port:04X}" for _, port in ports}
    states = {"01", "08"}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[1].rpartition(":")[2] in wanted and row[3] in states for row in rows)


def test_sound_requests_for_foreign_memory(pair: Pair) -> None:
    """In Mooncake's own protocol. NIXL's is UCX's, whose requests for memory carry a key that a stranger lacks."""
    if pair.decode.state()["facts"]["transfer_backend"] != "mooncake":
        pytest.skip("Mooncake's protocol")
    with nothing_changes(pair) as ports:
        rejected = [told for address in ports for told in ask_for_foreign_memory(address)]
        assert rejected and set(rejected) == {REJECTED}


def ask_for_foreign_memory(address: tuple[str, int]) -> list[bytes]:
    """What the port answers to reads and writes; nothing where it is the other one of an engine's two ports."""
    answers = []
    for where in FOREIGN:
        for what in (READ | ANSWER_ME, WRITE | ANSWER_ME, READ, WRITE):
            with socket.create_connection(address, timeout=DEADLINE_S) as stranger:
                stranger.settimeout(BRIEFLY_S)
                stranger.sendall(MOONCAKE_HEADER.pack(4096, where, what))
                said = b""
                with contextlib.suppress(OSError):
                    said = stranger.recv(1 << 12)
            if what & ANSWER_ME and not said:
                return []
            answers += [said] if said else []
    return answers
