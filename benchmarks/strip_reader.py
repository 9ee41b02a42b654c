"""Memory read in strips far from each other, by `strip_reader.cpp`: what bounds attention. Called by `kernels`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.compiled import build

AHEAD_BYTES = 8 << 10
"""So far ahead strips are asked for, or one of them where they are longer."""


class StripReader:
    """Reads with `num_threads` of OpenMP's."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._read = build(Path(__file__).with_suffix(".cpp")).read_strips
        self._read.restype = ctypes.c_bool

    def call_of(
        self, memory: Tensor, offsets: Sequence[npt.NDArray[np.int64]], strip_bytes: int, layers: int
    ) -> Callable[[], int]:
        """Reads strips of the first layer, those at `offsets[t]`, in bytes, by thread t, and then those of the others.

        `memory` `[pages, layers, ...]` is contiguous. The call returns all its words, combined by exclusive or,
        and raises RuntimeError where OpenMP has not so many threads.
        """
        assert strip_bytes % 128 == 0 and memory.is_contiguous() and memory.shape[1] == layers
        assert len(offsets) == self.num_threads
        starts = np.concatenate(offsets)
        bounds = np.cumsum([0, *map(len, offsets)])
        ahead = max(1, AHEAD_BYTES // strip_bytes)
        sizes = [ctypes.c_int64(n) for n in (strip_bytes, layers, memory[0, 0].nbytes, ahead)]
        threads = ctypes.c_int(self.num_threads)

        def call() -> int:
            places = memory.data_ptr(), starts.ctypes.data, bounds.ctypes.data
            found = ctypes.c_uint64()
            if not self._read(*map(ctypes.c_void_p, places), *sizes, threads, ctypes.byref(found)):
                raise RuntimeError(f"OpenMP gives fewer threads than {self.num_threads}")
            return found.value

        return call
