"""The store of suspended requests: servers that share its directory, and files of servers that ended."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from pdserve.errors import RequestError
from pdserve.server.snapshot_store import LEFTOVER_S, SnapshotStore


def test_one_of_the_servers_that_share_a_directory_resumes_a_request(tmp_path: pathlib.Path) -> None:
    one, other = SnapshotStore(1 << 20, str(tmp_path)), SnapshotStore(1 << 20, str(tmp_path))
    one.put("chat", b"data")
    with one.resuming("chat"):
        with pytest.raises(RequestError) as refused, other.resuming("chat"):
            pass
        assert refused.value.status == 409 and refused.value.field == "rid"
        assert one.get("chat") == b"data"
    with other.resuming("chat"):  # the first one gave up without an answer
        assert other.get("chat") == b"data"
        assert other.drop("chat")
    with pytest.raises(RequestError) as gone, one.resuming("chat"):
        one.get("chat")
    assert gone.value.status == 404
    assert len(one) == 0


def test_a_server_that_opened_the_file_before_another_one_resumed_it_finds_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = SnapshotStore(1 << 20, str(tmp_path)), SnapshotStore(1 << 20, str(tmp_path))
    one.put("chat", b"data")
    real_open = os.open

    def open_and_lose(path: str | pathlib.Path, flags: int, mode: int = 0o777) -> int:
        file = real_open(path, flags, mode)
        monkeypatch.setattr(os, "open", real_open)
        with one.resuming("chat"):
            assert one.drop("chat")
        return file

    monkeypatch.setattr(os, "open", open_and_lose)
    with pytest.raises(RequestError) as gone, other.resuming("chat"):
        other.get("chat")
    assert gone.value.status == 404


def test_unfinished_files_of_servers_that_ended_are_removed(tmp_path: pathlib.Path) -> None:
    old, new, kept = tmp_path / "a.1.partial", tmp_path / "b.2.partial", tmp_path / "c.pdsnap"
    for path in (old, new, kept):
        path.write_bytes(b"x")
    long_ago = time.time() - 2 * LEFTOVER_S
    for path in (old, kept):
        os.utime(path, (long_ago, long_ago))
    assert len(SnapshotStore(1 << 20, str(tmp_path))) == 1
    assert not old.exists() and new.exists() and kept.exists()


def test_a_file_that_cannot_be_read_says_so(tmp_path: pathlib.Path) -> None:
    store = SnapshotStore(1 << 20, str(tmp_path))
    store.put("chat", b"data")
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.raises(RequestError, match="cannot be read") as refused, store.resuming("chat"):
        store.get("chat")
    assert (refused.value.status, refused.value.field) == (500, "rid")
