"""Memory that other processes of this host can map: KV pools and aux slots on CPU; and finding it by address.

`KVPool` and `MetadataBuffers` allocate here; the `shm` transport asks `find` for the file behind what it registers.
The file is a memfd: it has no name in any file system, is not bounded by /dev/shm, and is gone with the last process
that has it open or mapped. It is sealed against truncation, so that no mapping of it can ever fault.
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
    """A file mapped whole into this process: at `address`, of `num_bytes`, open as `descriptor`."""

    address: int
    num_bytes: int
    descriptor: int

    def holds(self, address: int, num_bytes: int) -> bool:
        """True when `[address, address + num_bytes)` lies in it."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class _Segments:
    """The live segments of this process. An entry goes, and its file is closed, when its mapping is let go of.

    That may be in the middle of `add` or `find`, by the garbage collector and on the same thread: so there is no lock,
    each touches the dict in one step that is atomic, and `find` looks at a copy.
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


def allocate(num_bytes: int) -> mmap.mmap:
    """`num_bytes` zero bytes at a page-aligned address, committed as they are touched; freed with the last reference.

    Where the system gives no memfd, the memory is private, `find` does not know it, and `shm` refuses to register it.
    """
    try:
        descriptor = os.memfd_create("pdserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        log.warning("no memory that can be shared (%s): transfer backend shm cannot work here", error)
        return allocate_private(num_bytes)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    _ask_for_huge_pages(memory)  # which few systems give to shared memory
    _segments.add(memory, Segment(address_of(memory), num_bytes, descriptor))
    return memory


def allocate_private(num_bytes: int) -> mmap.mmap:
    """As `allocate`, but no other process can map it, and it lies in huge pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    return memory


def find(address: int, num_bytes: int) -> Segment | None:
    """The segment that holds `[address, address + num_bytes)`; None when this is no memory of `allocate`."""
    return _segments.find(address, num_bytes)


def map_whole(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map the first `num_bytes` of another process's segment. The caller keeps `descriptor`, and may close it.

    Raises:
        OSError, ValueError: it is no file, too short, or not sealed: whoever made it could make our writes fault.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
        raise ValueError("the file may be truncated")
    return mmap.mmap(descriptor, num_bytes)


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # kernels without them
        memory.madvise(mmap.MADV_HUGEPAGE)
