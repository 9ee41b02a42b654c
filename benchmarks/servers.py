"""pdserve's servers as child processes on free ports, for benchmarks that start what they measure.

Ended by pid when the `with` block is left, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from pdserve.base.process import Child, ChildError, Ready, end_all

READY_S = 120.0
GRACE_S = 15.0


class Server:
    """One started process; `wait` says where it listens."""

    def __init__(self, name: str, module: str, flags: Sequence[str], threads: int) -> None:
        self.lines: deque[str] = deque(maxlen=40)
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        self.child = Child(name, [sys.executable, "-m", module, *flags], env=env, on_line=self.lines.append)

    def wait(self) -> Ready:
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
