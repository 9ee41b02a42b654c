"""Hosts on one machine: network namespaces, each with an address; and what a network between them can do."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")
DEVICE = "eth0"
"""What a host's end of the network is called there."""
_CLONE_NEWNET = 0x40000000


class Host:
    """A namespace with an address. `argv` runs a program there; `call` runs a function there, on a thread."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace, self.address = namespace, address

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises; sockets that it opens are this host's."""
        outcome: Future[T] = Future()
        thread = threading.Thread(target=self._call, args=(function, outcome))
        thread.start()
        thread.join()
        return outcome.result()

    def _call(self, function: Callable[[], T], outcome: Future[T]) -> None:
        try:
            handle = os.open(f"/var/run/netns/{self.namespace}", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(handle)
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)


class Network(Protocol):
    """Hosts, and between them packets that come late, or not at all."""

    hosts: list[Host]

    def slow_down(self, bytes_per_s: float | None) -> None:
        """What each host can send from now on; None: as much as it likes."""

    def cut(self, *hosts: Host) -> None:
        """These hosts, and only these, are cut off: nothing reaches them, nothing leaves them."""

    def close(self) -> None:
        """Remove everything."""


def new_host(mark: str, index: int) -> Host:
    """A namespace without a device, and the address that it shall have."""
    host = Host(f"pds-{mark}-{index}", f"10.77.0.{index + 1}")
    run("ip", "netns", "add", host.namespace)
    return host


def set_up(host: Host) -> None:
    """Give the host's device its address."""
    run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
    run("ip", "-n", host.namespace, "link", "set", DEVICE, "up")
    run("ip", "-n", host.namespace, "link", "set", "lo", "up")


def new_mark() -> str:
    """What the names of a network's namespaces have in common, so that several can be there at once."""
    return uuid.uuid4().hex[:8]


def refused(attempt: Callable[[Host], object]) -> str | None:
    """Why this machine cannot have a host that `attempt` can work with (it raises OSError); None when it can."""
    if shutil.which("ip") is None:
        return "there is no ip here (Debian: iproute2)"
    try:
        host = new_host(new_mark(), 0)
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
    try:
        attempt(host)
    except OSError as error:
        return str(error)
    finally:
        run("ip", "netns", "del", host.namespace)
    return None


def run(*argv: str) -> None:
    """Run a command to its end. Raises OSError with what it said when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
