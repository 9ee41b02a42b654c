"""Starts servers for tests by a fork of a process that has imported everything: a start takes a fraction of the time
that a new interpreter needs for its imports.

    test process ── socket ──> fork server: imports, then forks a server for each message
         │                          └─ fork, fork ──> server: main(argv) in a process as after exec
         └── parent of each server                        └─ fork ──> spares, which become its ranks

A server's streams, environment, process group, command line and parent are as after an exec, and its ranks are its
children. A spare waits for the command line that `multiprocessing` gives to a new interpreter. It starts with neither
the server's threads nor its files, as an interpreter would. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from pdserve.base.process import Child
from pdserve.config.cli import parse_server_args
from pdserve.errors import PdserveError

IMPORTED = (
    "pdserve.launch_server",
    "pdserve.launch_router",
    "pdserve.launch_offline",
    "pdserve.engine.build",
    "pdserve.engine.build_follower",
    "pdserve.server.lifecycle.run",
    "pdserve.transfer.bootstrap",
    "transformers.tokenization_utils_tokenizers",
    "h11",
)
"""Programs that it can run, and the modules that they import while they start."""
MAX_MESSAGE = 1 << 17
MAX_FILES = 8
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROOM = 4000
"""Bytes of the fork server's own command line, over which a server writes its own."""


# ---------------------------------------------------------------------- in the test process


class ForkedProcess:
    """A server's process, with what `Child` uses of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap the process; return its exit status, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """The fork server of this test process, which starts with the first server. One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], num_engines: int = 1) -> ForkedProcess:
        """Run `argv` in a new process: `python -m`, a program, and its flags. The first `num_engines` engines of the
        program have forked ranks.
        """
        control = self._control or self._open(env)
        (out, our_out), (err, our_err) = ((write, read) for read, write in (os.pipe(), os.pipe()))
        message = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd()}
        message |= {"parent": os.getpid(), "num_engines": num_engines}
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # the server's first parent ends, and this process becomes its parent
        try:
            socket.send_fds(control, [json.dumps(message).encode()], [out, err])
            answer = control.recv(64)
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
            os.close(out)
            os.close(err)
        assert answer, "the fork server has ended; its output says why"
        streams = [os.fdopen(one, errors="replace") for one in (our_out, our_err)]
        return ForkedProcess(int(answer), *streams)

    def close(self) -> None:
        """End the fork server. Servers that it has started go on."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(30)
            self._process = self._control = None

    def _open(self, env: Mapping[str, str]) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-m", "tests.e2e.fork_server", "-" * ROOM]
            self._process = subprocess.Popen(
                argv, stdin=theirs, stdout=subprocess.DEVNULL, env=dict(env), process_group=0
            )
        return self._control


class ForkedChild(Child):
    """A child that `fork_server` starts. `num_engines`: see `ForkServer.start`."""

    def __init__(self, fork_server: ForkServer, *args: Any, num_engines: int = 1, **keywords: Any) -> None:
        self._fork_server, self._num_engines = fork_server, num_engines
        super().__init__(*args, **keywords)

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str] | None) -> Any:
        return self._fork_server.start(argv, os.environ if env is None else env, self._num_engines)


# ---------------------------------------------------------------------- in the fork server


def serve_forks() -> None:
    """Fork a server for each message from the socket at standard input, until that is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=os.dup(0))
    while True:
        data, files, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_FILES)
        if not data:
            return
        born, tell = os.pipe()
        adopted, not_yet = os.pipe()
        first = os.fork()
        if first == 0:
            second = os.fork()
            if second:
                os.write(tell, str(second).encode())
                os._exit(0)
            for file in (born, tell, not_yet):
                os.close(file)
            control.close()
            os.read(adopted, 1)  # ends when the first process has been reaped: by then the test process is the parent
            os.close(adopted)
            run(lambda data=data, files=files: serve(json.loads(data), *files))
        os.waitpid(first, 0)
        for file in (tell, adopted, not_yet, *files):
            os.close(file)
        control.send(os.read(born, 64))
        os.close(born)


def run(program: Callable[[], int]) -> NoReturn:
    """Run `program` and end this process as an interpreter does, but without taking apart the imported modules: that
    would copy them first.
    """
    try:
        status = program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def serve(message: dict[str, Any], out: int, err: int) -> int:
    """Become the server: this process is then as after an exec of the command line. Returns the exit status."""
    os.setpgid(0, 0)
    assert os.getppid() == message["parent"], "the test process has ended"
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((null, 0), (out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(message["cwd"])
    argv = message["argv"]
    become(argv, message["env"])
    name, *flags = argv[argv.index("-m") + 1 :]
    program = importlib.import_module(name)
    sys.argv, sys.modules["__main__"] = [str(program.__file__), *flags], program
    if name != "pdserve.launch_router":
        Spares(num_ranks(flags) * message["num_engines"]).install()
    return program.main(flags)


def become(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Set this process's environment, and the command line that `ps` and `psutil` show."""
    os.environ.clear()
    os.environ.update(env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # where the kernel has the command line
    line = b"".join(os.fsencode(word) + b"\0" for word in argv)
    ctypes.memmove(start, line[: end - start - 1].ljust(end - start, b"\0"), end - start)


def num_ranks(flags: Sequence[str]) -> int:
    """How many processes the engine of a server with these flags has on this host; 0 for flags that it refuses."""
    try:
        parallel = parse_server_args(flags).parallel
    except PdserveError:
        return 0
    return parallel.dp_size * parallel.shape.num_ranks // parallel.nnodes


class Spares:
    """Children of the server, each to take the place of one new interpreter. Later ones are new interpreters."""

    def __init__(self, count: int) -> None:
        self._free: list[tuple[int, socket.socket]] = []
        self._spawn = multiprocessing.util.spawnv_passfds
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self._free:
                    other.close()
                run(lambda: wait_for_command(theirs))  # noqa: B023
            theirs.close()
            self._free.append((pid, ours))

    def install(self) -> None:
        """Have `multiprocessing` use them."""
        multiprocessing.util.spawnv_passfds = self._take

    def _take(self, path: bytes, argv: list[str], files: Sequence[int]) -> int:
        if not self._free or "--multiprocessing-fork" not in argv:
            return self._spawn(path, argv, files)
        pid, control = self._free.pop(0)  # rank 0 has the lowest pid, as from `multiprocessing`
        with control:
            message = {"argv": [os.fsdecode(word) for word in argv], "env": dict(os.environ), "files": list(files)}
            socket.send_fds(control, [json.dumps(message).encode()], list(files))
        return pid


def wait_for_command(control: socket.socket) -> int:
    """Be a spare: run `python ... -c program ...` when it comes, with its files under their numbers; end when the
    server ends. Returns the exit status.
    """
    with control:
        data, files, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_FILES)
        if not data:
            return 0
    message = json.loads(data)
    place(files, message["files"])
    argv = message["argv"]
    become(argv, message["env"])
    code = argv.index("-c")
    sys.argv = ["-c", *argv[code + 2 :]]
    exec(argv[code + 1], {"__name__": "__main__"})
    return 0


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files other numbers."""
    above = max([*files, *numbers]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    serve_forks()
