"""Folders that a killed process has left are removed by the next one, and only those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pdserve.base import run_folders
from pdserve.base.run_folders import make_run_folder, sweep

LEAVE_ONE = """
import signal
from pdserve.base.run_folders import make_run_folder
print(make_run_folder(1000), flush=True)
signal.pause()
"""


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Path(make_run_folder(1000))
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVE_ONE],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    with process.stdout:
        left = Path(process.stdout.readline().strip())
    (left / "to_api").touch()
    assert left.parent == tmp_path and left.stat().st_mode & 0o777 == 0o700
    assert sweep(tmp_path) == [], "both live"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds the pid, and counts as dead
    try:
        assert sweep(tmp_path) == [left] and not left.exists() and own.exists()
    finally:
        process.wait()


def test_other_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pid, namespace = os.getpid(), os.stat("/proc/self/ns/pid").st_ino
    kept = ["pdserve-x", "pdserve-1-2-3", f"pdserve-{pid}-{namespace + 1}-1-a", "pdserve-0123abcd", "other-1-2-3-a"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / f"pdserve-{pid}-{namespace}-1-link").symlink_to(tmp_path / "pdserve-x")
    (tmp_path / f"pdserve-{pid}-{namespace}-1-file").touch()
    (tmp_path / f"pdserve-{pid}-{namespace}-1-old").mkdir()
    assert [path.name for path in sweep(tmp_path)] == [f"pdserve-{pid}-{namespace}-1-old"]
    assert all((tmp_path / name).is_dir() for name in kept)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (tmp_path / f"pdserve-{pid}-{namespace}-1-theirs").mkdir()
    assert sweep(tmp_path) == []


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = Path(make_run_folder(87))
    try:
        assert folder.parent == Path("/tmp") and run_folders.PREFIX in folder.name and not list(deep.iterdir())
    finally:
        folder.rmdir()
