"""Memory that other processes of this host can map: KV pools and aux slots on CPU, with a look-up by address.

`KVPool` and `MetadataBuffers` allocate here; the `shm` transport calls `find` for the file behind the memory that it
registers. The file is a memfd. It has no name in any file system and no limit by /dev/shm, and is freed with the last
process that has it open or mapped. Its seals forbid truncation, so that no mapping of it can ever fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import logging
import mmap
import os
import weakref

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A file mapped whole into this process: at `address`, of `num_bytes`, with file descriptor `descriptor`."""

    address: int
    num_bytes: int
    descriptor: int

    def holds(self, address: int, num_bytes: int) -> bool:
        """True when the segment contains `[address, address + num_bytes)`."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class _Segments:
    """The live segments of this process. When a mapping is released, its entry is removed and its file closed.

    The garbage collector may do that in the middle of `add` or `find`, on the same thread. So there is no lock: each
    operation changes the dict in one atomic step, and `find` reads a copy.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, Segment] = {}

    def add(self, memory: mmap.mmap, segment: Segment) -> None:
        self._by_address[segment.address] = segment
        weakref.finalize(memory, self._drop, segment).atexit = False

    def find(self, address: int, num_bytes: int) -> Segment | None:
        return next((one for one in self._by_address.copy().values() if one.holds(address, num_bytes)), None)

    def _drop(self, segment: Segment) -> None:
        del self._by_address[segment.address]
        os.close(segment.descriptor)


_segments = _Segments()
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(num_bytes: int) -> mmap.mmap:
    """Allocate `num_bytes` zero bytes at a page-aligned address, committed at first touch; freed with the last
    reference.

    Where the system has no memfd, the memory is private: `find` returns None, and `shm` refuses to register it.

    Raises:
        OSError: the memory cannot be allocated or mapped.
    """
    try:
        descriptor = os.memfd_create("pdserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        log.warning("no memfd available (%s): transfer backend shm cannot work here", error)
        return allocate_private(num_bytes)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    _ask_for_huge_pages(memory)  # few systems have them for shared memory
    _segments.add(memory, Segment(address_of(memory), num_bytes, descriptor))
    return memory


def allocate_private(num_bytes: int) -> mmap.mmap:
    """As `allocate`, but private to this process, and in huge pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    return memory


def find(address: int, num_bytes: int) -> Segment | None:
    """Return the segment that contains `[address, address + num_bytes)`; None for memory not from `allocate`."""
    return _segments.find(address, num_bytes)


def give_back(address: int, num_bytes: int) -> None:
    """Give whole pages of `[address, address + num_bytes)` back to the system; they read as zeros from now on.

    Pages of a segment are freed in all processes that have it mapped. Not for memory of a device.

    Raises:
        OSError: the system refuses.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = -(-address // page) * page, (address + num_bytes) // page * page
    if begin >= end:
        return
    is_shared = find(begin, end - begin) is not None
    advice = mmap.MADV_REMOVE if is_shared else mmap.MADV_DONTNEED
    if _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def map_whole(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map the first `num_bytes` of another process's segment. The caller keeps `descriptor`, and may close it.

    Raises:
        OSError, ValueError: it is no file, too short, or not sealed: its owner could make writes of this process
            fault.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
        raise ValueError("the file may be truncated")
    return mmap.mmap(descriptor, num_bytes)


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # kernels without them
        memory.madvise(mmap.MADV_HUGEPAGE)
