"""A stranger at the ports between the ranks of one server on two hosts: the rendezvous, gloo, and the log. The server
answers what it answered before, by the same processes. What a stranger can do there: docs/security.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import zmq
from torch.distributed import TCPStore
from zmq.utils.monitor import recv_monitor_message

from pdserve.protocol.codec import Seal
from pdserve.ranks.failure_detector import PeerRank
from pdserve.ranks.links import contact_seal, frame_seal
from pdserve.ranks.rendezvous import Introduction
from tests.e2e.harness import Nodes, assert_idle, running_nodes, until
from tests.e2e.test_data_ports import num_established
from tests.e2e.test_keys import say_all
from tests.tiny import Family

TOKEN = "the-token-of-these-two-nodes"
FLAGS = ("--tp-size", "2", "--dtype", "float32", "--max-total-tokens", "4096", "--cpu-threads", "1")
NUM_TOKENS = 8
BODY = {
    "input_ids": [7 + i % 200 for i in range(100)],
    "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
    "return_logprob": True,
}
HOST = "127.0.0.1"
NAMES = ("rank 0", "rank 1")
NUM_CONNECTIONS = 100
NUM_FLOOD = 5_000_000
"""More than both ranks take in the time after which a rank counts as silent."""
DEADLINE_S = 60.0
BRIEFLY_S = 0.25
HEADER = struct.Struct("<IQ")
"""Of a frame of the log: rank of the sender, and its count."""

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Target:
    """A running server, and what a stranger has of it. `store` is a client of the rendezvous that came before the ranks
    had met; `peers` are the ports of the log, `closed` the rendezvous and gloo's.
    """

    nodes: Nodes
    store: TCPStore
    peers: tuple[PeerRank, ...]
    closed: tuple[Address, ...]

    @property
    def log(self) -> tuple[Address, ...]:
        """Addresses of `peers`."""
        return tuple((HOST, _port(peer)) for peer in self.peers)

    def ask(self) -> tuple[Any, ...]:
        """Tokens and their log probabilities."""
        answer = requests.post(f"{self.nodes.first.url}/generate", json=BODY, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert len(body["output_ids"]) == NUM_TOKENS
        return body["output_ids"], body["meta_info"]["output_token_logprobs"]

    @contextlib.contextmanager
    def same(self) -> Iterator[None]:
        """Nothing changes: the answer, what is free, the audit, connections, descriptors, and the processes."""

        def seen() -> Any:
            server = self.nodes.first
            answer = self.ask()
            assert_idle(server)
            assert requests.get(f"{server.url}/health", timeout=DEADLINE_S).status_code == 200
            state = server.state()
            processes = [(rank.pid, rank.create_time()) for rank in self.nodes.ranks]
            return answer, state["memory"], state["failures"], state["audit"], processes

        def open_now() -> tuple[int, list[int]]:
            return num_established([*self.log, *self.closed]), [rank.num_fds() for rank in self.nodes.ranks]

        before, opened = seen(), open_now()
        yield
        until(lambda: open_now() == opened, DEADLINE_S, "the stranger's connections are closed")
        assert seen() == before


def _port(peer: PeerRank) -> int:
    return int(peer.endpoint.rpartition(":")[2])


def is_listening(port: int) -> bool:
    with contextlib.suppress(ConnectionError), socket.create_connection((HOST, port), timeout=DEADLINE_S):
        return True
    return False


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Target]:
    """The stranger comes to the rendezvous while the first node waits for the second, and says that a rank refuses."""
    stores: list[TCPStore] = []

    def come(port: int) -> None:
        until(lambda: is_listening(port), DEADLINE_S, "the first node waits")
        timeout = timedelta(seconds=DEADLINE_S)
        stores.append(TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False))
        stores[0].set("refused", "tp_size: rank 1 refuses to start")

    with running_nodes(str(tiny_checkpoint("llama")), TOKEN, *FLAGS, between=come) as nodes:
        ranks = nodes.ranks
        assert len(ranks) == 2
        introduction = Introduction(NAMES, 0, stores[0], TOKEN, {})
        peers = tuple(introduction.lookup(rank) for rank in range(2))
        connections = [one for rank in ranks for one in rank.net_connections(kind="tcp")]
        found = {one.laddr.port for one in connections if one.status == "LISTEN"}
        log = {_port(peer) for peer in peers}
        assert log < found and nodes.port in found and len(found - log) >= 3, "the rendezvous, and gloo of both ranks"
        yield Target(nodes, stores[0], peers, tuple((HOST, port) for port in sorted(found - log)))


# ---------------------------------------------------------------------- any bytes


def test_a_port_that_was_needed_only_to_meet_is_closed(target: Target) -> None:
    def is_open(address: Address) -> bool:
        try:
            socket.create_connection(address, timeout=BRIEFLY_S).close()
        except TimeoutError:
            return False
        return True

    with target.same(), ThreadPoolExecutor(max_workers=len(target.closed)) as pool:
        assert not any(pool.map(is_open, target.closed))


def test_junk(target: Target) -> None:
    with target.same():
        for host, port in target.log:
            say_all(host, port)
            for size in (1, 8, 24, 100, 1 << 16):
                with socket.create_connection((host, port), timeout=DEADLINE_S) as stranger:
                    stranger.settimeout(BRIEFLY_S)
                    with contextlib.suppress(OSError):  # it takes no more, or has had enough
                        stranger.sendall(os.urandom(size))


def test_an_http_request(target: Target) -> None:
    with target.same():
        for host, port in target.log:
            with pytest.raises(requests.RequestException):
                requests.post(f"http://{host}:{port}/generate", json=BODY, timeout=BRIEFLY_S)


def test_connections_that_stay_open(target: Target) -> None:
    """Silent ones, and ones that have said the beginning of something; requests are answered beside them."""
    with target.same(), contextlib.ExitStack() as opened:
        before = target.ask()
        for address in target.log:
            for said in (b"", b"\xff", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", bytes(7)):
                stranger = opened.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(said)
        assert target.ask() == before


def test_many_connections(target: Target) -> None:
    """All at once, and gone again."""
    with target.same():
        before = target.ask()
        for address in target.log:
            with contextlib.ExitStack() as opened:
                for _ in range(NUM_CONNECTIONS):
                    opened.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
                assert target.ask() == before


# ---------------------------------------------------------------------- the log


def forged(peers: tuple[PeerRank, ...], receiver: int) -> list[bytes]:
    """What a stranger can make of all that the rendezvous tells: everything but the token."""
    to, sender = peers[receiver], peers[1 - receiver]
    frame = HEADER.pack(sender.rank, 1 << 32) + b"\x81\xa4type\xa4Stop"
    seals = (Seal(""), Seal("guess"), frame_seal("guess", sender.nonce, to.nonce), frame_seal("", "", ""))
    return [b"", b"junk", frame, *(seal.close(frame) for seal in seals), os.urandom(1 << 20)]


def num_warnings(lines: Iterable[str]) -> int:
    return sum("refused a frame that claims to be from another rank" in line for line in list(lines))


def test_forged_frames(target: Target) -> None:
    """Over a connection like a rank's. Each rank says so in its log, once."""
    with target.same(), zmq.Context() as context:
        for number, peer in enumerate(target.peers):
            with context.socket(zmq.PUSH) as push:
                push.linger = round(DEADLINE_S * 1000)
                push.connect(peer.endpoint)
                for frame in forged(target.peers, number):
                    push.send(frame)
                push.send_multipart(forged(target.peers, number))
    for node in (target.nodes.first, target.nodes.second):
        until(lambda node=node: num_warnings(node.lines) == 1, DEADLINE_S, "a warning of the refused frames")


