"""What the transport tests share: memory that can be registered, and peers in this process or in their own."""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport

READY_TIMEOUT_S = 60.0
Bytes = npt.NDArray[np.uint8]


class Memory:
    """Memory of this process to register, filled with random bytes in 1..199."""

    def __init__(self, num_bytes: int, seed: int = 0) -> None:
        self._seed = seed
        self.bytes: Bytes = np.empty(num_bytes, dtype=np.uint8)
        self.region = MemoryRegion(int(self.bytes.ctypes.data), num_bytes)
        self.fill()

    def fill(self) -> None:
        """Put the first bytes back."""
        self.bytes[:] = np.random.default_rng(self._seed).integers(1, 200, self.bytes.size, dtype=np.uint8)


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


class ProcessPeer:
    """A child process with a mooncake transport; its region is a file that this process maps too."""

    def __init__(self, path: pathlib.Path, num_bytes: int) -> None:
        self._path = path
        path.write_bytes(bytes(num_bytes))
        script = pathlib.Path(__file__).with_name("transport_peer.py")
        root = script.parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(num_bytes), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        self.address, self.start = self._await_ready()

    def _await_ready(self) -> tuple[str, int]:
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: [lines.put(line) for line in stdout], daemon=True).start()
        while True:
            words = lines.get(timeout=READY_TIMEOUT_S).split()
            if words[:1] == ["READY"]:
                return words[1], int(words[2])

    def read(self) -> Bytes:
        """The file behind the peer's region."""
        return np.fromfile(self._path, dtype=np.uint8)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the peer."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


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
