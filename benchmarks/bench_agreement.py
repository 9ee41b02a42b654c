"""How a replica's ranks come to agree that a transfer has ended, and what that costs everything else.

    python -m benchmarks.bench_agreement --ranks 2 4 --write

Real processes. Each transfer ends on every rank at a moment of its own, within 2 ms. `on news` is what servers do: one
MIN over gloo for all that is pending, begun in a turn of the leader's loop when a rank has news, and taken when it is
done (`ranks/consensus.py`). `every step` is the usual way: all ranks reduce what is pending at the beginning of each
step, and wait for each other. Both with a step of the model between two looks, and without. Measured is how late the
leader knows, what CPU time all ranks take meanwhile, and for how long the leader's loop stands still while another rank
is stopped for a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.report import Run, add_write_flags, footer, markdown_table, spread_of
from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.base.parallel import ParallelShape
from pdserve.model.parallel import Parallel
from pdserve.model.torch_parallel import open_parallel
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.input_log import FollowerLog, InputLog, LeaderLog
from pdserve.ranks.rank0_link import Rank0Link, Stopped
from pdserve.ranks.rendezvous import open_store
from pdserve.ranks.worker_links import meet_followers
from pdserve.scheduler.input_source import FollowerInputSource, LeaderInputSource
from pdserve.scheduler.scheduler import Event, InputSource
from pdserve.transfer.events import CopyDone, CopyJob
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey

Way = Literal["on news", "every step"]
HOST, TOKEN, TIMEOUT_S = "127.0.0.1", "agreement", 60.0
START_S, GAP_S, JITTER_S, STOPPED_S = 0.3, 0.01, 0.002, 1.0
WAIT_S = 0.05
NOTES = (
    "A rank's transfers end 10 ms after each other. Not in the figures: what else a scheduler does in a step.",
    "A transfer that the stopped rank has a part in is late by that second either way; a halt concerns all others.",
    "With nothing else to do, who reduces in every step does it again and again, and who waits for news sleeps.",
)


def ends_at(began: float, rank: int, transfer: int) -> float:
    """When it ends on that rank; all processes of a host have the same monotonic clock."""
    return began + transfer * GAP_S + random.Random(f"{rank} {transfer}").uniform(0, JITTER_S)


def sleep_until(moment: float) -> None:
    """Return then, or at once."""
    time.sleep(max(0.0, moment - time.monotonic()))


def reduce_until_agreed(
    began: float, rank: int, transfers: int, step_s: float, look: Callable[[], None]
) -> list[float]:
    """A rank's loop: polls what is pending, agrees, steps. When it knew of each transfer's end."""
    known: list[float] = []
    while len(known) < transfers:
        ended = time.monotonic() >= ends_at(began, rank, len(known))
        state = torch.tensor([KVPoll.SUCCESS if ended else KVPoll.TRANSFERRING], dtype=torch.uint8)
        dist.all_reduce(state, dist.ReduceOp.MIN)
        look()
        if int(state[0]) == KVPoll.SUCCESS:
            known.append(time.monotonic())
        if step_s:
            time.sleep(step_s)
    return known


class TimedCopies:
    """`CopyEngine` of a rank whose copies end when `ends_at` says so."""

    drain_timeout_s, fence_drain_timeout_s, notifies = 0.0, 0.0, False

    def __init__(self, rank: int, began: float, transfers: int, post: Callable[[CopyDone], None]) -> None:
        self._args = (rank, began, transfers, post)
        self._submitted = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`."""
        return True

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        self._submitted.release()

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        raise AssertionError("it notifies of nothing")

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """See `CopyEngine`."""

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""

    def _run(self) -> None:
        rank, began, transfers, post = self._args
        for transfer in range(transfers):
            self._submitted.acquire()
            sleep_until(ends_at(began, rank, transfer))
            post(CopyDone(MemoryKey(transfer, 1, "bench"), rank, None, settled=True, write_s=0.0))


class Loop:
    """A rank's loop as a server has it, but for all that has nothing to do with copies."""

    def __init__(self, ranks: int, input_source: InputSource, copies: RankCopies, log: InputLog, began: float) -> None:
        self._ranks = ranks
        self._input_source = input_source
        self._copies = copies
        self._log = log
        self._began = began

    def run(self, transfers: int, step_s: float, look: Callable[[], None]) -> list[float]:
        """When it knew of each transfer's end, on all ranks."""
        known: list[float] = []
        ended: Counter[int] = Counter()
        submitted = 0
        while len(known) < transfers:
            for event in self._input_source.drain():
                if isinstance(event, Woken):
                    continue
                assert isinstance(event, CopyDone), event
                ended[event.key.room] += 1
                known += [time.monotonic()] * (ended[event.key.room] == self._ranks)
            due = min(transfers, int((self._log.now() - self._began) / GAP_S) + 2)
            for transfer in range(submitted, due):
                for rank in range(self._ranks):
                    self._copies.submit(CopyJob(MemoryKey(transfer, 1, "bench"), rank, "", "", (), 1, rank=rank))
            submitted = max(submitted, due)
            look()
            if step_s:
                time.sleep(step_s)
            else:
                self._input_source.wait(min(WAIT_S, GAP_S))
        return known


@contextlib.contextmanager
def joined(store: Store, rank: int, ranks: int) -> Iterator[Parallel]:
    """This rank among the others, over gloo."""
    coord = ParallelShape(tp_size=ranks).coord(rank)
    parallel = open_parallel(coord, PrefixStore("gloo", store), torch.device("cpu"), timeout_s=TIMEOUT_S)
    yield parallel
    parallel.close()


