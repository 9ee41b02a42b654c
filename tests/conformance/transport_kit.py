"""What the transport tests share: memory that can be registered, and peers in this process or in their own."""

from __future__ import annotations

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
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.memory import shared
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport

READY_TIMEOUT_S = 60.0
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
    """A child process that makes peers of one transport."""

    def __init__(self, transport: str) -> None:
        script = pathlib.Path(__file__).with_name("transport_peer.py")
        root = script.parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(script), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        stdout = self._process.stdout
        assert stdout is not None
        self._ready: queue.Queue[list[str]] = queue.Queue()
        self._notes: dict[int, queue.Queue[tuple[int, bool]]] = defaultdict(queue.Queue)
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()

    def make(self, num_bytes: int) -> ProcessPeer:
        """A new peer with a region of so many zero bytes."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(f"{num_bytes}\n")
        stdin.flush()
        pid, address, start, descriptor = self._ready.get(timeout=READY_TIMEOUT_S)
        return ProcessPeer(int(pid), address, int(start), int(descriptor), num_bytes, self._notes[int(pid)])

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            match line.split():
                case ["READY", *words]:
                    self._ready.put(words)
                case ["NOTED", pid, number, there]:
                    self._notes[int(pid)].put((int(number), there == "True"))

    def close(self) -> None:
        """End the process, and all its peers."""
        self._process.kill()
        self._process.communicate(timeout=10)


class ProcessPeer:
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
        self.address, self.start, self.notes = address, start, notes
        self._process = os.pidfd_open(pid)
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
            self._bytes: Bytes = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.uint8)

    def read(self) -> Bytes:
        """Its region now, as it is; also after the peer's end."""
        return self._bytes

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the peer."""
        signal.pidfd_send_signal(self._process, number)

    def stop(self) -> None:
        """SIGKILL. Does nothing the second time."""
        if self._process >= 0:
            self.signal(signal.SIGKILL)
            assert select.select([self._process], [], [], 10)[0], "it does not end"
            os.close(self._process)
            self._process = -1


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
