"""A follower's process without a model: joins, agrees, is ready, and waits until it is told to stop.

Run as `python follower_process.py STORE_FILE NUM_RANKS RANK TOKEN`; says `linked` on stdout.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from torch.distributed import FileStore

from pdserve.base.parallel import ParallelShape
from pdserve.ranks.failure_detector import LinkTimes
from pdserve.ranks.messages import RankReady
from pdserve.ranks.rank0_link import Rank0Link, Stopped


def main(path: str, num_ranks: int, rank: int, token: str) -> None:
    logging.basicConfig(format="%(message)s")
    coord = ParallelShape(tp_size=num_ranks).coord(rank)
    times = LinkTimes(beat_s=0.1, silent_s=30.0)
    leader = Rank0Link(coord, FileStore(path, num_ranks), token, host="127.0.0.1", times=times, timeout_s=30.0)
    print("linked", flush=True)
    leader.agree(50)
    leader.report(RankReady(facts={}, memory=None, samples={}, drain_timeout_s=0.0, fence_drain_timeout_s=0.0))
    with contextlib.suppress(Stopped):
        leader.wait_begin()
    leader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