def follow(way: Way, path: str, rank: int, ranks: int, transfers: int, step_s: float) -> None:
    """The process of a rank but the first."""
    torch.set_num_threads(1)
    store = open_store(f"file://{path}", rank, ranks)
    leader = Rank0Link(ParallelShape(tp_size=ranks).coord(rank), store, TOKEN, host=HOST)
    with joined(store, rank, ranks) as parallel, contextlib.suppress(Stopped):
        began = float(store.get("began"))
        if way == "every step":
            reduce_until_agreed(began, rank, transfers, step_s, lambda: None)
        else:
            copies = RankCopies(rank)
            log = FollowerLog(f"rank {rank}", began, leader.next_entry)
            consensus = Consensus(copies, parallel.begin_least, log, leader.root_cause, lambda: None, in_step=True)
            copies.drive(TimedCopies(rank, began, transfers, copies.post), 0.0, 0.0, leader.report)
            Loop(ranks, FollowerInputSource(log, consensus), copies, log, began).run(transfers, step_s, lambda: None)
        leader.wait_stop()
    leader.close()


class Looks:
    """When the leader's loop looked; `longest_s` is the longest time between two."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.longest_s = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self.longest_s = max(self.longest_s, now - self._last)
        self._last = now


def stop_for_a_while(pid: int, after_s: float) -> None:
    """Stop the process for a second then. Returns at once."""
    for delay_s, number in ((after_s, signal.SIGSTOP), (after_s + STOPPED_S, signal.SIGCONT)):
        timer = threading.Timer(delay_s, os.kill, (pid, number))
        timer.daemon = True
        timer.start()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU time of them all."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def lead(way: Way, ranks: int, transfers: int, step_s: float, stop: bool) -> dict[str, float]:
    """Lead ranks in processes of their own through so many transfers; with `stop`, one is stopped in the middle."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "store")
        args = [(way, path, rank, ranks, transfers, step_s) for rank in range(1, ranks)]
        children = [get_context("spawn").Process(target=follow, args=each, daemon=True) for each in args]
        for child in children:
            child.start()
        store = open_store(f"file://{path}", 0, ranks)
        followers = meet_followers(ParallelShape(tp_size=ranks), store, TOKEN, host=HOST)
        with joined(store, 0, ranks) as parallel:
            looks, mailbox, copies = Looks(), Mailbox[Event](), RankCopies(0)
            log = LeaderLog(MonotonicClock(), followers.broadcast)
            consensus = Consensus(
                copies, parallel.begin_least, log, followers.root_cause, lambda: mailbox.post(Woken()), in_step=True
            )
            followers.on_copied(consensus.heard)
            processes = [psutil.Process(), *(psutil.Process(child.pid) for child in children)]
            cpu_s, began = cpu_seconds(processes), time.monotonic() + START_S
            store.set("began", str(began))
            if stop:
                pid = children[-1].pid
                assert pid is not None
                stop_for_a_while(pid, START_S + transfers * GAP_S / 2)
            if way == "every step":
                known = reduce_until_agreed(began, 0, transfers, step_s, looks)
            else:
                copies.drive(TimedCopies(0, began, transfers, copies.post), 0.0, 0.0, consensus.heard)
                loop = Loop(ranks, LeaderInputSource(mailbox, log, consensus), copies, log, began)
                known = loop.run(transfers, step_s, looks)
            took_s, cpu_s = time.monotonic() - began, cpu_seconds(processes) - cpu_s
            followers.close()
            for child in children:
                child.join(TIMEOUT_S)
    ends = [max(ends_at(began, rank, each) for rank in range(ranks)) for each in range(transfers)]
    late = sorted(knew - end for knew, end in zip(known, ends, strict=True))
    return {
        "late_us": late[len(late) // 2] * 1e6,
        "late_p99_us": late[int(len(late) * 0.99)] * 1e6,
        "cpu_ms_per_s": cpu_s / took_s * 1e3,
        "longest_look_ms": looks.longest_s * 1e3,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--transfers", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    add_write_flags(parser, "agreement")
    args = parser.parse_args(argv)
    run = Run("agreement", argv)
    torch.set_num_threads(1)
    ways: list[tuple[Way, float]] = [(way, step_s) for step_s in (0.0, 0.005) for way in ("on news", "every step")]
    rows, found = [], []
    for ranks in args.ranks:
        for way, step_s in ways:
            turns = [lead(way, ranks, args.transfers, step_s, False) for _ in range(args.rounds)]
            stopped = [lead(way, ranks, args.transfers, step_s, True) for _ in range(args.rounds)]
            late, p99, cpu = (
                spread_of([turn[name] for turn in turns]) for name in ("late_us", "late_p99_us", "cpu_ms_per_s")
            )
            stood = spread_of([turn["longest_look_ms"] for turn in stopped])
            what = f"{way}, {f'steps of {step_s * 1e3:.0f} ms' if step_s else 'nothing else to do'}"
            rows.append([what, str(ranks), late.show(), p99.show(), cpu.show(), stood.show()])
            found.append({"way": way, "ranks": ranks, "step_s": step_s, "turns": turns, "stopped": stopped})
    header = ["agreed by", "ranks", "known after, us", "p99, us", "CPU ms a second, all ranks", "longest halt, ms"]
    text = f"# Ranks that agree on the end of transfers\n\n{markdown_table(header, rows)}\n\n"
    facts = run.facts(found=found)
    run.publish(args, f"{text}{footer(facts, NOTES)}\n", facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
