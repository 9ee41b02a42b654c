"""What every KV store must do. Mooncake's is tested with a real master, whose processes are stopped and killed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.config.storage_options import StorageOptions
from pdserve.errors import ConfigError
from pdserve.memory.tiers.breaker import StorageBreakerState
from pdserve.memory.tiers.mooncake_store import MooncakeOptions, MooncakeStorage
from pdserve.memory.tiers.storage import ObjectId, Storage, StorageError
from pdserve.memory.tiers.storage_client import StorageClient
from pdserve.memory.tiers.storage_registry import open_storage
from tests.mooncake_master import Master, free_port
from tests.waiting import wait_until

SIZE = 40_000
BACKENDS = ("file", "memory", pytest.param("mooncake", marks=pytest.mark.slow))


Reopen = Callable[[], Storage]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A store by its name."""
    name = request.param
    options = StorageOptions(of_backend={"directory": str(tmp_path)} if name == "file" else {})
    if name == "mooncake":
        options = request.getfixturevalue("master").options()
    opened = open_storage(name, options)
    wait_ready(opened)
    yield opened
    opened.close()


def wait_ready(store: Storage) -> None:
    """Wait until a store answers and has room."""

    def answers() -> bool:
        with contextlib.suppress(StorageError):
            return store.put_from(["pdserve-ready"], [memoryview(bytes(8))]) == [True]
        return False

    wait_until(answers, "the store answers", 30)


def get(store: Storage, key: str, size: int = SIZE) -> bytes | None:
    """The object of a key."""
    buffer = bytearray(size)
    return bytes(buffer) if store.get_into([key], [memoryview(buffer)]) == [True] else None


@pytest.mark.parametrize("store", BACKENDS, indirect=True)
def test_objects_come_back(store: Storage) -> None:
    """Objects have their bytes, the leading keys are counted, and other sizes or keys are misses."""
    values = {f"key-{index}": os.urandom(SIZE + index) for index in range(5)}
    keys = list(values)
    assert store.exists(keys) == 0
    assert store.put_from(keys, [memoryview(value) for value in values.values()]) == [True] * 5
    assert store.exists(keys) == 5
    assert store.exists([*keys[:2], "other", *keys[2:]]) == 2
    buffers = [bytearray(len(value)) for value in values.values()]
    assert store.get_into(keys, [memoryview(buffer) for buffer in buffers]) == [True] * 5
    assert [bytes(buffer) for buffer in buffers] == list(values.values())
    assert get(store, "key-0", SIZE - 1) is None
    assert get(store, "key-0", SIZE + 1) is None
    assert get(store, "other") is None
    mixed = [bytearray(SIZE), bytearray(SIZE)]
    assert store.get_into(["other", "key-0"], [memoryview(one) for one in mixed]) == [False, True]
    assert bytes(mixed[1]) == values["key-0"]


@pytest.mark.parametrize("store", BACKENDS, indirect=True)
def test_second_put_is_taken(store: Storage) -> None:
    """A key that the store has may be put again; either object may stay."""
    first, second = os.urandom(SIZE), os.urandom(SIZE)
    assert store.put_from(["key"], [memoryview(first)]) == [True]
    assert store.put_from(["key"], [memoryview(second)]) == [True]
    assert get(store, "key") in (first, second)


@pytest.mark.parametrize("store", BACKENDS, indirect=True)
def test_a_discarded_object_is_replaced(store: Storage) -> None:
    """A put behind a discard has the new bytes; to discard a key without an object changes nothing."""
    first, second = os.urandom(SIZE), os.urandom(SIZE)
    assert store.put_from(["key"], [memoryview(first)]) == [True]
    store.discard(["other", "key"])
    assert store.exists(["key"]) == 0
    assert store.put_from(["key"], [memoryview(second)]) == [True]
    assert get(store, "key") == second


@pytest.mark.parametrize("store", BACKENDS, indirect=True)
def test_clear(store: Storage) -> None:
    """A cleared store has nothing, and takes objects again."""
    store.put_from(["a", "b"], [memoryview(bytes(SIZE))] * 2)
    store.clear()
    assert store.exists(["a"]) == 0
    assert get(store, "a") is None
    assert store.put_from(["a"], [memoryview(bytes(SIZE))]) == [True]
    assert get(store, "a") == bytes(SIZE)


