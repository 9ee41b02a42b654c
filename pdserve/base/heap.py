"""The heap of this process. Called where much that was allocated for the start is not needed any longer."""

from __future__ import annotations

import ctypes
import sys


def give_back_freed() -> None:
    """Give freed memory back to the operating system, where the C library can (glibc); it keeps some for later else."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        try:
            trim = libc.malloc_trim
        except AttributeError:  # another C library
            return
        trim(0)
