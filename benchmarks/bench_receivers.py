"""What receiving engines cost, one for each peer, and what a fence takes: threads, descriptors, memory, idle CPU, time.

    python -m benchmarks.bench_receivers                # mooncake, nixl, shm; 16 peers over 256 MiB
    python -m benchmarks.bench_receivers --late-ports   # what lands through a later engine at a fenced one's ports

The second takes three minutes: the system gives a port with former connections to nobody for one. It shows what
`EnginePorts` is for: without it a sender that was stopped goes on into the engine of another peer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil

from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport
from pdserve.transfer.transports import receiving

MIB = 1 << 20
IDLE_S = 10.0
LATE_BYTES = 64 * MIB
LATE_PAGE = MIB // 4
TIME_WAIT_S = 70.0
LANDS_S = 10.0
FIRST_PORT = 29100


def main() -> None:
    """Measure each transport, and each case, in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="*", default=["mooncake", "nixl", "shm"])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--late-ports", action="store_true")
    parser.add_argument("--cost", help=argparse.SUPPRESS)
    parser.add_argument("--late", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cost:
        print(cost_of(args.cost, args.peers, args.mib * MIB), flush=True)
    elif args.late is not None:
        print(late_bytes(remembered=args.late), flush=True)
    elif args.send:
        send(args.send[0], int(args.send[1]))
    elif args.late_ports:
        for number, remembered in enumerate((0, receiving.MAX_SPENT)):
            low = FIRST_PORT + 100 * number  # the engine from the start takes two, each receiving one two more
            ports = {"MC_MIN_RPC_PORT": str(low), "MC_MAX_RPC_PORT": str(low + (5 if remembered else 3))}
            _run(["--late", str(remembered)], ports)
    else:
        columns = ("threads", "descriptors", "RSS, MiB", "idle, % of a core", "open, ms (worst)", "fence, ms (worst)")
        print(
            f"| {args.peers} peers, {args.mib} MiB | {' | '.join(columns)} |\n|---|---|---|---|---|---|---|", flush=True
        )
        for name in args.transports:
            _run(["--cost", name, "--peers", str(args.peers), "--mib", str(args.mib)], {})


def cost_of(name: str, num_peers: int, num_bytes: int) -> str:
    """A row: what `num_peers` engines add to a transport with memory of `num_bytes`, all of it touched."""
    with _transport(name, num_bytes) as (transport, _):
        me, peers = psutil.Process(), [f"peer {number}" for number in range(num_peers)]
        idle = -_idle(me)
        before = (me.num_threads(), me.num_fds(), me.memory_info().rss / MIB)
        opened = [_time_ms(transport.open_receiver, peer) for peer in peers]
        after = (me.num_threads(), me.num_fds(), me.memory_info().rss / MIB)
        idle += _idle(me)
        fenced = [_time_ms(transport.fence, peer) for peer in peers]
    more = [f"{now - then:+.0f}" for now, then in zip(after, before, strict=True)]
    times = [f"{statistics.median(each):.1f} ({max(each):.1f})" for each in (opened, fenced)]
    return f"| {' | '.join([name, *more, f'{100 * idle:+.1f}', *times])} |"


def late_bytes(*, remembered: int) -> str:
    """A sender is stopped and fenced; another peer's engine is opened when the ports are free; the sender goes on."""
    receiving.MAX_SPENT = remembered
    with _transport("mooncake", LATE_BYTES) as (transport, memory):
        first = transport.open_receiver("one")
        transport.allow_sources("one", ["127.0.0.1"])
        command = [sys.executable, "-m", "benchmarks.bench_receivers", "--send", first, str(memory.ctypes.data)]
        unlimited = {name: value for name, value in os.environ.items() if not name.startswith("MC_M")}
        sender = subprocess.Popen(command, env=unlimited)
        try:
            while memory[-1] != 255:
                time.sleep(0.001)
            sender.send_signal(signal.SIGSTOP)
            assert transport.fence("one")
            time.sleep(TIME_WAIT_S)
            second = transport.open_receiver("other")
            while not remembered and _ports_of(second) != _ports_of(first):  # its two ports the other way round
                transport.fence("other")
                second = transport.open_receiver("other")
            transport.allow_sources("other", ["127.0.0.1"])
            memory[:] = 7
            sender.send_signal(signal.SIGCONT)
            time.sleep(LANDS_S)
            late = int(np.count_nonzero(memory != 7))
        finally:
            sender.kill()
            sender.wait()
    return (
        f"{remembered} spent ports remembered: the fenced engine was at {_ports_of(first)}, the other peer's is at "
        f"{_ports_of(second)}, and {late / MIB:.1f} of {LATE_BYTES // MIB} MiB landed late"
    )


def send(address: str, start: int) -> None:
    """Write for ever; after a failure, too, as copy workers do with the next job."""
    with _transport("mooncake", LATE_BYTES) as (transport, memory):
        memory[:] = 255
        offsets = range(0, LATE_BYTES, LATE_PAGE)
        copies = [Copy(memory.ctypes.data + at, start + at, LATE_PAGE) for at in offsets]
        while True:
            try:
                transport.connect(address)
                transport.write(address, copies)
            except TransferError:
                time.sleep(0.1)


@contextlib.contextmanager
def _transport(name: str, num_bytes: int) -> Iterator[tuple[Transport, np.ndarray]]:
    memory = np.frombuffer(shared.allocate(num_bytes), dtype=np.uint8)
    memory[:] = 1
    transport = open_transport(name, "127.0.0.1")
    try:
        transport.register([MemoryRegion(memory.ctypes.data, num_bytes)])
        yield transport, memory
    finally:
        transport.close()


def _ports_of(address: str) -> str:
    return address.partition("/")[0]


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_receivers", *arguments], env=os.environ | environment, check=True
    )


def _idle(process: psutil.Process) -> float:
    """Share of a core that the process takes while nothing happens."""
    used, started = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(IDLE_S)
    return float(sum(process.cpu_times()[:2]) - used) / (time.monotonic() - started)


def _time_ms(call: Callable[[str], object], peer: str) -> float:
    started = time.monotonic()
    call(peer)
    return 1000 * (time.monotonic() - started)


if __name__ == "__main__":
    main()
