"""Makes peer processes for the transport tests, by fork: a start of Python each would take most of the tests' time.

argv: transport
stdin: `<region bytes>` asks for a peer;
    `SEND <address> <start> <bytes> <value> [NAME=value...]` for one that fills that range with a value again and again
stdout: `READY <pid> <address> <region start> <descriptor of the file that the region is mapped from>` from each, and
    `NOTED <pid> <number> <True or False>` for each notification: whether the bytes that it speaks of were there;
    `SENDING <pid>` when a sender is about to write, `FAILED <pid>` when a write has failed: it tries again all the same

A peer registers one region and lives until it is killed, or this process ends. It opens its transport after the fork,
in the environment that its line adds to ours; `OTHER_HOST=1` has it take this host for another one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import zlib
from typing import cast

from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer import registry
from pdserve.transfer.transport import Copy, MemoryRegion, NotifyingTransport
from pdserve.transfer.transports import auto, mooncake, nixl, shm
from pdserve.transfer.transports import shm as shm_share
from pdserve.transfer.transports.nixl_engine import load_native

PR_SET_PDEATHSIG = 1
PAGE_BYTES = 256 << 10
__all__ = ["auto", "mooncake", "nixl", "shm"]
"""Imported before the fork, to be quick after it; the engines themselves are not. nixl is, since it imports torch."""


def main() -> None:
    """Fork a peer per line."""
    name = sys.argv[1]
    if name == "nixl":
        load_native()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            match line.split():
                case ["SEND", address, start, num_bytes, value, *environment]:
                    os.environ.update(one.split("=", 1) for one in environment)
                    send(name, address, int(start), int(num_bytes), int(value))
                case [num_bytes]:
                    serve(name, int(num_bytes))


def serve(name: str, num_bytes: int) -> None:
    """Be a peer. The region is memory as pools have it, so the test can map it too and sees every byte."""
    memory = shared.allocate(num_bytes)
    start = shared.address_of(memory)
    segment = shared.find(start, num_bytes)
    assert segment is not None
    transport = registry.open_transport(name, "127.0.0.1", None)
    transport.register([MemoryRegion(start, num_bytes)])
    print(f"READY {os.getpid()} {transport.address()} {start} {segment.descriptor}", flush=True)
    while True:
        if not transport.facts.notifies:
            signal.pause()
        for note in cast(NotifyingTransport, transport).take_notifications():
            number, first, length, checksum = map(int, note.split())
            there = zlib.crc32(memory[first : first + length]) == checksum
            print(f"NOTED {os.getpid()} {number} {there}", flush=True)
        time.sleep(0.0005)


def send(name: str, address: str, start: int, num_bytes: int, value: int) -> None:
    """Write, whatever becomes of it."""
    if "OTHER_HOST" in os.environ:
        shm_share.host_identity = lambda: "elsewhere"
    memory = shared.allocate(num_bytes)
    memory[:] = bytes([value]) * num_bytes
    source = shared.address_of(memory)
    transport = registry.open_transport(name, "127.0.0.1", None)
    transport.register([MemoryRegion(source, num_bytes)])
    transport.connect(address)
    page = min(PAGE_BYTES, num_bytes)
    copies = [Copy(source + offset, start + offset, page) for offset in range(0, num_bytes, page)]
    print(f"SENDING {os.getpid()}", flush=True)
    failed = False
    while True:
        try:
            transport.connect(address)
            transport.write(address, copies)
        except TransferError:
            if not failed:
                print(f"FAILED {os.getpid()}", flush=True)
            failed = True
            time.sleep(0.05)


if __name__ == "__main__":
    main()
