"""A follower's process without a model: joins, agrees, is ready, and obeys until it is told to stop.

Run as `python follower_process.py STORE_FILE NUM_RANKS RANK TOKEN`; says `linked` on stdout.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import FileStore

from pdserve.base.parallel import ParallelShape
from pdserve.memory.page_table import PageTable
from pdserve.ranks.computing import Computer
from pdserve.ranks.follower import Leader
from pdserve.ranks.orders import RankReady
from pdserve.ranks.steps import StepLog
from pdserve.ranks.watch import LinkTimes
from pdserve.sim.hash_lm import HashExecutor, hash_layout


def main(path: str, num_ranks: int, rank: int, token: str) -> None:
    logging.basicConfig(format="%(message)s")
    place = ParallelShape(tp_size=num_ranks).place(rank)
    times = LinkTimes(beat_s=0.1, silent_s=30.0)
    leader = Leader(place, FileStore(path, num_ranks), token, host="127.0.0.1", times=times, timeout_s=30.0)
    print("linked", flush=True)
    num_pages = leader.agree(50)
    table = PageTable(4, 8)
    leader.report(RankReady(num_pages=num_pages, memory=None, samples={}, settle_s=0.0))
    executor = HashExecutor(hash_layout(4), num_pages, table)
    Computer(executor, table, StepLog(range(3)), leader.report).run(leader.orders)
    leader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
