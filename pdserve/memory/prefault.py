"""Commits the memory of KV pages before its first use, on a thread of its own.

Without it the first write to a page waits in a step until the system finds and zeroes memory. Started by
`engine/assemble`.
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
from collections.abc import Callable, Sequence

from pdserve.base.native import Unavailable, library

log = logging.getLogger(__name__)

TOKENS_AHEAD = 32768
"""Tokens of unused pages that are committed in advance."""
MOST_BYTES_AHEAD = 1 << 30
"""Most bytes of a rank's pools that are committed in advance."""
_STEP_BYTES = 2 << 20
"""Bytes committed at a time, but at least one page. 2 MiB is the size of a huge page."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14; older kernels refuse it."""
_NICENESS = 10
"""Niceness of the thread, so that computing threads come first."""
QUIET_S = 1.0
"""Seconds since the last allocation after which no request is likely to wait."""


class Prefault:
    """Commits the memory of the pages behind the highest page that was ever used.

    Page allocators hand out pages in ascending order until all were used once. The constructor returns once the first
    step is committed. While pages are allocated the thread pauses, unless few committed ones are left.

    `buffers`: (address, bytes) of pools in host memory, each of `num_pages` pages. They must live until `close`;
    `owner`, which may own them, is kept alive until then. Where `madvise` is used and the system refuses it, memory is
    committed at its first use. `commit(begin, end)` commits memory between two addresses.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[int, int]],
        num_pages: int,
        num_ahead: int,
        owner: object = None,
        *,
        quiet_s: float = QUIET_S,
        commit: Callable[[int, int], None] | None = None,
    ) -> None:
        self._owner = owner
        self._quiet_s = quiet_s
        self._commit = commit or populate
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
        self._closing = self._is_held = False
        self._committing = threading.Lock()
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-commit", daemon=True)
        self._thread.start()
        self._begun.wait()

    def used(self, pages: Sequence[int]) -> None:
        """Record that `pages` are used from now on. Called by the thread that allocates."""
        self._taken_s = time.monotonic()
        highest = max(pages, default=-1)
        if highest <= self._highest:
            return
        self._highest = highest
        if not self._reaches(self._wake_at):
            self._told.set()

    def hold(self) -> None:
        """Commit nothing until `go_on`; returns once no commit is under way."""
        with self._committing:
            self._is_held = True
        self._told.set()

    def go_on(self) -> None:
        """Commit again. Pages that were used before, and given back meanwhile, are committed as they are used."""
        self._is_held = False
        self._told.set()

    def close(self) -> None:
        """Stop committing; returns once no commit is under way."""
        self._closing = True
        self._told.set()
        self._thread.join()
        self._owner = None

    def _reaches(self, num_ahead: int) -> bool:
        """True when `num_ahead` pages behind the highest used one are committed, or all pages are."""
        return self._committed >= min(self._num_pages, self._highest + 1 + num_ahead)

    def _run(self) -> None:
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # without it the thread competes with computing threads
            os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        try:
            while self._committed < self._num_pages and not self._closing:
                if self._is_held:
                    self.pause(None, 0)
                elif self._reaches(self._num_ahead):
                    self.pause(None, self._num_ahead // 2)
                elif self._reaches(self._few) and (left_s := self._taken_s + self._quiet_s - time.monotonic()) > 0:
                    self.pause(left_s, self._few)
                else:
                    self._commit_step()
        except OSError as error:
            log.info("KV memory is committed as it is used: %s", error)
        finally:
            self._begun.set()

    def pause(self, seconds: float | None, wake_at: int) -> None:
        """Pause for `seconds` at most (None: no limit), or until fewer than `wake_at` pages are committed ahead.

        Called on the thread.
        """
        self._begun.set()
        self._wake_at = wake_at
        if (self._is_held or self._reaches(wake_at)) and not self._closing:
            self._told.wait(seconds)
        self._told.clear()

    def _commit_step(self) -> None:
        """Commit the next step."""
        with self._committing:
            if not self._is_held:
                self._commit_ahead()

    def _commit_ahead(self) -> None:
        begin = max(self._committed, self._highest + 1)
        end = min(self._num_pages, begin + self._step, self._highest + 1 + self._num_ahead)
        for address, page_bytes in self._buffers:
            self._commit(address + begin * page_bytes, address + end * page_bytes)
        self._committed = end
        self._begun.set()


def populate(begin: int, end: int) -> None:
    """Commit `[begin, end)`, by the native library where it is available.

    During `madvise` the process cannot map memory or start threads, which need the same kernel lock.

    Raises:
        OSError: the system refuses.
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
"""Its calls release the GIL, which `mmap.madvise` does not."""
