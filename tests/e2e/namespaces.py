"""Hosts on one machine: network namespaces, and between them a network with delay, loss and partitions.

Each namespace has a TUN device; a thread here carries packets from one to the other, late, or not at all. It does what
`tc netem` does, which needs a kernel module that many kernels (containers, micro virtual machines) lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TUN = "/dev/net/tun"
_DEVICE = "eth0"
_MAX_PACKET = 65536
_DESTINATION = slice(16, 20)
"""Where an IPv4 packet says where it goes."""


def why_not() -> str | None:
    """Why this machine cannot have hosts of ours; None when it can."""
    if shutil.which("ip") is None:
        return "there is no ip here (Debian: iproute2)"
    name = f"pds-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if made.returncode != 0:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    try:
        os.close(Host(name, "10.77.0.1").call(_open_device))
    except OSError as error:
        return f"TUN devices are not permitted here: {error}"
    finally:
        _run("ip", "netns", "del", name)
    return None


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


class Network:
    """Hosts, and the thread that carries packets between them: each takes `delay_s`, and `loss` of them are lost."""

    def __init__(self, count: int, *, delay_s: float, loss: float, seed: int = 0) -> None:
        self.delay_s, self.loss = delay_s, loss
        self.bytes_per_s: float | None = None
        """What each host can send; None: as much as it likes."""
        self.num_carried = self.num_lost = 0
        self._rng = random.Random(seed)
        self._cut: frozenset[str] = frozenset()
        self._ended = threading.Event()
        self._devices: dict[str, int] = {}
        self.hosts: list[Host] = []
        mark = uuid.uuid4().hex[:8]
        for index in range(count):
            host = Host(f"pds-{mark}-{index}", f"10.77.0.{index + 1}")
            _run("ip", "netns", "add", host.namespace)
            self.hosts.append(host)
            self._devices[host.address] = host.call(_open_device)
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", _DEVICE)
            _run("ip", "-n", host.namespace, "link", "set", _DEVICE, "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        self._thread = threading.Thread(target=self._carry, name="network")
        self._thread.start()

    def cut(self, *hosts: Host) -> None:
        """These hosts, and only these, are cut off: nothing reaches them, nothing leaves them."""
        self._cut = frozenset(host.address for host in hosts)

    def close(self) -> None:
        """End the thread, remove everything."""
        self._ended.set()
        self._thread.join()
        for device in self._devices.values():
            os.close(device)
        for host in self.hosts:
            _run("ip", "netns", "del", host.namespace)

    def _carry(self) -> None:
        addresses = {device: address for address, device in self._devices.items()}
        under_way: list[tuple[float, int, str, str, bytes]] = []
        order = itertools.count()
        free_at: dict[int, float] = dict.fromkeys(addresses, 0.0)
        """When the line of each host has sent what it was given."""
        while not self._ended.is_set():
            wait_s = min(0.1, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.1
            for device in select.select(list(addresses), [], [], wait_s)[0]:
                packet = os.read(device, _MAX_PACKET)
                if packet[0] >> 4 == 4:
                    target = socket.inet_ntoa(packet[_DESTINATION])
                    sending_s = len(packet) / self.bytes_per_s if self.bytes_per_s else 0.0
                    free_at[device] = max(free_at[device], time.monotonic()) + sending_s
                    arrives = free_at[device] + self.delay_s
                    heapq.heappush(under_way, (arrives, next(order), addresses[device], target, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, source, target, packet = heapq.heappop(under_way)
                if target not in self._devices or {source, target} & self._cut or self._rng.random() < self.loss:
                    self.num_lost += 1
                    continue
                os.write(self._devices[target], packet)
                self.num_carried += 1


@contextlib.contextmanager
def network(count: int, *, delay_s: float, loss: float) -> Iterator[Network]:
    """A network of so many hosts."""
    made = Network(count, delay_s=delay_s, loss=loss)
    try:
        yield made
    finally:
        made.close()


def _open_device() -> int:
    """The TUN device of the namespace of the calling thread; gone when the handle is closed."""
    handle = os.open(_TUN, os.O_RDWR)
    try:
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(handle)
        raise
    return handle


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
