"""Lists of cores, the order in which cores are taken, and processes that stay on theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.base import cpu_affinity as cores
from pdserve.base.cpu_affinity import check_cores, cores_of, share_cores, spread_out
from pdserve.errors import ConfigError


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host of two sockets with two physical cores each, whose hardware threads are n and n + 4."""
    for core in range(8):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{core % 2}\n")
        (topology / "core_id").write_text(f"{core % 4 // 2}\n")
    monkeypatch.setattr(cores, "CPUS", tmp_path)
    monkeypatch.setattr(cores, "granted_cores", lambda: frozenset(range(8)))


def test_whole_cores_of_one_socket_come_first(eight: None) -> None:
    assert cores_of("auto") == [0, 2, 1, 3, 4, 6, 5, 7]
    assert spread_out([6, 2, 3]) == [2, 3, 6]


def test_a_list_is_taken_as_it_stands(eight: None) -> None:
    assert cores_of("3,0-1, 5") == [3, 0, 1, 5]


def test_servers_get_equal_shares(eight: None) -> None:
    assert share_cores("auto", 3) == ["0,2", "1,3", "4,6"]
    assert share_cores("4-7", 2) == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="3 servers need a core each, there are 2") as caught:
        share_cores("0,1", 3)
    assert caught.value.field == "cpu_pin"


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "0-", "1.5", "99999", "0-99999", "٣", "0 1"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'"auto" or a list of cores such as 0-3,8') as caught:
        check_cores(text)
    assert caught.value.field == "cpu_pin"


def test_cores_that_are_there_twice_or_not_ours_are_refused(eight: None) -> None:
    with pytest.raises(ConfigError, match="has a core twice"):
        check_cores("0-3,2")
    with pytest.raises(ConfigError, match="may not use core 8, only 0,1,2,3,4,5,6,7"):
        cores_of("6-9")


def test_a_process_stays_where_it_is_put_with_all_its_threads() -> None:
    """In a process of its own, for pinning cannot be taken back from threads that nobody knows."""
    core = min(os.sched_getaffinity(0))
    program = f"""
import os, threading
from pdserve.base.cpu_affinity import granted_cores, pin_process
before = os.sched_getaffinity(0)
stop = threading.Event()
old = threading.Thread(target=stop.wait)
old.start()
pin_process([{core}])
new = threading.Thread(target=stop.wait)
new.start()
for task in (os.getpid(), old.native_id, new.native_id):
    assert os.sched_getaffinity(task) == {{{core}}}, task
assert granted_cores() == before
stop.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
