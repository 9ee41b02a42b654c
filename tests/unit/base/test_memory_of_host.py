"""What processes take, and what a host or a container has left."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from pdserve.base import host_memory
from pdserve.base.host_memory import give_back_freed
from pdserve.base.process_use import OWN, own_processes, use_of

GIB = 1 << 30


def test_memory_of_this_process_is_what_psutil_says_and_has_kinds() -> None:
    use = use_of(os.getpid())
    assert use is not None
    assert use.rss_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert use.peak_bytes >= use.anonymous_bytes > 0 and use.file_bytes > 0
    assert use.anonymous_bytes + use.file_bytes <= use.rss_bytes
    before = use.anonymous_bytes
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no memory that was freed before
    block.write(bytes(64 << 20))
    after = use_of(os.getpid())
    assert after is not None and after.anonymous_bytes - before > (60 << 20)
    assert len(block) and after.cpu_s >= use.cpu_s
    give_back_freed()


def test_a_process_that_is_not_there_has_none() -> None:
    assert use_of(2**22 + 1) is None


def _stay(end: Connection) -> None:
    end.recv()


def test_started_processes_are_there_by_name_until_they_end() -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_stay, args=(theirs,), name="a rank")
    child.start()
    try:
        uses = own_processes()
        assert uses["a rank"].pid == child.pid and uses["a rank"].rss_bytes > 0
        assert uses[OWN].pid == os.getpid()
    finally:
        ours.send(None)
        child.join()
    assert "a rank" not in own_processes()


def write_group(group: Path, files: dict[str, str]) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limit_bounds_what_is_available(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    root = tmp_path / "groups"
    if version == 2:
        own.write_text("0::/pod/box\n")
        limit, used, cache, top = "memory.max", "memory.current", "inactive_file", root
        write_group(root / "pod/box", {limit: "max\n", used: "5\n", "memory.stat": ""})
    else:
        own.write_text("4:memory:/pod/box\n3:cpuset:/\n")
        limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        top = root / "memory"
    write_group(top / "pod", {limit: str(GIB), used: str(GIB // 2), "memory.stat": f"anon 7\n{cache} {GIB // 4}\n"})
    monkeypatch.setattr(host_memory, "OWN_CGROUP", own)
    monkeypatch.setattr(host_memory, "CGROUPS", root)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 8 * GIB, "total": 16 * GIB}))
    assert host_memory.total_bytes() == GIB
    assert host_memory.available_bytes() == GIB - GIB // 2 + GIB // 4
    write_group(top / "pod", {used: str(3 * GIB)})
    assert host_memory.available_bytes() == 0


def test_without_a_limit_it_is_what_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 8 * GIB, "total": 16 * GIB}))
    assert (host_memory.available_bytes(), host_memory.total_bytes()) == (8 * GIB, 16 * GIB)