def test_file_store_is_shared_and_limited(tmp_path: Path) -> None:
    """A second server sees the files; the oldest go when the directory is too large; unfinished ones are not seen."""
    options = StorageOptions(of_backend={"directory": str(tmp_path), "max_size": 10 * SIZE})
    first, second = open_storage("file", options), open_storage("file", options)
    for index in range(9):
        first.put_from([f"key-{index}"], [memoryview(bytes(SIZE))])
        for path in tmp_path.rglob(f"key-{index}.kv"):
            os.utime(path, (1000 + index, 1000 + index))
    assert get(second, "key-0") == bytes(SIZE)  # and now it was used last
    second.put_from([f"more-{index}" for index in range(2)], [memoryview(bytes(SIZE))] * 2)
    first.put_from([f"last-{index}" for index in range(2)], [memoryview(bytes(SIZE))] * 2)
    kept = sorted(path.stem for path in tmp_path.rglob("*.kv"))
    assert len(kept) == 9
    assert {"key-0", "last-0", "last-1", "more-0", "more-1"} <= set(kept)
    assert "key-1" not in kept
    assert not list(tmp_path.rglob("*.part"))


def test_file_store_on_a_full_disk_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that finds the disk full is refused, not a failure of the store; the oldest objects make room."""
    store = open_storage("file", StorageOptions(of_backend={"directory": str(tmp_path)}))
    for index in range(5):
        store.put_from([f"key-{index}"], [memoryview(bytes(SIZE))])
        for path in tmp_path.rglob(f"key-{index}.kv"):
            os.utime(path, (1000 + index, 1000 + index))
    with monkeypatch.context() as full:
        full.setattr("tempfile.mkstemp", _raising(OSError(errno.ENOSPC, "no space")))
        assert store.put_from(["new", "newer", "key-4"], [memoryview(bytes(SIZE))] * 3) == [False] * 3
    assert get(store, "key-4") == bytes(SIZE)
    assert get(store, "key-0") is None
    assert store.put_from(["new"], [memoryview(bytes(SIZE))]) == [True]
    assert get(store, "new") == bytes(SIZE)


def test_what_the_file_store_cannot_read_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a file of another user: it does not count as a failure of the store, and a put replaces it."""
    store = open_storage("file", StorageOptions(of_backend={"directory": str(tmp_path)}))
    store.put_from(["a", "b"], [memoryview(bytes(SIZE))] * 2)
    with monkeypatch.context() as foreign:
        foreign.setattr("os.access", lambda path, mode: "b.kv" not in str(path))
        assert store.exists(["a", "b"]) == 1
    (path,) = tmp_path.rglob("b.kv")
    path.unlink()
    path.mkdir()
    assert store.exists(["a", "b"]) == 1
    assert get(store, "b") is None


def test_file_store_makes_a_directory_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV tells of prompts. The default directory lies where any user may have made it before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    open_storage("file", StorageOptions())
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    real = os.lstat(made)
    monkeypatch.setattr("os.lstat", lambda path: os.stat_result((*real[:4], real.st_uid + 1, *real[5:])))
    with pytest.raises(ConfigError, match="another user"):
        open_storage("file", StorageOptions())


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    return fail


