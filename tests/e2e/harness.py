"""Real servers in real processes for end-to-end tests: started on free ports, ended by pid, their last lines shown
on failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import requests

from pdserve.base.process import Child, ServerReady, end_all
from tests.e2e.fork_server import ForkedChild, ForkServer
from tests.waiting import wait_until

RUNNING: weakref.WeakSet[Server] = weakref.WeakSet()
"""Whose last lines a failure shows: every server that no test has let go of."""
fork_server: ForkServer | None = None
"""Starts servers, if it is set; otherwise each server is a new interpreter."""
READY_S = 120.0
GRACE_S = 15.0
PYTHON = sys.executable


class Server:
    """One started process and what it announced."""

    def __init__(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        *,
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        num_engines: int = 1,
    ) -> None:
        """`before` goes before the command line: a program that runs it somewhere else. `variables` are added to our
        environment. `num_engines`: how many it will start, one after the other.
        """
        self.lines: deque[str] = deque(maxlen=200)
        env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        env |= variables or {}
        argv = [*before, PYTHON, "-m", module, *flags]
        if fork_server is None or before:
            self.child = Child(name, argv, env=env, on_line=self.lines.append)
        else:
            self.child = ForkedChild(
                fork_server, name, argv, env=env, on_line=self.lines.append, num_engines=num_engines
            )
        RUNNING.add(self)
        self.ready: ServerReady | None = None
        self.headers: dict[str, str] = {}
        """With questions about its state: a key, where it wants one."""

    def wait(self) -> Server:
        """Block until it serves."""
        try:
            self.ready = self.child.wait_ready(READY_S)
        except Exception as error:
            raise AssertionError("\n".join([str(error), *self.lines])) from error
        return self

    @property
    def url(self) -> str:
        """Base URL."""
        assert self.ready is not None
        return self.ready.url

    @property
    def workers(self) -> tuple[Server, ...]:
        """The servers that have memory: for a monolith, itself."""
        return (self,)

    @property
    def bootstrap_port(self) -> int:
        """A prefill server's bootstrap port."""
        assert self.ready is not None and self.ready.bootstrap_port is not None
        return self.ready.bootstrap_port

    def state(self) -> dict[str, Any]:
        """`/get_server_info`."""
        answer = requests.get(f"{self.url}/get_server_info", headers=self.headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def counter(self, name: str) -> float:
        """One of the scheduler's totals; 0 before its first event."""
        return float(self.state()["counters"].get(name, 0))

    def metrics(self) -> dict[str, float]:
        """`/metrics` by name, without labels."""
        answer = requests.get(f"{self.url}/metrics", timeout=30)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def leaks(self) -> dict[str, Any]:
        """What is not free, not quiet or does not add up; empty at idle. Pages and slots that only the prefix cache has
        are free, as it gives them up on demand.
        """
        state = self.state()
        memory = state["memory"]
        evictable = memory["pages_evictable"]
        names = [name.removesuffix("_total") for name in memory if name.endswith("_total")]
        lost = {name: memory[f"{name}_total"] - memory[f"{name}_free"] for name in names}
        lost["pages"] -= evictable
        for name in ("slots", "window_pages", "host_slots", "host_window_pages", "host_pages"):
            lost[name] = lost.get(name, 0) - memory.get(f"{name}_cached", 0)
        lost["pages_locked"] = memory["pages_cached"] - evictable
        cached = ("pages_cached", "pages_evictable", "slots_cached", "window_pages_cached")
        of_tier = ("host_", "hicache_host_")
        others = {name: count for name, count in memory.items() if not name.startswith(of_tier)}
        lost |= {n: count for n, count in others.items() if n not in cached and not n.endswith(("_total", "_free"))}
        wrong = {"audit": state["audit"], "audit_differences": state["counters"].get("audit_differences", 0)}
        return {name: what for name, what in (lost | wrong).items() if what}

    def kill(self) -> None:
        """SIGKILL, to this process alone; its scheduler must follow by itself."""
        os.kill(self.child.pid, 9)
        assert self.child.wait_exit(10.0)


def start_server(model: str, mode: str, *flags: str, name: str | None = None, num_engines: int = 1) -> Server:
    """A server on a free port, one thread, CPU, pages so small that short prompts have several; not waited for.
    `num_engines`: see `Server`.
    """
    base = ["--model-path", model, "--port", "0", "--cpu-threads", "1", "--device", "cpu"]
    if "--page-size" not in flags:
        base += ["--page-size", "16"]
    if mode != "null":
        base += ["--disaggregation-mode", mode]
    if mode == "prefill" and "--disaggregation-bootstrap-port" not in flags:
        base += ["--disaggregation-bootstrap-port", "0"]
    return Server(name or mode, "pdserve.launch_server", [*base, *flags], num_engines=num_engines)


def start_router(prefill: Sequence[Server], decode: Sequence[Server], *flags: str, probes: bool = False) -> Server:
    """A router before running servers; not waited for. `probes`: it sends tokens of its own, which tests may count."""
    argv = ["--pd-disaggregation", "--port", "0", "--health-check-interval", "1"]
    if not probes:
        argv.append("--disable-pair-probes")
    for server in prefill:
        argv += ["--prefill", server.url, str(server.bootstrap_port)]
    for server in decode:
        argv += ["--decode", server.url]
    return Server("router", "pdserve.launch_router", [*argv, *flags])


class Pair:
    """One prefill server, one decode server, and a router before them."""

    def __init__(self, prefill: Server, decode: Server, router: Server) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router

    @property
    def url(self) -> str:
        """Where clients go."""
        return self.router.url

    @property
    def workers(self) -> tuple[Server, ...]:
        """The servers that have memory."""
        return (self.prefill, self.decode)

    def generate(self, **body: Any) -> dict[str, Any]:
        """`/generate` through the router; must be 200."""
        answer = requests.post(f"{self.router.url}/generate", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()) if isinstance(answer.json(), dict) else {"batch": answer.json()}


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait for servers, and end them at the end whatever happens; a failed test shows what they said last."""
    try:
        for server in servers:
            server.wait()
        yield
    finally:
        end_all([server.child for server in servers], GRACE_S)


@contextlib.contextmanager
def running_pair(
    model: str, *flags: str, prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = ()
) -> Iterator[Pair]:
    """A 1P+1D pair over Mooncake with a router."""
    prefill = start_server(model, "prefill", *flags, *prefill_flags)
    decode = start_server(model, "decode", *flags, *decode_flags)
    with running(prefill, decode):
        router = start_router([prefill], [decode])
        with running(router):
            yield Pair(prefill, decode, router)


@contextlib.contextmanager
def running_monolith(model: str, *flags: str) -> Iterator[Server]:
    """One aggregated server."""
    server = start_server(model, "null", *flags, name="monolith")
    with running(server):
        yield server


@dataclasses.dataclass(frozen=True)
class Nodes:
    """One server of two nodes, which meet at `port` of loopback. The first has the HTTP server."""

    first: Server
    second: Server
    port: int

    @property
    def ranks(self) -> list[psutil.Process]:
        """Of both, in order."""
        return [*ranks_of(self.first), *ranks_of(self.second)]


def ranks_of(server: Server) -> list[psutil.Process]:
    """The engine's processes, in the order of their start: the leader first."""
    children = psutil.Process(server.child.pid).children(recursive=True)
    return sorted((one for one in children if "spawn_main" in " ".join(one.cmdline())), key=lambda one: one.pid)


@contextlib.contextmanager
def running_nodes(model: str, token: str, *flags: str, between: Callable[[int], None] | None = None) -> Iterator[Nodes]:
    """A server of two nodes with this control token, which takes requests without a proof of it. `between` is called
    with the port where they meet, after the start of the first and before that of the second. When the first is told to
    end, the second must follow.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    argv = ["--model-path", model, "--port", "0", "--device", "cpu", *flags]
    argv += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}", "--no-require-control-proof"]

    def start(rank: int) -> Server:
        flags, secret = [*argv, "--node-rank", str(rank)], {"PDSERVE_CONTROL_TOKEN": token}
        return Server(f"node-{rank}", "pdserve.launch_server", flags, variables=secret)

    first = start(0)
    try:
        if between is not None:
            between(port)
        second = start(1)
    except BaseException:
        end_all([first.child], GRACE_S)
        raise
    with running(first):
        try:
            yield Nodes(first, second, port)
            first.child.ask_to_end()
            assert second.child.wait_exit(30.0), "the other node follows"
        finally:
            status = second.child.end(10.0)
        assert status == 0, list(second.lines)


def assert_refused(model: str, flags: Sequence[str], field: str) -> None:
    """A server that is started so ends at once, with status 2 and the flag of `field` in what it says."""
    argv = ["--model-path", model, "--port", "0", "--device", "cpu", *flags]
    server = Server("refused", "pdserve.launch_server", argv)
    try:
        assert server.child.wait_exit(60.0), "it hangs"
    finally:
        status = server.child.end(5.0)
    assert status == 2
    said = "\n".join(server.lines)
    assert field.replace("_", "-") in said, said


def generate_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All bodies to `/generate` at once, each on a connection of its own; every one must be answered with 200."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = requests.post(f"{url}/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    with ThreadPoolExecutor(max_workers=len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def generate_batch(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All bodies in one call of `/generate`, so that they arrive together however busy the machine is. They may differ
    in `input_ids` and `sampling_params`.
    """
    lists = {name: [body[name] for body in bodies] for name in ("input_ids", "sampling_params")}
    answer = requests.post(f"{url}/generate", json={**bodies[0], **lists}, timeout=240)
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def generate_while_some_leave(
    url: str, staying: Sequence[dict[str, Any]], leaving: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The answers to `staying`, while the clients of `leaving` hang up one after the other, each after more tokens."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max_workers=1) as pool:
        streams = [
            stack.enter_context(
                requests.post(f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=240)
            )
            for body in leaving
        ]
        answers = pool.submit(generate_all, url, staying)
        for number, stream in enumerate(streams):
            lines = stream.iter_lines()
            for _ in range(2 + 8 * number):
                next(lines)
            stream.close()
        return answers.result()


def until(condition: Any, deadline_s: float, what: str) -> None:
    """Poll until `condition()` is true, which usually asks a server."""
    wait_until(condition, what, deadline_s, pause_s=0.05)


def assert_idle(*servers: Server, deadline_s: float = 20.0) -> None:
    """Everything comes free: pages, rows, aux slots, rooms, transfers; and the self-audit finds nothing."""
    for server in servers:
        until(lambda server=server: not server.leaks(), deadline_s, f"{server.child.name} idle; has {server.leaks()}")
