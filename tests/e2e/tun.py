"""A network in user space: hosts have TUN devices; a thread here carries packets between them, late, or not at all.

For kernels without sch_netem (containers, micro virtual machines); else the kernel does it, in `netem.py`.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import threading
import time

from tests.e2e.namespaces import DEVICE, Host, new_host, new_mark, refused, run, set_up

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TUN = "/dev/net/tun"
_MAX_PACKET = 65536
_DESTINATION = slice(16, 20)
"""Where an IPv4 packet says where it goes."""


def why_no_tun() -> str | None:
    """Why this machine cannot have such a network; None when it can."""
    return refused(lambda host: os.close(host.call(_open_device)))


class TunNetwork:
    """Hosts, and the thread that carries packets between them: each takes `delay_s`, and `loss` of them are lost."""

    def __init__(self, count: int, *, delay_s: float, loss: float, seed: int = 0) -> None:
        self.delay_s, self.loss = delay_s, loss
        self._bytes_per_s: float | None = None
        self._rng = random.Random(seed)
        self._cut: frozenset[str] = frozenset()
        self._ended = threading.Event()
        self._devices: dict[str, int] = {}
        self.hosts: list[Host] = []
        mark = new_mark()
        for index in range(count):
            host = new_host(mark, index)
            self.hosts.append(host)
            self._devices[host.address] = host.call(_open_device)
            set_up(host)
        self._thread = threading.Thread(target=self._carry, name="network")
        self._thread.start()

    def slow_down(self, bytes_per_s: float | None) -> None:
        """What each host can send from now on; None: as much as it likes."""
        self._bytes_per_s = bytes_per_s

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
            run("ip", "netns", "del", host.namespace)

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
                    sending_s = len(packet) / rate if (rate := self._bytes_per_s) else 0.0
                    free_at[device] = max(free_at[device], time.monotonic()) + sending_s
                    arrives = free_at[device] + self.delay_s
                    heapq.heappush(under_way, (arrives, next(order), addresses[device], target, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, source, target, packet = heapq.heappop(under_way)
                if target not in self._devices or {source, target} & self._cut or self._rng.random() < self.loss:
                    continue
                os.write(self._devices[target], packet)


def _open_device() -> int:
    """The TUN device of the namespace of the calling thread; gone when the handle is closed."""
    handle = os.open(_TUN, os.O_RDWR)
    try:
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(handle)
        raise
    return handle