def test_other_sockets_of_zmq(target: Target) -> None:
    """A port of the log takes none but those that push."""
    with target.same(), zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.ROUTER, zmq.PUB, zmq.SUB, zmq.PULL, zmq.REQ, zmq.PAIR):
            for peer in target.peers:
                with context.socket(kind) as stranger:
                    stranger.linger = 0
                    events = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
                    stranger.connect(peer.endpoint)
                    assert events.poll(DEADLINE_S * 1000), "the handshake ends"
                    assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED, kind
                    stranger.disable_monitor()


@pytest.mark.slow
def test_a_flood_of_frames(target: Target) -> None:
    """For longer than a rank may be silent, over four connections to each port."""
    with target.same(), zmq.Context() as context, contextlib.ExitStack() as opened:
        pushes = [opened.enter_context(context.socket(zmq.PUSH)) for _ in range(4 * len(target.peers))]
        for number, push in enumerate(pushes):
            push.linger, push.sndtimeo = 0, round(DEADLINE_S * 1000)
            push.connect(target.peers[number % len(target.peers)].endpoint)
        before = target.ask()
        for number in range(NUM_FLOOD):
            pushes[number % len(pushes)].send(b"junk of a stranger")
            if number % (NUM_FLOOD // 10) == 0:
                assert target.ask() == before


# ---------------------------------------------------------------------- the rendezvous


def test_a_stranger_who_came_before_the_ranks_had_met_changes_nothing_afterwards(target: Target) -> None:
    """It reads and overwrites all keys: contacts, the refusal of a start, gloo's addresses. Then it makes many more."""
    store = target.store
    with target.same():
        before, keys = target.ask(), store.list_keys()
        assert {"contact/0", "contact/1"} < set(keys) and any(key.startswith("parallel/") for key in keys)
        assert all(TOKEN.encode() not in bytes(store.get(key)) for key in keys)
        contacts = [store.get(f"contact/{rank}") for rank in range(2)]
        for rank in range(2):
            for written in (contact_seal("guess", f"contact/{rank}").close(b"junk").hex(), contacts[1 - rank], b""):
                store.set(f"contact/{rank}", written)
                assert target.ask() == before
        store.set("refused", "tp_size: rank 0 is refused")
        for key in keys:
            store.set(key, os.urandom(100))
            store.set(f"{key}/more", os.urandom(100))
        for number in range(1000):
            store.set(f"junk/{number}", b"x" * 100)
        assert target.ask() == before
        assert all(store.delete_key(key) for key in keys)
