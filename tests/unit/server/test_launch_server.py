"""How a server process ends when it cannot or must not go on starting: soon, with one clear line, and alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pdserve.base.process import READY_PREFIX
from tests.share import rest_slow
from tests.tiny import make_tiny
from tests.waiting import wait_until

LIMIT_S = 60.0


LOSES_A_SIGNAL = """
import signal, sys, weakref
import pdserve.{module} as program

def lose_a_signal(*given):
    class Thing: pass
    thing = Thing()
    watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.{signum}))
    del thing
    return goes_on(*given)

goes_on, program.{goes_on} = program.{goes_on}, lose_a_signal
sys.exit(program.main(sys.argv[1:]))
"""
"""A program in which the exception of a signal is raised in a weak reference's call-back, and ignored."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Path]:
    """Where the server makes its private directory."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        yield Path(directory)


def start(
    sockets: Path, model: str, *flags: str, program: Sequence[str] = ("-m", "pdserve.launch_server")
) -> subprocess.Popen[str]:
    argv = [sys.executable, *program, "--model-path", model, "--cpu-threads", "1", *flags]
    env = os.environ | {"TMPDIR": str(sockets)}
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_refused(process: subprocess.Popen[str], text: str) -> None:
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, said
    assert text in said and "Traceback" not in said


def test_a_wrong_model_path_is_one_line_before_anything_starts(sockets: Path) -> None:
    process = start(sockets, "/no/such/model", "--port", "0", "--log-level", "error")
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert said.splitlines() == [line for line in said.splitlines() if "/no/such/model" in line][:1]
    assert not list(sockets.iterdir())


def test_what_the_scheduler_refuses_ends_the_server_with_2(sockets: Path, model: str) -> None:
    assert_refused(start(sockets, model, "--port", "0", "--context-length", "999999"), "context_length must be in")


def test_a_taken_port_is_refused_without_waiting_for_the_scheduler(sockets: Path, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(start(sockets, model, "--port", str(port)), f"cannot listen on 127.0.0.1:{port}")
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("signum", rest_slow([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_while_it_starts_ends_it_quietly(sockets: Path, model: str, signum: signal.Signals) -> None:
    process = start(sockets, model, "--port", "0", "--log-level", "error")
    try:
        children: list[psutil.Process] = []

        def has_children() -> bool:
            assert process.poll() is None
            children[:] = psutil.Process(process.pid).children(recursive=True)
            return bool(children)

        wait_until(has_children, "it starts the engine's process", LIMIT_S)
        process.send_signal(signum)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "")
    assert not psutil.wait_procs(children, timeout=5.0)[1]
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("signum", rest_slow([signal.SIGTERM, signal.SIGINT]))
@pytest.mark.parametrize(("module", "goes_on"), [("launch_server", "launch"), ("launch_offline", "host")])
def test_a_signal_whose_exception_is_lost_ends_it_as_quietly(
    sockets: Path, model: str, module: str, goes_on: str, signum: signal.Signals
) -> None:
    program = LOSES_A_SIGNAL.format(module=module, goes_on=goes_on, signum=signum.name)
    process = start(sockets, model, "--log-level", "error", program=("-c", program))
    try:
        said, complained = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert (process.returncode, complained) == (0, "")
    assert READY_PREFIX not in said
    assert not list(sockets.iterdir())
