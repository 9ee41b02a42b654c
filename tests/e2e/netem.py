"""A network by the kernel: a veth for each host, a bridge between them, and delay and loss by `tc netem`."""

from __future__ import annotations

import shutil

from tests.e2e.namespaces import DEVICE, Host, new_host, new_mark, refused, run, set_up

_SWITCH = "switch"
_MAX_QUEUED = "100000"
"""Packets that may be under way from a host; netem drops what is more."""
_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no device of the network has."""


def why_no_veth() -> str | None:
    """Why this machine cannot have a `VethNetwork`; None when it can."""
    if shutil.which("bridge") is None:
        return "there is no bridge here (Debian: iproute2)"
    return refused(_try_veth)


def why_no_netem() -> str | None:
    """Why this machine cannot have a `NetemNetwork`; None when it can."""
    if shutil.which("tc") is None:
        return "there is no tc here (Debian: iproute2)"
    return refused(_try_netem)


class VethNetwork:
    """Hosts whose packets arrive at once, until a link is cut."""

    def __init__(self, count: int) -> None:
        mark = new_mark()
        self._switch = Host(f"pds-{mark}-{_SWITCH}", "")
        run("ip", "netns", "add", self._switch.namespace)
        run("ip", "-n", self._switch.namespace, "link", "add", _SWITCH, "type", "bridge")
        run("ip", "-n", self._switch.namespace, "link", "set", _SWITCH, "up")
        self.hosts: list[Host] = []
        self._ports: dict[str, str] = {}
        for index in range(count):
            host = new_host(mark, index)
            self.hosts.append(host)
            port = self._ports[host.address] = f"port{index}"
            run(*_new_veth(host, "peer", "name", port, "netns", self._switch.namespace))
            run("ip", "-n", self._switch.namespace, "link", "set", port, "master", _SWITCH, "up")
            set_up(host)

    def cut(self, *hosts: Host) -> None:
        """These hosts, and only these, are cut off: the switch sends nothing to them and takes nothing from them."""
        cut_off = {host.address for host in hosts}
        for host in self.hosts:
            port = self._ports[host.address]
            state = "disabled" if host.address in cut_off else "forwarding"
            run("bridge", "-n", self._switch.namespace, "link", "set", "dev", port, "state", state)

    def set_device(self, host: Host, *, up: bool) -> None:
        """Take the device of `host` down, which its own processes are told; or up again."""
        run("ip", "-n", host.namespace, "link", "set", DEVICE, "up" if up else "down")

    def swallow(self, source: Host, target: Host) -> None:
        """From now on packets from `source` to `target` get lost, and only these."""
        where = ("lladdr", _NOBODY, "dev", DEVICE, "nud", "permanent")
        run("ip", "-n", source.namespace, "neigh", "replace", target.address, *where)

    def deliver(self, source: Host, target: Host) -> None:
        """Undo `swallow`."""
        run("ip", "-n", source.namespace, "neigh", "del", target.address, "dev", DEVICE)

    def close(self) -> None:
        """Remove the namespaces; their devices go with them."""
        for host in (*self.hosts, self._switch):
            run("ip", "netns", "del", host.namespace)


class NetemNetwork(VethNetwork):
    """Hosts whose packets leave `delay_s` late; `loss` of them are lost."""

    def __init__(self, count: int, *, delay_s: float, loss: float) -> None:
        super().__init__(count)
        self._usual = ("delay", f"{delay_s * 1e3:g}ms", "loss", f"{loss * 100:g}%", "limit", _MAX_QUEUED)
        for host in self.hosts:
            _netem(host, DEVICE, *self._usual)

    def slow_down(self, bytes_per_s: float | None) -> None:
        """What each host can send from now on; None: as much as it likes."""
        rate = ("rate", f"{bytes_per_s * 8:.0f}bit") if bytes_per_s else ()
        for host in self.hosts:
            _netem(host, DEVICE, *self._usual, *rate)


def _new_veth(host: Host, *peer: str) -> list[str]:
    return ["ip", "link", "add", DEVICE, "netns", host.namespace, "type", "veth", *peer]


def _netem(host: Host, device: str, *what: str) -> None:
    run("tc", "-n", host.namespace, "qdisc", "replace", "dev", device, "root", "netem", *what)


def _try_veth(host: Host) -> None:
    run(*_new_veth(host, "peer", "name", "port", "netns", host.namespace))
    run("ip", "-n", host.namespace, "link", "add", _SWITCH, "type", "bridge")


def _try_netem(host: Host) -> None:
    _try_veth(host)
    _netem(host, DEVICE, "delay", "1ms")
