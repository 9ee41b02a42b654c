"""What a niceness is compared with, read from `/proc` and cgroup files, and a service in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.base.nice_scope import NiceScope, nice_scope
from tests.waiting import wait_until

EXIT_S = 20.0
OWN = os.getpid()
CHILD = """
import os, signal, sys
from pdserve.base.nice_scope import in_own_session

def run():
    def handle(number, frame):
        print("got", signal.Signals(number).name, flush=True)
        os._exit(7)
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    print(os.getpid(), os.getsid(0), os.getppid(), flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("of the service")
    if sys.argv[1] == "exit":
        sys.exit(5)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

sys.exit(in_own_session(run))
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc"


def mount(root: Path, kind: str, options: str, top: str = "/") -> str:
    return f"41 31 0:38 {top} {root / 'sys'} rw,relatime - {kind} {kind} {options}\n"


@pytest.mark.parametrize(
    ("autogroup", "expected"), [("1\n", NiceScope.SESSION), ("0\n", NiceScope.SHARED), (None, NiceScope.SHARED)]
)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_in_the_machines_cgroup_the_session_counts_where_autogroup_is_on(
    tmp_path: Path, version: int, autogroup: str | None, expected: NiceScope
) -> None:
    files = {"proc/self/cgroup": "", "proc/self/mountinfo": ""}
    if version == 1:
        files = {"proc/self/cgroup": "1:cpu,cpuacct:/\n0::/\n", "sys/release_agent": ""}
        files["proc/self/mountinfo"] = mount(tmp_path, "cgroup", "rw,cpuacct,cpu")
    elif version == 2:
        files = {"proc/self/cgroup": "0::/user.slice/session-3.scope\n", "sys/user.slice/session-3.scope/x": ""}
        files["proc/self/mountinfo"] = mount(tmp_path, "cgroup2", "rw")
    if autogroup is not None:
        files["proc/sys/kernel/sched_autogroup_enabled"] = autogroup
    assert nice_scope(write(tmp_path, files)) is expected


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        (f"{OWN}\n", NiceScope.OWN_CGROUP),
        (f"1\n{OWN}\n", NiceScope.OWN_CGROUP),
        (f"{OWN}\n{OWN + 1}\n", NiceScope.SHARED),
    ],
    ids=["alone", "with init", "with another"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_cgroup_it_counts_who_else_is_there(tmp_path: Path, version: int, pids: str, expected: NiceScope) -> None:
    files = {"proc/sys/kernel/sched_autogroup_enabled": "1\n"}
    if version == 1:
        files |= {"proc/self/cgroup": "4:cpu:/unit\n", "sys/unit/cgroup.procs": pids}
        files["proc/self/mountinfo"] = mount(tmp_path, "cgroup", "rw,cpu")
    else:
        files |= {"proc/self/cgroup": "0::/unit/below\n", "sys/unit/cpu.weight": "100\n"}
        files |= {"sys/unit/cgroup.procs": "", "sys/unit/below/cgroup.procs": pids}
        files["proc/self/mountinfo"] = mount(tmp_path, "cgroup2", "rw")
    assert nice_scope(write(tmp_path, files)) is expected


def test_a_container_sees_its_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/sys/kernel/sched_autogroup_enabled": "1\n"}
    files["proc/self/mountinfo"] = mount(tmp_path, "cgroup2", "ro", "/docker/5")
    assert nice_scope(write(tmp_path, files)) is NiceScope.SHARED, "not mounted here"
    files["proc/self/mountinfo"] = mount(tmp_path, "cgroup2", "ro")
    files |= {"sys/cgroup.procs": f"{OWN}\n", "sys/cgroup.type": "domain\n"}
    assert nice_scope(write(tmp_path, files)) is NiceScope.SHARED, "the CPU controller is on further above"
    assert nice_scope(write(tmp_path, {"sys/cpu.weight": "100\n"})) is NiceScope.OWN_CGROUP


def test_this_machine_is_read_without_an_error() -> None:
    assert nice_scope() in NiceScope


def started(what: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that is no session leader, and pid, session and parent of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_service_leads_its_session_and_gets_the_signals(number: signal.Signals) -> None:
    process, (pid, session, parent) = started("wait")
    with process:
        assert (pid == session, parent) == (True, process.pid)
        assert os.getsid(process.pid) == os.getsid(0)
        process.send_signal(number)
        assert process.wait(EXIT_S) == 7
        assert process.stdout is not None and process.stdout.read() == f"got {number.name}\n"


@pytest.mark.parametrize(("what", "status"), [("exit", 5), ("raise", 1), ("killed", 128 + signal.SIGKILL)])
def test_its_exit_status_is_returned(what: str, status: int) -> None:
    process, _ = started(what)
    _, errors = process.communicate(timeout=EXIT_S)
    assert process.returncode == status
    assert ("of the service" in errors) == (what == "raise")


def test_it_dies_with_the_process_that_waits_for_it() -> None:
    process, (pid, *_) = started("wait")
    with process:
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the service")
