"""Children of a parent process: readiness, death watch, ordered end, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.base.process import Child, ChildError, ServerReady, end_all, parse_ready
from tests.waiting import wait_until

READY_S = 20.0
SERVES = """
import signal, sys
print("oops", file=sys.stderr, flush=True)
print("hello", flush=True)
print('PDSERVE_READY {"role": "prefill", "url": "http://127.0.0.1:5", "bootstrap_port": 6}', flush=True)
signal.pause()
"""
COUNTS_SIGNALS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print('PDSERVE_READY {"role": "prefill", "url": "http://127.0.0.1:5", "bootstrap_port": 6}', flush=True)
signal.sigwait([signal.SIGTERM])
again = signal.sigtimedwait([signal.SIGTERM], 0.5)
sys.exit(41 + (again is not None))
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def gone(pid: int) -> bool:
    """Whether no process of this id runs any more; a zombie that waits for a busy init counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pid: int) -> None:
    wait_until(lambda: gone(pid), f"the end of process {pid}", READY_S)


def test_readiness_is_the_announced_line_and_other_lines_are_passed_on() -> None:
    lines: list[str] = []
    child = Child("p", python(SERVES), on_line=lines.append)
    try:
        assert child.wait_ready(READY_S) == ServerReady(role="prefill", url="http://127.0.0.1:5", bootstrap_port=6)
        assert not child.exited and child.returncode is None
    finally:
        assert child.end(READY_S) == -15
    assert sorted(lines) == ["hello", "oops"]
    assert gone(child.pid) and child.exited


@pytest.mark.parametrize(
    "line",
    ["", "PDSERVE_READY", "PDSERVE_READY {", "PDSERVE_READY []", 'PDSERVE_READY {"role": "x"}', "x PDSERVE_READY {}"],
)
def test_other_lines_are_not_an_announcement(line: str) -> None:
    assert parse_ready(line) is None


def test_a_child_that_dies_before_it_is_ready_is_reported_at_once() -> None:
    lines: list[str] = []
    child = Child("p", python("import sys; sys.exit('no model')"), on_line=lines.append)
    with pytest.raises(ChildError, match="ended before it was ready"):
        child.wait_ready(READY_S)
    assert child.end(READY_S) == 1
    assert lines == ["no model"]


def test_a_program_that_cannot_be_run_is_reported() -> None:
    lines: list[str] = []
    child = Child("p", ["/no/such/program"], on_line=lines.append)
    with pytest.raises(ChildError):
        child.wait_ready(READY_S)
    child.end(READY_S)
    assert lines and "/no/such/program" in lines[0]


def test_a_child_that_never_gets_ready_times_out() -> None:
    child = Child("p", python("import signal; signal.pause()"))
    try:
        with pytest.raises(ChildError, match="not ready within"):
            child.wait_ready(0.2)
    finally:
        child.end(READY_S)
    assert gone(child.pid)


def test_a_stubborn_child_is_killed_after_its_grace() -> None:
    child = Child("p", python(STUBBORN))
    child.wait_ready(READY_S)
    assert child.end(0.1) == -9
    assert child.end(0.1) == -9
    assert gone(child.pid)


def test_grandchildren_in_the_group_go_too() -> None:
    script = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n" + SERVES
    lines: list[str] = []
    child = Child("p", python(script), on_line=lines.append)
    child.wait_ready(READY_S)
    child.end(READY_S)
    wait_gone(int(next(line for line in lines if line.isdigit())))


def test_the_death_of_a_child_is_noticed() -> None:
    died = threading.Event()
    child = Child("p", python(SERVES), on_exit=lambda child: died.set())
    child.wait_ready(READY_S)
    os.kill(child.pid, 9)
    assert died.wait(READY_S) and child.exited
    assert child.end(READY_S) == -9


def test_children_die_with_their_parent() -> None:
    parent_script = f"""
import signal
from pdserve.base.process import Child
child = Child("p", [{sys.executable!r}, "-c", {STUBBORN!r}])
child.wait_ready({READY_S})
print(child.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen(python(parent_script), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert not gone(child_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(child_pid)


def test_many_children_share_one_grace_period() -> None:
    children = [Child(f"c{index}", python(SERVES if index else STUBBORN)) for index in range(3)]
    for child in children:
        child.wait_ready(READY_S)
    end_all(children, 0.5)
    assert [child.returncode for child in children] == [-9, -15, -15]
    assert all(gone(child.pid) for child in children)


def test_a_child_is_asked_to_end_once() -> None:
    children = [Child(f"c{i}", python(COUNTS_SIGNALS)) for i in range(2)]
    for child in children:
        child.wait_ready(READY_S)
    end_all(children, READY_S)
    assert [child.returncode for child in children] == [41, 41], "a second signal cuts what a server still answers"


def test_the_child_gets_its_own_group_and_the_given_environment() -> None:
    lines: list[str] = []
    script = "import os; print(os.getpid() == os.getpgid(0), os.environ.get('SECRET'), 'HOME' in os.environ)"
    child = Child("p", python(script), env={"SECRET": "s"}, on_line=lines.append)
    assert child.wait_exit(READY_S)
    assert child.end(READY_S) == 0
    assert lines == ["True s False"]
