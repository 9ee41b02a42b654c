"""What the transport tests share: memory that can be registered, and peers in this process or in their own."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.memory import shared
from pdserve.transfer.transport import MemoryRegion, Transport
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport

READY_TIMEOUT_S = 60.0
REGION_BYTES = 32 << 20
OTHERS = tuple(os.environ.get("PDSERVE_TEST_TRANSPORTS", "").split())
"""Transports of other packages, by the names of their entry points."""
Bytes = npt.NDArray[np.uint8]


class Memory:
    """Memory of this process to register, filled with random bytes in 1..199."""

    def __init__(self, num_bytes: int, seed: int = 0) -> None:
        self._first: Bytes = np.random.default_rng(seed).integers(1, 200, num_bytes, dtype=np.uint8)
        self.bytes: Bytes = np.frombuffer(shared.allocate(num_bytes), dtype=np.uint8)
        self.region = MemoryRegion(int(self.bytes.ctypes.data), num_bytes)
        self.fill()

    def fill(self) -> None:
        """Put the first bytes back."""
        self.bytes[:] = self._first


Open = Callable[[str], tuple[Transport, "Memory", "PeerFactory"]]
"""A transport by its name, memory of `REGION_BYTES` that is registered with it, and who makes its peers."""


class PeerUnderTest(Protocol):
    """Somebody to write to."""

    address: str
    start: int

    def read(self) -> Bytes:
        """Its region now."""
        ...

    def stop(self) -> None:
        """End it suddenly."""
        ...


class PeerFactory:
    """A child process that makes peers of one transport: receivers and senders."""

    def __init__(self, transport: str) -> None:
        script = pathlib.Path(__file__).with_name("transport_peer.py")
        root = script.parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(script), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        )
        stdout = self._process.stdout
        assert stdout is not None
        self._ready: queue.Queue[list[str]] = queue.Queue()
        self._notes: dict[int, queue.Queue[tuple[int, bool]]] = defaultdict(queue.Queue)
        self._failed: dict[int, threading.Event] = defaultdict(threading.Event)
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()

    def make(self, num_bytes: int) -> ProcessPeer:
        """A new peer with a region of so many zero bytes."""
        pid, address, start, descriptor = self._ask(str(num_bytes))
        return ProcessPeer(int(pid), address, int(start), int(descriptor), num_bytes, self._notes[int(pid)])

    def send(
        self, address: str, start: int, num_bytes: int, value: int, environment: Mapping[str, str] | None = None
    ) -> Sender:
        """A process that writes `value` to `[start, start + num_bytes)` behind `address` again and again.

        Returns when it is connected and about to write.
        """
        words = [f"{name}={text}" for name, text in (environment or {}).items()]
        pid = int(self._ask(f"SEND {address} {start} {num_bytes} {value} {' '.join(words)}")[0])
        return Sender(pid, self._failed[pid])

    def _ask(self, line: str) -> list[str]:
        """Have a process made; what it says of itself. One call at a time."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()
        return self._ready.get(timeout=READY_TIMEOUT_S)

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            match line.split():
                case ["SENDING", pid]:
                    self._ready.put([pid])
                case ["FAILED", pid]:
                    self._failed[int(pid)].set()
                case ["READY", *words]:
                    self._ready.put(words)
                case ["NOTED", pid, number, there]:
                    self._notes[int(pid)].put((int(number), there == "True"))

    def close(self) -> None:
        """End the process, and all its peers."""
        self._process.kill()
        self._process.communicate(timeout=10)


class Process:
    """A process that was made by a factory."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """SIGKILL. Does nothing the second time."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it has ended with its factory
                self.signal(signal.SIGKILL)
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            assert ended.poll(10_000), "it does not end"
            os.close(self._pidfd)
            self._pidfd = -1


class Sender(Process):
    """One that writes. `failed`: a write of it has failed."""

    def __init__(self, pid: int, failed: threading.Event) -> None:
        super().__init__(pid)
        self.failed = failed


class ProcessPeer(Process):
    """A process with a transport; its region is memory that this process maps too.

    `notes`: numbers of the writes it was notified of, and whether their bytes were there when it was.
    """

    def __init__(
        self,
        pid: int,
        address: str,
        start: int,
        descriptor: int,
        num_bytes: int,
        notes: queue.Queue[tuple[int, bool]],
    ) -> None:
        super().__init__(pid)
        self.address, self.start, self.notes = address, start, notes
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
            self._bytes: Bytes = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.uint8)

    def read(self) -> Bytes:
        """Its region now, as it is; also after the peer's end."""
        return self._bytes


class LocalPeer:
    """A memory transport in this process."""

    def __init__(self, hub: MemoryHub, num_bytes: int) -> None:
        self._bytes: Bytes = np.zeros(num_bytes, dtype=np.uint8)
        self._transport = MemoryTransport(hub)
        self.start = int(self._bytes.ctypes.data)
        self._transport.register([MemoryRegion(self.start, num_bytes)])
        self.address = self._transport.address()

    def read(self) -> Bytes:
        """A copy of the region."""
        return self._bytes.copy()

    def stop(self) -> None:
        """Be gone."""
        self._transport.close()
