"""Copies within this process's memory, many in one call. Used by `shm`."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import numpy as np

from pdserve.base.native import Unavailable, library

Move = tuple[int, int, int]
"""Destination and source, both addresses of this process, and bytes."""
SMALL_BYTES = 1 << 16
"""So few are moved sooner than the interpreter's lock is got back, so it is not let go of."""


class MemcpyEngine:
    """Moves bytes. Where the library of kernels is, the interpreter's lock is let go of once for all moves of a call;
    else once for each that is not small. Thread-safe.
    """

    def __init__(self, *, native: bool = True) -> None:
        """`native` False: as where there is no library."""
        self._small = ctypes.PyDLL(None).memmove
        self._small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._small.restype = None
        self._copy = None
        if native:
            with contextlib.suppress(Unavailable):
                self._copy = library().pdk_copy

    def __call__(self, moves: Sequence[Move]) -> None:
        """All of them, in order; ranges are not checked."""
        if self._copy is not None and sum(move[2] for move in moves) > SMALL_BYTES:
            table = np.array(moves, dtype=np.int64)
            self._copy(table.ctypes.data, len(table))
            return
        for destination, source, num_bytes in moves:
            move = self._small if num_bytes <= SMALL_BYTES else ctypes.memmove
            move(destination, source, num_bytes)
