"""A peer process for the transport tests: registers one region, says where it is, and answers a few questions on stdin.

argv: region bytes, path of the file that backs the region
stdout: `READY <address> <region start>`
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import MemoryRegion


def main() -> None:
    """Serve until stdin closes. The region is a shared mapping of a file, so that the test sees every byte."""
    num_bytes, path = int(sys.argv[1]), sys.argv[2]
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), num_bytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    transport = open_transport("mooncake", "127.0.0.1", None)
    transport.register([MemoryRegion(start, num_bytes)])
    print(f"READY {transport.address()} {start}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
