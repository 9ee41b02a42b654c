"""pdserve's servers as child processes on free ports, for benchmarks that start what they measure.

All of them are ended by pid when the `with` block is left, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence

from pdserve.base.process import Child, ChildError, ServerReady, end_all

READY_S = 120.0
GRACE_S = 15.0


class Server:
    """One started process; `wait` says where it listens."""

    def __init__(self, name: str, module: str, flags: Sequence[str], threads: int) -> None:
        self.lines: deque[str] = deque(maxlen=40)
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        self.child = Child(name, [sys.executable, "-m", module, *flags], env=env, on_line=self.lines.append)

    def wait(self) -> ServerReady:
        """Block until it serves. Raises ChildError with its last lines."""
        try:
            return self.child.wait_ready(READY_S)
        except ChildError as error:
            raise ChildError("\n".join([str(error), *self.lines])) from error


def server_flags(model: str, dtype: str, mode: str, threads: int) -> list[str]:
    """Flags of `launch_server` for a CPU server on a free port."""
    flags = ["--model-path", model, "--dtype", dtype, "--device", "cpu", "--port", "0", "--cpu-threads", str(threads)]
    if mode != "null":
        flags += ["--disaggregation-mode", mode]
    if mode == "prefill":
        flags += ["--disaggregation-bootstrap-port", "0"]
    return flags


@contextlib.contextmanager
def monolith_and_pair(model: str, dtype: str, *, threads: int) -> Iterator[dict[str, str]]:
    """URLs of a monolith with `threads` threads and of a router before 1P1D, which have half of them each."""
    half = threads // 2
    with contextlib.ExitStack() as stack:
        children: list[Child] = []
        stack.callback(lambda: end_all(children, GRACE_S))

        def start(name: str, module: str, flags: Sequence[str], num: int) -> Server:
            server = Server(name, module, flags, num)
            children.append(server.child)
            return server

        launch = "pdserve.launch_server"
        monolith = start("monolith", launch, server_flags(model, dtype, "null", threads), threads)
        prefill = start("prefill", launch, server_flags(model, dtype, "prefill", half), half)
        decode = start("decode", launch, server_flags(model, dtype, "decode", half), half)
        sender, receiver = prefill.wait(), decode.wait()
        assert sender.bootstrap_port is not None
        flags = ["--pd-disaggregation", "--port", "0", "--prefill", sender.url, str(sender.bootstrap_port)]
        router = start("router", "pdserve.launch_router", [*flags, "--decode", receiver.url], 1)
        yield {"monolith": monolith.wait().url, "1P1D": router.wait().url}


@contextlib.contextmanager
def pair(
    model: str, dtype: str, *, threads: int, prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = ()
) -> Iterator[str]:
    """URL of a router before 1P1D, whose servers have `threads` threads each; flags are more of `launch_server`."""
    children: list[Child] = []
    try:
        servers = []
        for mode, more in (("prefill", prefill_flags), ("decode", decode_flags)):
            flags = [*server_flags(model, dtype, mode, threads), *more]
            servers.append(Server(mode, "pdserve.launch_server", flags, threads))
            children.append(servers[-1].child)
        sender, receiver = (server.wait() for server in servers)
        assert sender.bootstrap_port is not None
        flags = ["--pd-disaggregation", "--port", "0", "--prefill", sender.url, str(sender.bootstrap_port)]
        router = Server("router", "pdserve.launch_router", [*flags, "--decode", receiver.url], 1)
        children.append(router.child)
        yield router.wait().url
    finally:
        end_all(children, GRACE_S)


@contextlib.contextmanager
def monolith(model: str, dtype: str, *, threads: int, flags: Sequence[str] = ()) -> Iterator[str]:
    """URL of a monolith with `threads` threads; `flags` are more flags of `launch_server`."""
    argv = [*server_flags(model, dtype, "null", threads), *flags]
    server = Server("monolith", "pdserve.launch_server", argv, threads)
    try:
        yield server.wait().url
    finally:
        end_all([server.child], GRACE_S)


@contextlib.contextmanager
def local_pair(
    model: str, dtype: str, *, threads: int, flags: Sequence[str] = (), cpu_pin: str | None = None
) -> Iterator[str]:
    """URL of the router of a `launch_local` service of 1P1D, whose servers have `threads` threads each.

    `flags` are more flags of `launch_local`; those of one role go to its server only. `cpu_pin` is its flag. It runs as
    a process of its own, as for users: its processes may have a session of their own.
    """
    argv = ["--model-path", model, "--router-port", "0", "--cpu-threads", str(threads), "--ready-timeout", str(READY_S)]
    argv += ["--dtype", dtype, "--device", "cpu", *flags, *([] if cpu_pin is None else ["--cpu-pin", cpu_pin])]
    lines: deque[str] = deque(maxlen=40)
    with tempfile.TemporaryDirectory(prefix="pdserve-logs-") as log_dir:
        command = [sys.executable, "-m", "pdserve.launch_local", *argv, "--log-dir", log_dir]
        child = Child("launch_local", command, on_line=lines.append, read_ready=read_local_ready)
        try:
            yield child.wait_ready(READY_S + GRACE_S).url
        except ChildError as error:
            raise ChildError("\n".join([str(error), *lines])) from error
        finally:
            child.end(GRACE_S)


def read_local_ready(line: str) -> ServerReady | None:
    """Parse the router's URL in the last start-up line of `launch_local`; None for another line."""
    found = re.match(r"ready: OPENAI_BASE_URL=(\S+)/v1 ", line)
    return None if found is None else ServerReady(role="local", url=found[1])
