"""Child processes: spawn by argv, readiness by a printed line, exit watch, ordered shutdown. Signals by pid only.

`launch_local` and the demo spawn servers through `Child`; every server announces itself with `announce_ready`.
A child runs in a process group of its own, so a Ctrl-C reaches only the parent, which then ends its children in order.
The kernel kills a child when its parent dies (Linux). A child is not reaped before `end`, so that no other process can
take its pid or its group's id while they are still signalled:

    spawn -> (ready) -> exited, a zombie -> end: the rest of the group is killed, then the zombie is reaped
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, NoReturn

from pdserve.errors import PdserveError

READY_PREFIX = "PDSERVE_READY "

_EXEC_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"cannot run {argv[0]}: {error}")
"""
"""Runs in the child before its program. It runs after fork and exec, because a fork hook is not safe with threads."""


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere no effect).

    For processes not started by `Child`, such as those of multiprocessing. Call it first in the new process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)


def freeze_heap() -> None:
    """Exclude all objects built so far from garbage collection: they live as long as the process.

    Modules and weights are some hundred thousand objects. Without the freeze some steps take 15 ms longer.
    """
    gc.collect()
    gc.freeze()


class ChildError(PdserveError):
    """A child process did not become ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerReady:
    """A server's announcement that it can serve. `bootstrap_port` None: not a prefill server."""

    role: str
    url: str
    bootstrap_port: int | None = None


def announce_ready(ready: ServerReady) -> None:
    """Print the line that `Child.wait_ready` waits for on stdout, and flush."""
    print(READY_PREFIX + json.dumps(dataclasses.asdict(ready)), flush=True)


def parse_ready(line: str) -> ServerReady | None:
    """Parse the announcement in a line of a child's stdout; None for any other line."""
    if not line.startswith(READY_PREFIX):
        return None
    try:
        fields = json.loads(line.removeprefix(READY_PREFIX))
        return ServerReady(role=fields["role"], url=fields["url"], bootstrap_port=fields.get("bootstrap_port"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Child:
    """One child process. Spawn it from the main thread: the kernel kills it when the spawning thread ends.

    Reader threads call `on_line(line)` for every line of stdout and stderr except the announcement. A watcher thread
    calls `on_exit(child)` once, when the process has ended for any reason.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = lambda line: None,
        on_exit: Callable[[Child], None] = lambda child: None,
        read_ready: Callable[[str], ServerReady | None] = parse_ready,
    ) -> None:
        self.name = name
        self._on_line, self._on_exit, self._read_ready = on_line, on_exit, read_ready
        self._ready: ServerReady | None = None
        self._exited = False
        self._asked = False
        self._changed = threading.Condition()
        self._process = self._spawn(argv, env)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), name=f"{name}-reader", daemon=True)
            for stream in (self._process.stdout, self._process.stderr)
        ]
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watcher", daemon=True)
        for thread in (*self._readers, self._watcher):
            thread.start()

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
        wrapper = [sys.executable, "-I", "-S", "-c", _EXEC_BOUND_TO_PARENT, str(os.getpid())]
        return subprocess.Popen(
            [*wrapper, *argv],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # but in the parent's session: Linux compares niceness only within a session
            text=True,
            errors="replace",
        )

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its group."""
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether the process has ended."""
        with self._changed:
            return self._exited

    @property
    def returncode(self) -> int | None:
        """Exit status (negative: the signal that killed it); None before `end` has reaped it."""
        return self._process.returncode

    def wait_ready(self, timeout_s: float) -> ServerReady:
        """Block until the child has announced itself; `ChildError` if it ends first or the timeout passes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._exited, timeout_s)
            if self._exited:
                raise ChildError(f"{self.name} (pid {self.pid}) ended before it was ready; its output says why")
            if self._ready is None:
                raise ChildError(f"{self.name} (pid {self.pid}) was not ready within {timeout_s:g} s")
            return self._ready

    def wait_exit(self, timeout_s: float) -> bool:
        """Block until the process has ended; False if the timeout passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._exited, timeout_s)

    def ask_to_end(self) -> None:
        """Send SIGTERM, once: a second SIGTERM makes a server abort its running requests."""
        if self._process.returncode is None and not self._asked:
            self._asked = True
            os.kill(self.pid, signal.SIGTERM)

    def end(self, grace_s: float) -> int:
        """Send SIGTERM unless already sent, then after `grace_s` seconds SIGKILL to the whole group.

        Returns the exit status. Later calls have no effect.
        """
        if self._process.returncode is None:
            self.ask_to_end()
            self.wait_exit(grace_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._watcher.join()
            self._process.wait()
        for thread in self._readers:
            thread.join(timeout=1.0)
        return self._process.returncode

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                ready = self._read_ready(line.rstrip("\n"))
                if ready is None:
                    self._on_line(line.rstrip("\n"))
                    continue
                with self._changed:
                    self._ready = ready
                    self._changed.notify_all()

    def _watch(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            self._exited = True
            self._changed.notify_all()
        self._on_exit(self)


def end_all(children: Sequence[Child], grace_s: float) -> None:
    """End children together: each gets SIGTERM at once, and all share one grace period in seconds."""
    deadline = time.monotonic() + grace_s
    for child in children:
        child.ask_to_end()
    for child in children:
        child.end(max(0.0, deadline - time.monotonic()))


ENDING = (signal.SIGINT, signal.SIGTERM)


class ExitSignals(SystemExit):
    """Raised by the signal handler. After a KeyboardInterrupt through `exec`, even a caught one, CPython exits with the
    signal's status.
    """


_told = False


def exit_on_signals() -> None:
    """Make the signals `ENDING` raise `ExitSignals(0)` in the main thread. Call it in the main thread."""
    for number in ENDING:
        signal.signal(number, _leave)
    sys.unraisablehook = _say_what_is_lost


def raise_if_signalled() -> None:
    """Raise `ExitSignals` if a signal arrived but its exception was lost."""
    if _told:
        raise ExitSignals(0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    global _told
    _told = True
    raise ExitSignals(0)


def _say_what_is_lost(lost: sys.UnraisableHookArgs) -> None:
    if lost.exc_type is not ExitSignals:
        sys.__unraisablehook__(lost)
