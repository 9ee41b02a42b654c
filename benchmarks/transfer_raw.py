"""What each engine does by itself with a list of copies: no rooms, threads or messages. Used by `bench_transfer`.

Each writes from this process into the pool of the receiving half, whose transport address it is given.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence

from pdserve.transfer.transport import Copy, MemoryRegion

Write = Callable[[Sequence[Copy]], None]
"""Copies, and returns when all have landed. Raises RuntimeError."""


def raw_writer(stack: contextlib.ExitStack, backend: str, address: str, source: MemoryRegion) -> Write:
    """A writer of `backend`, from `source` to the process behind `address`; `stack` ends it."""
    return WRITERS[backend](stack, address, source)


def _raw_shm(stack: contextlib.ExitStack, address: str, source: MemoryRegion) -> Write:
    """memmove into the mapping."""
    from pdserve.transfer.transports.shm import open_peer

    peer = open_peer(address)

    def write(copies: Sequence[Copy]) -> None:
        for copy in copies:
            index = peer.regions.find(copy.destination, copy.num_bytes)
            assert index is not None
            ctypes.memmove(copy.destination + peer.shifts[index], copy.source, copy.num_bytes)

    return write


def _raw_mooncake(stack: contextlib.ExitStack, address: str, source: MemoryRegion) -> Write:
    """An engine of its own and its batch call, in batches as large as its queue takes."""
    from pdserve.transfer.transports.mooncake import BATCH_ENTRIES, MooncakeEngine, session_of

    engine = MooncakeEngine("127.0.0.1", "tcp", "")
    stack.callback(engine.destroy)
    engine.register(source)
    session = session_of(address)
    engine.reach(session)

    def write(copies: Sequence[Copy]) -> None:
        for first in range(0, len(copies), BATCH_ENTRIES):
            batch = engine.submit_batch(session, copies[first : first + BATCH_ENTRIES])
            if batch == 0 or engine.finish_batch(batch) != 0:
                raise RuntimeError("the engine reports a failed batch")

    return write


def _raw_nixl(stack: contextlib.ExitStack, address: str, source: MemoryRegion) -> Write:
    """An agent of its own, a list of descriptors for each call, and looking for its end all the time."""
    from pdserve.transfer.transports.nixl import decode_address
    from pdserve.transfer.transports.nixl_engine import Agent, kind_of, load_native

    agent = Agent(load_native(), answers=False)
    stack.callback(agent.destroy)
    agent.register(source, kind_of(source.address))
    peer = agent.native.add_remote_agent(decode_address(address).metadata)

    def write(copies: Sequence[Copy]) -> None:
        native = agent.native
        ours = native.get_xfer_descs([(copy.source, copy.num_bytes, 0) for copy in copies], "DRAM")
        theirs = native.get_xfer_descs([(copy.destination, copy.num_bytes, 0) for copy in copies], "DRAM")
        handle = native.initialize_xfer("WRITE", ours, theirs, peer)
        state = native.transfer(handle)
        while state == "PROC":
            time.sleep(0.00002)  # the peer's threads may need the core
            state = native.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"the engine reports {state}")

    return write


WRITERS: dict[str, Callable[[contextlib.ExitStack, str, MemoryRegion], Write]] = {
    "shm": _raw_shm,
    "mooncake": _raw_mooncake,
    "nixl": _raw_nixl,
}
