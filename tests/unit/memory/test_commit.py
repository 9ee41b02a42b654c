"""Which memory is committed, as the system tells it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import queue
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pdserve.base.native import Unavailable, library
from pdserve.config.groups import ModelConfig, ServerConfig
from pdserve.engine import assemble
from pdserve.memory import prefault as commit
from pdserve.memory.prefault import Prefault
from pdserve.memory.shared import address_of, allocate, allocate_private
from tests.driver import build
from tests.tiny import Family
from tests.waiting import wait_until

PAGE = 1 << 20
NUM_PAGES = 24


def committed(memory: mmap.mmap, num_pages: int = NUM_PAGES) -> int:
    """How many pages from the first on are wholly committed."""
    unit = mmap.PAGESIZE
    seen = (ctypes.c_ubyte * math.ceil(len(memory) / unit))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory)), seen) == 0
    each = len(memory) // num_pages // unit
    return next((n for n in range(num_pages) if not all(seen[n * each : (n + 1) * each])), num_pages)


def wait_for(memory: mmap.mmap, num_pages: int) -> None:
    wait_until(lambda: committed(memory) >= num_pages, f"{num_pages} pages are committed")


def no_library() -> ctypes.CDLL:
    raise Unavailable("there is none")


def has_library() -> bool:
    try:
        library()
    except Unavailable:
        return False
    return True


needs_library = pytest.mark.skipif(not has_library(), reason="the native library was not built")


@pytest.mark.parametrize("allocated", [allocate, allocate_private])
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_pages_are_committed_before_they_are_used(
    allocated: type, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(commit, "library", no_library)
    memories = [allocated(NUM_PAGES * PAGE) for _ in range(2)]
    ahead = Prefault([(address_of(memory), len(memory)) for memory in memories], NUM_PAGES, 4, quiet_s=0.0)
    try:
        assert all(committed(memory) >= 1 for memory in memories), "the first, when it is there"
        for memory in memories:
            wait_for(memory, 4)
        assert committed(memories[1]) < 8, "with huge pages a little more, but not all"
        ahead.used([0, 1])
        ahead.used([9, 3])
        ahead.used([2])
        for memory in memories:
            memory[: 10 * PAGE : mmap.PAGESIZE] = b"\1" * (10 * PAGE // mmap.PAGESIZE)  # commits those that are used
            wait_for(memory, 14)
            assert not any(memory[10 * PAGE : 14 * PAGE]), "nothing is written"
    finally:
        ahead.close()


@needs_library
def test_touched_memory_keeps_what_it_has() -> None:
    memory = allocate_private(PAGE)
    memory[:] = b"\xa5" * PAGE
    commit.populate(address_of(memory), address_of(memory) + PAGE)
    assert memory[:] == b"\xa5" * PAGE


def test_what_is_left_is_committed_at_last() -> None:
    memory = allocate_private(NUM_PAGES * PAGE)
    ahead = Prefault([(address_of(memory), len(memory))], NUM_PAGES, 4, quiet_s=0.0)
    try:
        for page in range(NUM_PAGES):
            ahead.used([page])
            wait_for(memory, min(NUM_PAGES, page + 1))
        wait_for(memory, NUM_PAGES)
    finally:
        ahead.close()


def test_while_pages_are_taken_it_rests_unless_few_are_left() -> None:
    populated: list[tuple[int, int]] = []
    rests: queue.SimpleQueue[tuple[bool, int]] = queue.SimpleQueue()

    class Watched(Prefault):
        def pause(self, seconds: float | None, wake_at: int) -> None:
            rests.put((seconds is None, wake_at))
            super().pause(seconds, wake_at)

    def populate(begin: int, end: int) -> None:
        populated.append((begin // PAGE, end // PAGE))

    ahead = Watched([(0, 40 * PAGE)], 40, 16, quiet_s=1000.0, commit=populate)
    for_good, until_quiet = (True, 8), (False, 2)
    try:
        assert rests.get(timeout=60) == for_good
        assert populated == [(page, page + 2) for page in range(0, 16, 2)]
        ahead.used([3])
        ahead.used([9])
        assert rests.get(timeout=60) == until_quiet, "6 are left, fewer than 8"
        assert len(populated) == 8
        ahead.used([13])
        ahead.used([14])
        assert rests.get(timeout=60) == until_quiet, "1 was left, fewer than 2"
        assert populated[8:] == [(16, 18)]
        ahead.used([21])
        assert rests.get(timeout=60) == until_quiet
        assert populated[9:] == [(22, 24)], "those that are used are left out"
    finally:
        ahead.close()
    assert rests.empty()


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_few_pages_ahead_do_not_keep_it_from_starting(num_ahead: int) -> None:
    memory = allocate_private(NUM_PAGES * PAGE)
    ahead = Prefault([(address_of(memory), len(memory))], NUM_PAGES, num_ahead)
    ahead.used([2])
    ahead.close()


def test_where_the_system_can_not_pages_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses to commit memory that may not be written."""
    monkeypatch.setattr(commit, "library", no_library)
    caplog.set_level(logging.INFO, logger=commit.log.name)
    memory = allocate_private(NUM_PAGES * PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(address_of(memory))
    assert libc.mprotect(address, ctypes.c_size_t(len(memory)), ctypes.c_int(mmap.PROT_READ)) == 0
    ahead = Prefault([(address_of(memory), len(memory))], NUM_PAGES, 4)
    ahead.used([1])
    ahead.close()
    assert "committed as it is used: Invalid argument" in caplog.text.replace("[Errno 22] ", "")
    assert committed(memory) == 0


def test_what_a_server_allocates_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    told: list[list[int]] = []

    class Recorder(Prefault):
        def used(self, pages: Sequence[int]) -> None:
            told.append(list(pages))
            super().used(pages)

    monkeypatch.setattr(assemble, "Prefault", Recorder)
    path = tiny_checkpoint("llama")
    config = ServerConfig(model=ModelConfig(model_path=str(path)))
    with contextlib.ExitStack() as stack:
        memory = assemble.make_memory(config, build(path, page_size=16), stack)
        lease = memory.reserve_tokens(40, "somebody")
        assert lease is not None
        assert told == [[0, 1, 2]]
        lease.drop("request")
