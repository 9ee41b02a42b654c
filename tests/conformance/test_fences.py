"""What `Transport.fence` promises, with real senders that are stopped in the middle of a write and go on later."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.errors import ConfigError
from pdserve.memory import shared
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import MemoryRegion, Transport

HALF_BYTES = 16 << 20
WAIT_S = 120.0
LIVING = {"shm", "nixl", "auto"}
"""Transports whose senders on this host reach our memory by themselves: the death of their process counts."""
NETWORKS_ONLY = "tcp,self"


class Sender:
    """A process of `fence_sender`, which writes `value` to one half of the receiver's region."""

    def __init__(self, name: str, destination: int, value: int) -> None:
        script = pathlib.Path(__file__).with_name("fence_sender.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(destination), str(HALF_BYTES), str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(script.parents[2])},
        )
        self._said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def write_to(self, address: str) -> None:
        """Begin, and return when the first write has landed."""
        assert self.process.stdin is not None
        self.process.stdin.write(address + "\n")
        self.process.stdin.flush()
        self.wait("WRITING")

    def wait(self, word: str) -> None:
        """Until the process says so."""
        assert self._said.get(timeout=WAIT_S) == word

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop has taken effect on return."""
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat")
            poll(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate(timeout=30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())


class Receiver:
    """This process: a region of two halves, one for each of two senders."""

    def __init__(self, name: str) -> None:
        memory = shared.allocate(2 * HALF_BYTES)
        self.bytes = np.frombuffer(memory, dtype=np.uint8)
        self.start = shared.address_of(memory)
        self.transport: Transport = open_transport(name, "127.0.0.1", None)
        self.transport.register([MemoryRegion(self.start, 2 * HALF_BYTES)])
        self.name = name

    def half(self, number: int) -> np.ndarray:
        return self.bytes[number * HALF_BYTES : (number + 1) * HALF_BYTES]

    @contextlib.contextmanager
    def sender(self, number: int) -> Iterator[Sender]:
        """One that writes its number plus one to its half."""
        sender = Sender(self.name, self.start + number * HALF_BYTES, number + 1)
        try:
            yield sender
        finally:
            sender.close()


def poll(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.005)


@contextlib.contextmanager
def receiver_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    if name.startswith("nixl") and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("nixl is not installed")
    if name == "nixl tcp":
        monkeypatch.setenv("UCX_TLS", NETWORKS_ONLY)
    try:
        receiver = Receiver(name.partition(" ")[0])
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        yield receiver
    finally:
        receiver.transport.close()


def fence_in_the_middle(receiver: Receiver, sender: Sender, session: str, rng: random.Random) -> None:
    """The sender of half 0 is stopped in a write, fenced, and goes on; the half is used again at once."""
    sender.write_to(receiver.transport.open_receiver(session))
    time.sleep(rng.uniform(0.0, 0.02))  # where in a write it is stopped
    sender.signal(signal.SIGSTOP)
    assert receiver.transport.fence(session)
    receiver.half(0)[:] = 77
    sender.signal(signal.SIGCONT)
    sender.wait("ENDED")
    foreign = int(np.count_nonzero(receiver.half(0) != 77))
    assert foreign == 0, f"{foreign} bytes of a fenced sender have landed"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mooncake", "nixl tcp"])
def test_nothing_of_a_sender_lands_after_its_fence_and_others_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver_of(name, monkeypatch) as receiver, receiver.sender(0) as fenced, receiver.sender(1) as other:
        first = receiver.transport.open_receiver("a#1")
        assert receiver.transport.open_receiver("a#1") == first
        other.write_to(receiver.transport.open_receiver("b#1"))
        for epoch in (1, 2):
            fence_in_the_middle(receiver, fenced, f"a#{epoch}", random.Random(epoch))
        assert receiver.transport.open_receiver("a#1") != first, "a fenced address never comes again"
        receiver.half(1)[:] = 0
        poll(lambda: bool((receiver.half(1) == 2).all()))
        assert receiver.transport.fence("unknown")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(LIVING))
def test_a_sender_that_reaches_our_memory_by_itself_is_fenced_by_its_death_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with receiver_of(name, monkeypatch) as receiver, receiver.sender(0) as fenced, receiver.sender(1) as other:
        fenced.write_to(receiver.transport.open_receiver("a#1"))
        other.write_to(receiver.transport.open_receiver("b#1"))
        fenced.signal(signal.SIGSTOP)
        assert not receiver.transport.fence("a#1") and not receiver.transport.fence("a#1")
        fenced.close()
        poll(lambda: receiver.transport.fence("a#1"))
        receiver.half(0)[:] = 77
        receiver.half(1)[:] = 0
        poll(lambda: bool((receiver.half(1) == 2).all()))
        assert (receiver.half(0) == 77).all()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "tries"), [("mooncake", 500), ("nixl tcp", 500)])
def test_no_byte_lands_after_any_of_many_fences(name: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver_of(name, monkeypatch) as receiver, receiver.sender(0) as sender:
        for number in range(tries):
            fence_in_the_middle(receiver, sender, f"a#{number}", random.Random(number))
