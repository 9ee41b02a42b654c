"""Memory of KV pages that is committed before it is used: else the first write to each waits for the system to find and
zero it, while a step waits. Used at start-up; has a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

TOKENS_AHEAD = 32768
"""Of pages that are committed though nobody has used them yet."""
MOST_BYTES_AHEAD = 1 << 30
"""Of a rank's pools, at most, for them."""
_STEP_BYTES = 2 << 20
"""Committed by one call: a huge page, where there are any."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14; older kernels refuse it."""
_NICENESS = 10
"""Of the thread, so that it gives way to those that compute."""


class CommitAhead:
    """Commits the memory of the pages behind the highest one that was ever used.

    Page allocators hand out pages in ascending order until all were used once. `buffers` are (address, bytes) of pools
    in memory of the host, each of `num_pages` pages; they must outlive this object, which ends with `close`. Where the
    system can't commit, nothing is done, and memory is committed as it is used.
    """

    def __init__(self, buffers: Sequence[tuple[int, int]], num_pages: int, num_ahead: int) -> None:
        self._buffers = [(address, num_bytes // num_pages) for address, num_bytes in buffers]
        self._num_pages = num_pages
        self._num_ahead = num_ahead
        self._highest = -1
        self._committed = 0
        self._closing = False
        self._wanted = threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="kv-commit", daemon=True)
        self._thread.start()

    def used(self, pages: Sequence[int]) -> None:
        """These are used from now on. Called by the thread that allocates."""
        highest = max(pages, default=-1)
        if highest <= self._highest:
            return
        self._highest = highest
        if self._committed < min(self._num_pages, highest + 1 + self._num_ahead // 2):
            self._wanted.set()

    def close(self) -> None:
        """Commit no more; returns when nothing is being committed."""
        self._closing = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # it works as well, but in the way of others
            os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            while self._committed < self._num_pages:
                self._wanted.wait()
                self._wanted.clear()
                begin = max(self._committed, self._highest + 1)
                end = min(self._num_pages, self._highest + 1 + self._num_ahead)
                for address, page_bytes in self._buffers:
                    self._commit(address + begin * page_bytes, address + end * page_bytes)
                if self._closing:
                    return
                self._committed = max(self._committed, end)
        except OSError as error:
            log.info("KV memory is committed as it is used: %s", error)

    def _commit(self, begin: int, end: int) -> None:
        for step in range(begin // _STEP_BYTES * _STEP_BYTES, end, _STEP_BYTES):
            if self._closing:
                return
            _populate(max(begin, step), min(end, step + _STEP_BYTES))


def _populate(begin: int, end: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    begin = begin // page * page
    if _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINTR:
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
"""Its calls let other threads run, which those of `mmap` do not."""
