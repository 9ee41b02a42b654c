"""The deployment that `benchmarks.chaos` breaks: prefill and decode servers and a router, each on a host of its own.

Hosts are network namespaces where this machine permits them. Elsewhere all servers listen on loopback, and proxies
before their ports can be told to cut links. With namespaces the caller's thread moves to the client's host: what it
starts, and every thread that it starts, speaks from there. Also what is measured of the processes: memory, descriptors,
threads, and what is left at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks.chaos_proxies import BOOTSTRAP, HTTP, Proxies
from benchmarks.chaos_server import NAME_VARIABLE, REGISTRAR_VARIABLE
from pdserve.base.process import ChildError, end_all
from tests.e2e.harness import Server
from tests.e2e.namespaces import Host
from tests.e2e.netem import VethNetwork, why_no_veth

_CLONE_NEWNET = 0x40000000
GRACE_S, READY_S = 20.0, 600.0
LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[1]
PORT = 30000
"""Of every server on its own host; its bootstrap server has the next one."""
NAMESPACES, PROXY, NONE, AUTO = "namespaces", "proxy", "none", "auto"
"""How links are cut. Auto: by namespaces where they are permitted, else by proxies."""


def choose_links(wanted: str) -> str:
    """How links are cut on this machine. Raises SystemExit when it cannot be as it is wanted."""
    if wanted not in (AUTO, NAMESPACES):
        return wanted
    why_not = why_no_veth()
    if why_not is not None and wanted == NAMESPACES:
        raise SystemExit(f"--links namespaces: {why_not}")
    return NAMESPACES if why_not is None else PROXY


@dataclasses.dataclass(frozen=True)
class Use:
    """What one process takes of its host."""

    rss_mb: float
    descriptors: int
    threads: int


class Member:
    """One server of the farm: it keeps its name, host and ports while processes come and go."""

    def __init__(self, farm: Farm, name: str, mode: str, host: Host | None) -> None:
        self.farm, self.name, self.mode, self.host = farm, name, mode, host
        self.address = LOOPBACK if host is None else host.address
        self.started: list[Server] = []
        """Every process that was started in its place; the last one is `server`."""
        self.url = ""
        """Where others reach it, alive or dead; known from its first start on."""
        self.bootstrap = (self.address, 0)
        """A prefill server's bootstrap server, likewise."""
        self._ports = (0, 0) if host is None else (PORT, PORT + 1)
        """Its own ports for HTTP and bootstrap, which a proxy may be before."""

    @property
    def server(self) -> Server:
        """Its present process."""
        return self.started[-1]

    def start(self) -> None:
        """Start a process in its place; on the ports of the one before, where there was one."""
        flags = ["--host", self.address, "--port", str(self._ports[0])]
        proxies, variables = self.farm.proxies, {}
        if self.mode == "router":
            module = "pdserve.launch_router"
            flags += self.farm.router_flags()
        else:
            module = "pdserve.launch_server" if proxies is None else "benchmarks.chaos_server"
            flags += ["--disaggregation-mode", self.mode, *self.farm.server_flags]
            if self.mode == "prefill":
                flags += ["--disaggregation-bootstrap-port", str(self._ports[1])]
            if proxies is not None:
                proxies.drop(self.name)
                search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
                variables = {REGISTRAR_VARIABLE: str(proxies.port), NAME_VARIABLE: self.name, "PYTHONPATH": search}
        before = [] if self.host is None else self.host.argv([])
        with _variables(variables):
            self.started.append(Server(self.name, module, flags, before=before))

    def wait(self) -> None:
        """Block until it serves."""
        server = self.server
        try:
            ready = server.ready = server.child.wait_ready(READY_S)
        except ChildError as error:
            raise ChildError("\n".join([str(error), *server.lines])) from error
        self._ports = (int(ready.url.rsplit(":", 1)[1]), ready.bootstrap_port or 0)
        port, bootstrap = self._ports
        if self.farm.proxies is not None and self.mode != "router":  # a proxy keeps its port, as a server does
            port = self.farm.proxies.open(self.name, HTTP, port, at=self.port if self.url else 0)
            if bootstrap:
                bootstrap = self.farm.proxies.open(self.name, BOOTSTRAP, bootstrap, at=self.bootstrap[1])
        self.url, self.bootstrap = f"http://{self.address}:{port}", (self.address, bootstrap)

    @property
    def port(self) -> int:
        """The port of `url`."""
        return int(self.url.rsplit(":", 1)[1])

    def processes(self) -> list[psutil.Process]:
        """The server's process first, then its children; none that has ended."""
        if not self.started:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.server.child.pid)
            if first.status() != psutil.STATUS_ZOMBIE:
                return [first, *first.children(recursive=True)]
        return []

    def engine(self) -> psutil.Process | None:
        """The scheduler's process: of the children the one with most memory."""
        sizes = []
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.Error):
                sizes.append((process.memory_info().rss, process))
        return max(sizes, key=lambda size: size[0])[1] if sizes else None

    def use(self) -> dict[str, Use]:
        """What its processes take, by what they are: `decode-0 API`, `decode-0 engine`."""
        found: dict[str, Use] = {}
        engine = self.engine()
        for index, process in enumerate(self.processes()):
            if index and process != engine:
                continue
            kind = "router" if self.mode == "router" else "API" if index == 0 else "engine"
            with contextlib.suppress(psutil.Error):
                with process.oneshot():
                    rss = process.memory_info().rss / 2**20
                    use = Use(rss, process.num_fds(), process.num_threads())
                found[self.name if kind == "router" else f"{self.name} {kind}"] = use
        return found

    def state(self) -> dict[str, Any]:
        """`/get_server_info`. Raises requests.RequestException."""
        answer = requests.get(f"{self.url}/get_server_info", timeout=10)
        answer.raise_for_status()
        return dict(answer.json())

    def leaks(self) -> dict[str, Any]:
        """What is not free although nothing should be under way; why it cannot be told, where that is so."""
        try:
            return self.server.leaks()
        except (requests.RequestException, AssertionError) as error:
            return {"state": str(error)[:200]}


