"""How a replica's ranks come to agree that a transfer has ended: by reports to the leader, or by a reduction a step.

    python -m benchmarks.bench_agreement --ranks 2 4 --write

Real processes. Each transfer ends on every rank at a moment of its own, within 2 ms. `reports`: each rank tells the
leader, over the links that a server has (`ranks/links.py`). `reduction`: every rank takes part in a MIN over a gloo
group, again and again until the result says that all have ended. Both with a step of the model between two looks, and
without. Measured is how late the leader knows, what CPU time all ranks take meanwhile, and for how long the leader's
loop stands still while another rank is stopped for a second.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.report import Run, add_write_flags, footer, markdown_table, spread_of
from pdserve.base.parallel import ParallelShape
from pdserve.ranks.follower import Leader
from pdserve.ranks.followers import Followers, meet_followers
from pdserve.ranks.orders import CopyReport, NotesReport
from pdserve.ranks.rendezvous import open_store
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import Key

Way = Literal["reports", "reduction"]
HOST, TOKEN, TIMEOUT_S = "127.0.0.1", "agreement", 60.0
START_S, GAP_S, JITTER_S, STOPPED_S = 0.3, 0.01, 0.002, 1.0
LOOK_S = 0.001
NOTES = (
    "A rank's transfers end 10 ms after each other. Not in the figures: what else a scheduler does in a step.",
    "A transfer that the stopped rank has a part in is late by that second either way; a halt concerns all others.",
    "With nothing else to do, who reduces does it again and again, and who hears reports sleeps.",
)


def ends_at(began: float, rank: int, transfer: int) -> float:
    """When it ends on that rank; all processes of a host have the same monotonic clock."""
    return began + transfer * GAP_S + random.Random(f"{rank} {transfer}").uniform(0, JITTER_S)


def sleep_until(moment: float) -> None:
    """Return then, or at once."""
    time.sleep(max(0.0, moment - time.monotonic()))


def join_group(store: Store, rank: int, ranks: int) -> None:
    """The gloo group that reduces."""
    store, timeout = PrefixStore("gloo", store), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)


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


def follow(way: Way, path: str, rank: int, ranks: int, transfers: int, step_s: float) -> None:
    """The process of a rank but the first."""
    torch.set_num_threads(1)
    place = ParallelShape(tp_size=ranks).place(rank)
    store = open_store(f"file://{path}", rank, ranks)
    leader = Leader(place, store, TOKEN, host=HOST)
    if way == "reduction":
        join_group(store, rank, ranks)
    began = float(store.get("began"))
    if way == "reduction":
        reduce_until_agreed(began, rank, transfers, step_s, lambda: None)
    else:
        for transfer in range(transfers):
            sleep_until(ends_at(began, rank, transfer))
            leader.report(NotesReport(Key(transfer, 1, "bench"), 0))
    leader.orders.get(timeout=TIMEOUT_S)


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


class Reports:
    """What followers have told the leader. Its loop waits for them, or looks once in a step."""

    def __init__(self, followers: Followers, ranks: int) -> None:
        self._num_others = ranks - 1
        self._arrived: Counter[int] = Counter()
        self._changed = threading.Condition()
        followers.on_copied(self._take)

    def lead(self, began: float, transfers: int, step_s: float, look: Callable[[], None]) -> list[float]:
        """When it knew of each transfer's end, here and everywhere."""
        known: list[float] = []
        while len(known) < transfers:
            own_end = ends_at(began, 0, len(known))
            with self._changed:
                ended = self._arrived[len(known)] == self._num_others and time.monotonic() >= own_end
                if not (ended or step_s):
                    left_s = own_end - time.monotonic()
                    self._changed.wait(min(LOOK_S, left_s) if left_s > 0 else LOOK_S)
            look()
            if ended:
                known.append(time.monotonic())
            if step_s:
                time.sleep(step_s)
        return known

    def _take(self, rank: int, report: CopyReport | NotesReport) -> None:
        assert isinstance(report, NotesReport), report
        with self._changed:
            self._arrived[report.key.room] += 1
            self._changed.notify()


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
        reports, looks = Reports(followers, ranks), Looks()
        if way == "reduction":
            join_group(store, 0, ranks)
        processes = [psutil.Process(), *(psutil.Process(child.pid) for child in children)]
        cpu_s, began = cpu_seconds(processes), time.monotonic() + START_S
        store.set("began", str(began))
        if stop:
            pid = children[-1].pid
            assert pid is not None
            stop_for_a_while(pid, START_S + transfers * GAP_S / 2)
        if way == "reduction":
            known = reduce_until_agreed(began, 0, transfers, step_s, looks)
        else:
            known = reports.lead(began, transfers, step_s, looks)
        took_s, cpu_s = time.monotonic() - began, cpu_seconds(processes) - cpu_s
        followers.close()
        for child in children:
            child.join(TIMEOUT_S)
        if way == "reduction":
            dist.destroy_process_group()
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
    ways: list[tuple[Way, float]] = [(way, step_s) for step_s in (0.0, 0.005) for way in ("reports", "reduction")]
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
