"""Memory of KV pages that is committed before it is used: else the first write to each waits for the system to find and
zero it, while a step waits. Used at start-up; has a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Sequence

from pdserve.base.native import Unavailable, library

log = logging.getLogger(__name__)

TOKENS_AHEAD = 32768
"""Of pages that are committed though nobody has used them yet."""
MOST_BYTES_AHEAD = 1 << 30
"""Of a rank's pools, at most, for them."""
_STEP_BYTES = 2 << 20
"""Committed at a time, or a page: a huge page, where there are any."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14; older kernels refuse it."""
_NICENESS = 10
"""Of the thread, so that it gives way to those that compute."""
_QUIET_S = 1.0
"""Since a page was taken: then nobody is likely to wait."""


class Prefault:
    """Commits the memory of the pages behind the highest one that was ever used.

    Page allocators hand out pages in ascending order until all were used once. It has committed the first when it is
    there; while pages are taken it rests, unless few of them are left. `buffers` are (address, bytes) of pools in
    memory of the host, each of `num_pages` pages. They must be there until `close`, and are if they are `owner`'s,
    which is kept until then. Where `madvise` must do it and the system refuses, memory is committed as it is used.
    """

    def __init__(
        self, buffers: Sequence[tuple[int, int]], num_pages: int, num_ahead: int, owner: object = None
    ) -> None:
        self._owner = owner
        self._buffers = [(address, num_bytes // num_pages) for address, num_bytes in buffers]
        self._step = max(1, _STEP_BYTES // sum(page_bytes for _, page_bytes in self._buffers))
        self._num_pages = num_pages
        self._num_ahead = num_ahead
        self._few = min(num_ahead, max(2, num_ahead // 64))
        self._highest = -1
        self._committed = 0
        self._taken_s = -math.inf
        self._wake_at = num_ahead
        self._begun = threading.Event()
        self._closing = False
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-commit", daemon=True)
        self._thread.start()
        self._begun.wait()

    def used(self, pages: Sequence[int]) -> None:
        """These are used from now on. Called by the thread that allocates."""
        self._taken_s = time.monotonic()
        highest = max(pages, default=-1)
        if highest <= self._highest:
            return
        self._highest = highest
        if not self._reaches(self._wake_at):
            self._told.set()

    def close(self) -> None:
        """Commit no more; returns when nothing is being committed."""
        self._closing = True
        self._told.set()
        self._thread.join()
        self._owner = None

    def _reaches(self, num_ahead: int) -> bool:
        """Whether so many pages are committed behind the highest one that was used, or all that there are."""
        return self._committed >= min(self._num_pages, self._highest + 1 + num_ahead)

    def _run(self) -> None:
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # it works as well, but in the way of others
            os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            while self._committed < self._num_pages and not self._closing:
                if self._reaches(self._num_ahead):
                    self._rest(None, self._num_ahead // 2)
                elif self._reaches(self._few) and (left_s := self._taken_s + _QUIET_S - time.monotonic()) > 0:
                    self._rest(left_s, self._few)
                else:
                    self._commit()
        except OSError as error:
            log.info("KV memory is committed as it is used: %s", error)
        finally:
            self._begun.set()

    def _rest(self, seconds: float | None, wake_at: int) -> None:
        """For so long at most, and until fewer than `wake_at` pages are committed ahead."""
        self._begun.set()
        self._wake_at = wake_at
        if self._reaches(wake_at) and not self._closing:
            self._told.wait(seconds)
        self._told.clear()

    def _commit(self) -> None:
        """The next step."""
        begin = max(self._committed, self._highest + 1)
        end = min(self._num_pages, begin + self._step, self._highest + 1 + self._num_ahead)
        for address, page_bytes in self._buffers:
            _populate(address + begin * page_bytes, address + end * page_bytes)
        self._committed = end
        self._begun.set()


def _populate(begin: int, end: int) -> None:
    """By the native library where there is one: within `madvise` the process can't map memory or start threads, which
    take the same lock of the system's.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    begin = begin // page * page
    with contextlib.suppress(Unavailable):
        library().pdk_touch(begin, end - begin, page)
        return
    if _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINTR:
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
"""Its calls let other threads run, which those of `mmap` do not."""