class Farm:
    """All members. `start` must be called by the main thread, which owns the children."""

    def __init__(
        self, num_prefill: int, num_decode: int, server_flags: Sequence[str], router_flags: Sequence[str], links: str
    ) -> None:
        """`links`: as `choose_links` says."""
        self.server_flags, self._router_flags = list(server_flags), list(router_flags)
        count = num_prefill + num_decode + 2
        self.network = VethNetwork(count) if links == NAMESPACES else None
        self._pids: dict[str, list[int]] = {}
        """Processes of workers, as far as they are known."""
        self.proxies = Proxies(self._owner_of) if links == PROXY else None
        hosts: list[Host | None] = [None] * count if self.network is None else [*self.network.hosts]
        self.client_host = hosts.pop()
        self.router = Member(self, "router", "router", hosts.pop())
        self.prefill = [Member(self, f"prefill-{i}", "prefill", hosts.pop()) for i in range(num_prefill)]
        self.decode = [Member(self, f"decode-{i}", "decode", hosts.pop()) for i in range(num_decode)]
        self.workers = [*self.prefill, *self.decode]
        self.members = [*self.workers, self.router]

    def router_flags(self) -> list[str]:
        """Which workers the router has."""
        flags = ["--pd-disaggregation", *self._router_flags]
        for member in self.prefill:
            flags += ["--prefill", member.url, str(member.bootstrap[1])]
        for member in self.decode:
            flags += ["--decode", member.url]
        return flags

    def start(self) -> None:
        """Start everything and wait until it serves."""
        for member in self.workers:
            member.start()
        for member in self.workers:
            member.wait()
        self.router.start()
        self.router.wait()

    def restart(self, member: Member) -> None:
        """A new process in the place of one that has ended."""
        member.server.child.end(0.0)
        member.start()
        member.wait()

    def use(self) -> dict[str, Use]:
        """What all processes take."""
        return {name: use for member in self.members for name, use in member.use().items()}

    def close(self) -> list[str]:
        """End everything. Returns what outlived its server: processes of this run, by id and command line."""
        servers = [member.server for member in reversed(self.members) if member.started]
        end_all([server.child for server in servers], GRACE_S)
        left = [f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in marked_processes()]
        if self.network is not None:
            self.network.close()
        if self.proxies is not None:
            self.proxies.close()
        return left

    def _owner_of(self, port: int) -> str:
        """Which of the workers has this local port; "" for none, such as this process. Any thread, often."""
        name = _socket_at(port)
        if name is None or name in _sockets_of(os.getpid()):
            return ""
        for again in (False, True):
            for member in self.workers:
                if again or member.name not in self._pids:
                    self._pids[member.name] = [process.pid for process in member.processes()]
                if any(name in _sockets_of(pid) for pid in self._pids[member.name]):
                    return member.name
        return ""


def _socket_at(port: int) -> str | None:
    """What /proc calls the connected socket of this host with that local port; None when there is none."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                return f"socket:[{fields[9]}]"
    return None


def _sockets_of(pid: int) -> set[str]:
    """What /proc calls the open descriptors of a process; none where it has ended."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


MARK_VARIABLE = "PDSERVE_CHAOS_RUN"


def marked_processes() -> list[psutil.Process]:
    """Processes other than this one that this run has started, by a variable of their environment; no zombies."""
    mark, found = os.environ.get(MARK_VARIABLE), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not mine and mark is not None and process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
    return found


@contextlib.contextmanager
def running_farm(
    num_prefill: int,
    num_decode: int,
    server_flags: Sequence[str],
    router_flags: Sequence[str],
    *,
    token: str,
    links: str,
) -> Iterator[tuple[Farm, dict[str, list[str]]]]:
    """A farm that serves, and what it left behind, which is filled in when the block has been left. With a token the
    router proves it to the servers; `server_flags` must open them to requests that are sent to them directly.

    The processes have a folder for temporary files of their own, so that what they leave there is seen.
    """
    leftovers: dict[str, list[str]] = {"processes": [], "files": []}
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        _variables({"TMPDIR": folder, MARK_VARIABLE: secrets.token_hex(8), "PDSERVE_CONTROL_TOKEN": token}),
    ):
        farm = Farm(num_prefill, num_decode, server_flags, router_flags, links)
        try:
            if farm.client_host is not None:
                _move_to(farm.client_host)
            farm.start()
            yield farm, leftovers
        finally:
            leftovers["processes"] = farm.close()
            leftovers["files"] = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables of what is started meanwhile; an empty value: it is not set."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if not value else os.environ.update({name: value})
    try:
        yield
    finally:
        for name, old in before.items():
            os.environ.pop(name, None) if old is None else os.environ.update({name: old})


def _move_to(host: Host) -> None:
    """The calling thread, and threads and processes that it starts from now on, are on this host."""
    handle = os.open(f"/var/run/netns/{host.namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


def settle(farm: Farm, deadline_s: float) -> tuple[float, dict[str, dict[str, Any]]]:
    """Wait until nothing is held anywhere: the seconds that took, and what is still held at the deadline, by member."""
    began = time.monotonic()
    while True:
        held = {member.name: leaks for member in farm.workers if (leaks := member.leaks())}
        if not held or time.monotonic() - began > deadline_s:
            return time.monotonic() - began, held
        time.sleep(0.5)
