"""A process that writes to a receiver until that fails, and then waits for the next address. Used by `test_fences`.

argv: transport, destination address in the receiver, bytes, the byte that it writes
stdin: a transport address a line
stdout: `WRITING` when the first write to it has ended, `ENDED` when one has failed
"""

from __future__ import annotations

import sys

import numpy as np

from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion

PIECE_BYTES = 1 << 20


def main() -> None:
    """Write, one address after the other."""
    name, destination, num_bytes, value = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    memory = shared.allocate(num_bytes)
    np.frombuffer(memory, dtype=np.uint8)[:] = value
    start = shared.address_of(memory)
    transport = open_transport(name, "127.0.0.1", None)
    transport.register([MemoryRegion(start, num_bytes)])
    pieces = range(0, num_bytes, PIECE_BYTES)
    copies = [Copy(start + at, destination + at, min(PIECE_BYTES, num_bytes - at)) for at in pieces]
    for line in iter(sys.stdin.readline, ""):
        address = line.strip()
        told = False
        try:
            transport.connect(address)
            while True:
                transport.write(address, copies)
                if not told:
                    print("WRITING", flush=True)
                    told = True
        except TransferError:
            print("ENDED", flush=True)
        transport.disconnect(address)


if __name__ == "__main__":
    main()
