"""Does any byte land in a device's memory after `Transport.fence`? Senders are processes of their own on the same GPU.

    python -m benchmarks.gpu.fence_check [--engines mooncake nixl] [--rounds 9] [--out DIR]
    python -m benchmarks.gpu.fence_check --device cpu --share-mb 16     in host memory: does the program work?

A sender fills its share of the receiver's memory again and again. In each round the receiver fences it: in the first
third while the sender runs, in the second third while it is stopped (SIGSTOP), in the last after it was killed
(SIGKILL). Where `fence` returns False the sender is killed and fenced again: such an engine lets a process of the same
host write by itself, so only the death of that process ends its writes. Then the share is filled with another value,
a stopped sender goes on, and after `--wait` seconds every byte that has changed counts as foreign.

Exit status: 0 no foreign byte, 1 foreign bytes or an engine that failed, 3 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.gpu.pair_on_one_gpu import EXIT_FAILED, EXIT_NO_DEVICE, LOADERS, engines_there
from pdserve.base.host_facts import cpu_model
from pdserve.errors import PdserveError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport

OURS, THEIRS = 7, 101
PAGE_BYTES = 256 << 10
BOUND_S = 60.0
HOWS = ("runs", "is stopped", "is dead")
Sender = subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True)
class Round:
    """One fence: the sender's state, what `fence` returned, its time, whether in mid-write, and foreign bytes after."""

    how: str
    fenced: bool
    seconds: float
    torn: bool
    foreign: int


def send(engine: str, device: str, start: int, num_bytes: int) -> None:
    """Read an address, then fill `[start, start + num_bytes)` behind it until killed; failed writes are tried again."""
    source = torch.full((num_bytes,), THEIRS, dtype=torch.uint8, device=device)
    transport = open_transport(engine, "127.0.0.1", None)
    transport.register([MemoryRegion(source.data_ptr(), num_bytes)])
    address, page = input(), min(PAGE_BYTES, num_bytes)
    copies = [Copy(source.data_ptr() + at, start + at, page) for at in range(0, num_bytes, page)]
    while True:
        try:
            transport.connect(address)
            transport.write(address, copies)
        except TransferError:
            time.sleep(0.05)


@contextlib.contextmanager
def senders(count: int, engine: str, share: torch.Tensor) -> Iterator[list[Sender]]:
    """Processes that run `send`, and wait for an address: they start together, for each takes seconds to."""
    words = ["--send", engine, str(share.device), str(share.data_ptr()), str(share.numel())]
    argv = [sys.executable, "-m", "benchmarks.gpu.fence_check", *words]
    started = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            end(process)


def end(process: Sender) -> None:
    """SIGKILL; returns once the process is gone."""
    process.kill()
    process.communicate(timeout=BOUND_S)


def wait_for(share: torch.Tensor, process: Sender) -> None:
    """Until the sender's first bytes are there. Raises TimeoutError."""
    deadline = time.monotonic() + BOUND_S
    while int(share[-1]) != THEIRS:
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError(f"no byte of the sender came; its exit status: {process.returncode}")
        time.sleep(0.0005)


def play(transport: Transport, share: torch.Tensor, process: Sender, how: str, peer: str, wait_s: float) -> Round:
    """One round; see the top."""
    share.fill_(0)
    synchronize(share)
    assert process.stdin is not None
    process.stdin.write(f"{transport.open_receiver(peer)}\n".encode())
    transport.allow_sources(peer, ["127.0.0.1"])
    process.stdin.flush()
    wait_for(share, process)
    share.fill_(0)  # a sender that writes without a pause is in the middle of the share soon
    synchronize(share)
    if how == "is stopped":
        process.send_signal(signal.SIGSTOP)
    elif how == "is dead":
        end(process)
    began = time.perf_counter()
    fenced = transport.fence(peer)
    seconds = time.perf_counter() - began
    if not fenced:
        end(process)
        began = time.monotonic()
        while not transport.fence(peer):
            if time.monotonic() - began > BOUND_S:
                raise TimeoutError(f"the sender is dead, and not fenced in {BOUND_S:g} s")
            time.sleep(0.01)
    torn = bool((share == 0).any())
    share.fill_(OURS)
    synchronize(share)
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
    select.select([], [], [], wait_s)
    foreign = int((share != OURS).sum())
    end(process)
    return Round(how, fenced, seconds, torn, foreign)


