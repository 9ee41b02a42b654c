"""A real master of Mooncake Store, for tests of stores and of servers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from pdserve.config.storage_options import StorageOptions
from tests.waiting import wait_until

CLEAN_UP_S = 10.0


class Master:
    """A real `mooncake_master` on ports of its own."""

    def __init__(self, lease_ms: int = 100) -> None:
        """`lease_ms`: for so long an object stays after a call has found it."""
        self.port, self._metrics, self._lease_ms = free_port(), free_port(), lease_ms
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        program = Path(sys.executable).with_name("mooncake_master")
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self._metrics}"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [program, *ports, f"--default_kv_lease_ttl={self._lease_ms}"], stdout=quiet, stderr=quiet
        )
        wait_until(lambda: can_connect(self.port), "the master listens")
        return process

    def options(self, segment: int = 64 << 20) -> StorageOptions:
        """Options of a client."""
        return StorageOptions(
            of_backend={"master_server_address": f"127.0.0.1:{self.port}", "global_segment_size": segment}
        )

    def restart(self) -> None:
        """Kill it and start another one at the same port."""
        self.kill()
        self.process = self._start()

    def kill(self) -> None:
        """End it suddenly."""
        self.process.kill()
        self.process.wait(CLEAN_UP_S)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def can_connect(port: int) -> bool:
    """Whether something listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