def test_file_store_needs_a_directory(tmp_path: Path) -> None:
    """A path that is a file is refused by name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        open_storage("file", StorageOptions(of_backend={"directory": str(tmp_path / "file")}))


def test_unknown_store_and_options() -> None:
    """Names are checked."""
    with pytest.raises(ConfigError, match="there is file, memory, mooncake"):
        open_storage("nothing", StorageOptions())
    for name in ("file", "memory", "mooncake"):
        with pytest.raises(ConfigError, match="unknown option 'speed'"):
            open_storage(name, StorageOptions(of_backend={"speed": 1}))


# ---------------------------------------------------------------------- Mooncake's failures


def page_ids(count: int) -> list[ObjectId]:
    """Pages of one namespace."""
    return [ObjectId(bytes(32), bytes([index]) * 32, "tokens-t0of1-p0of1") for index in range(count)]


def fill(client: StorageClient, count: int) -> list[bytes]:
    """Store pages through a client; their bytes."""
    pages = [os.urandom(SIZE) for _ in range(count)]
    wait_until(lambda: client.breaker.state is StorageBreakerState.CLOSED, "the breaker closes", 30)
    job = client.start_put(page_ids(count), [memoryview(page) for page in pages])
    wait_until(lambda: job.is_done, "the pages are stored", 30)
    assert client.counts.pages_written >= count
    return pages


def read(client: StorageClient, count: int, deadline_s: float) -> tuple[list[bytes], float]:
    """Read pages as a waiting request does: those that came, and the seconds that it took."""
    begin = time.monotonic()
    lookup = client.start_lookup(page_ids(count))
    while not lookup.is_done and time.monotonic() < begin + deadline_s:
        time.sleep(0.005)
    buffers = [bytearray(SIZE) for _ in range(lookup.num_found)]
    if not lookup.is_done:
        client.give_up(lookup, late=True)
        return [], time.monotonic() - begin
    job = client.start_get(page_ids(count)[: len(buffers)], [memoryview(buffer) for buffer in buffers])
    while not job.is_done and time.monotonic() < begin + deadline_s:
        time.sleep(0.005)
    client.give_up(job, late=True)
    return [bytes(buffer) for buffer in buffers[: job.num_done]], time.monotonic() - begin


@contextlib.contextmanager
def mooncake_client(options: StorageOptions) -> Iterator[StorageClient]:
    """A client of Mooncake Store that is set up."""
    store = MooncakeStorage(MooncakeOptions.of(options))
    wait_ready(store)
    client = StorageClient(store)
    yield client
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("master", [10_000], indirect=True)
def test_mooncake_takes_an_object_as_large_as_a_recurrent_state(master: Master) -> None:
    """The memory of its client is as large as the largest object, which that of Qwen3-Next is for one rank."""
    state = os.urandom(75 << 20)
    options = dataclasses.replace(master.options(segment=256 << 20), largest_object=len(state))
    store = open_storage("mooncake", options)
    wait_ready(store)
    try:
        assert store.put_from(["page", "state"], [memoryview(bytes(SIZE)), memoryview(state)]) == [True, True]
        assert get(store, "state", len(state)) == state
    finally:
        store.close()


@pytest.mark.slow
def test_mooncake_is_shared_and_survives_its_owner(master: Master) -> None:
    """A second server reads what the first one stored. A stopped owner costs one deadline, a dead one nothing."""
    with mooncake_client(master.options()) as owner:
        pages = fill(owner, 8)
        with mooncake_client(master.options(segment=0)) as reader:
            assert read(reader, 8, 5.0)[0] == pages
            pid = owner.storage.child_pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGSTOP)
            found, took_s = read(reader, 8, 1.0)
            assert len(found) < 8 and took_s < 1.5
            found, took_s = read(reader, 8, 1.0)
            assert not found and took_s < 0.1
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: reader.breaker.state is StorageBreakerState.CLOSED, "the breaker closes", 60)
            found, took_s = read(reader, 8, 1.0)
            assert not found and took_s < 1.5


@pytest.mark.slow
def test_mooncake_master_is_killed_and_comes_back(master: Master) -> None:
    """Without a master a request waits once, at most for its deadline; with a new one the store works again."""
    with mooncake_client(master.options()) as client:
        pages = fill(client, 4)
        assert read(client, 4, 5.0)[0] == pages
        master.kill()
        took = []
        for _ in range(6):
            found, took_s = read(client, 4, 1.0)
            assert not found
            took.append(took_s)
        assert max(took) < 1.5 and sum(took) < 2.5
        master.restart()
        wait_until(lambda: client.breaker.state is StorageBreakerState.CLOSED, "the breaker closes", 90)
        client.counts.pages_written = 0

        def stored() -> bool:
            job = client.start_put(page_ids(4), [memoryview(page) for page in pages])
            wait_until(lambda: job.is_done, "the pages are stored", 30)
            return read(client, 4, 1.0)[0] == pages

        wait_until(stored, "pages are stored again", 90)


@pytest.mark.slow
def test_mooncake_master_is_stopped_and_goes_on(master: Master) -> None:
    """A master that does not answer costs one deadline; when it goes on, its objects are there."""
    with mooncake_client(master.options()) as client:
        pages = fill(client, 4)
        assert read(client, 4, 5.0)[0] == pages
        os.kill(master.process.pid, signal.SIGSTOP)
        took = []
        for _ in range(6):
            found, took_s = read(client, 4, 1.0)
            assert not found
            took.append(took_s)
        assert max(took) < 1.5 and sum(took) < 2.5
        os.kill(master.process.pid, signal.SIGCONT)
        wait_until(lambda: client.breaker.state is StorageBreakerState.CLOSED, "the breaker closes", 90)
        wait_until(lambda: read(client, 4, 1.0)[0] == pages, "the pages are read again", 90)


@pytest.mark.slow
def test_mooncake_without_a_master() -> None:
    """A server without a master starts at once; every look-up is a miss at once."""
    options = StorageOptions(of_backend={"master_server_address": f"127.0.0.1:{free_port()}"})
    begin = time.monotonic()
    client = StorageClient(MooncakeStorage(MooncakeOptions.of(options)))
    assert read(client, 4, 1.0)[0] == []
    assert time.monotonic() - begin < 2
    assert "set up" in client.breaker.last_error
    client.close()