def synchronize(share: torch.Tensor) -> None:
    """Wait until what was launched on the share's device has run."""
    if share.is_cuda:
        torch.cuda.synchronize(share.device)


def check(engine: str, args: argparse.Namespace) -> Iterator[Round]:
    """All rounds of one engine, each when it is over."""
    share = torch.zeros(args.share_mb << 20, dtype=torch.uint8, device=args.device)
    transport = open_transport(engine, "127.0.0.1", None)
    try:
        transport.register([MemoryRegion(share.data_ptr(), share.numel())])
        with senders(args.rounds, engine, share) as started:
            for number, process in enumerate(started):
                how = HOWS[number * len(HOWS) // args.rounds]
                yield play(transport, share, process, how, f"peer-{number}", args.wait)
    finally:
        transport.close()


def document(facts: dict[str, str], found: dict[str, list[Round] | str]) -> str:
    """The report in Markdown."""
    head = ["engine", "the sender", "fences", "True at once", "ms, most", "in mid-write", "foreign bytes"]
    rows = []
    for engine, rounds in found.items():
        if isinstance(rounds, str):
            rows.append([engine, rounds, "-", "-", "-", "-", "-"])
            continue
        for how in HOWS:
            some = [one for one in rounds if one.how == how]
            if some:
                counts = [len(some), sum(one.fenced for one in some), f"{max(one.seconds for one in some) * 1e3:.0f}"]
                counts += [sum(one.torn for one in some), sum(one.foreign for one in some)]
                rows.append([engine, how, *map(str, counts)])
    return "\n\n".join(
        [
            f"# Fences of memory on {facts['device']}, {facts['date']}",
            f"torch {facts['torch']}, revision {facts['revision']}; command: `{facts['command']}`",
            report.markdown_table(head, rows),
        ]
    )


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--engines", nargs="+", choices=tuple(LOADERS), default=list(LOADERS), help="those that load are used")
    add("--rounds", type=int, default=9, help="fences of each engine")
    add("--share-mb", type=int, default=1024, help="MiB that a sender fills")
    add("--wait", type=float, default=1.0, help="seconds in which foreign bytes may come")
    add("--out", type=Path, default=Path(os.environ.get("OUT") or report.ROOT / "build" / "gpu"), help="a folder")
    add("--send", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check all engines; print and write what came of them."""
    args = parse_flags(argv)
    if args.send:
        engine, device, start, num_bytes = args.send
        send(engine, device, int(start), int(num_bytes))
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was run")
        return EXIT_NO_DEVICE
    facts = {
        "date": report.today(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_model(),
        "torch": torch.__version__,
        "revision": report.git_revision(),
        "command": report.command_line("benchmarks.gpu.fence_check", argv),
    }
    engines, notes = engines_there(args.engines)
    print("\n".join(notes), flush=True)
    found: dict[str, list[Round] | str] = {}

    def write() -> None:
        figures = {
            name: one if isinstance(one, str) else [*map(dataclasses.asdict, one)] for name, one in found.items()
        }
        report.write_results(
            args.out, "gpu-fence", document(facts, found), {**facts, "notes": notes, "rounds": figures}
        )

    for engine in engines:
        rounds: list[Round] = []
        found[engine] = rounds
        try:
            for one in check(engine, args):
                print(f"{engine}: {one}", flush=True)
                rounds.append(one)
                write()
        except (PdserveError, RuntimeError, TimeoutError) as error:
            found[engine] = f"{type(error).__name__}: {str(error)[:200]}"
            write()
    print("\n" + document(facts, found))
    passed = [not isinstance(one, str) and not sum(each.foreign for each in one) for one in found.values()]
    return 0 if passed and all(passed) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
