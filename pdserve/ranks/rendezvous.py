"""Where the ranks of a replica first meet: a torch store, in a file on one host, over TCP on several.

With DP attention it is where the ranks of all replicas do. Opened by each rank's process at start-up; the first leader
serves the TCP store.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pdserve.base.listeners import close_port
from pdserve.base.parallel import RankCoord, WidePlace
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError

MEET_TIMEOUT_S = 600.0
"""How long ranks wait for each other: one of them may still be loading its program from a slow disk."""
FILE, TCP = "file://", "tcp://"


def open_stores(rendezvous: str, parallel: ParallelConfig, place: RankCoord, dp_rank: int) -> tuple[Store, Store]:
    """The store of all ranks that compute together, and that of the rank's own replica, which may be the same.

    Raises like `open_store`.
    """
    wide = WidePlace(place, parallel.num_sharing, dp_rank if parallel.num_sharing > 1 else 0)
    store = open_store(rendezvous, wide.rank, wide.num_ranks)
    return store, store if wide.dp_size == 1 else PrefixStore(f"replica/{dp_rank}", store)


def open_store(rendezvous: str, rank: int, num_ranks: int, timeout_s: float = MEET_TIMEOUT_S) -> Store:
    """The store at `file://PATH` or `tcp://HOST:PORT`; rank 0 makes it.

    Raises:
        ConfigError: the address of the TCP store cannot be listened on, or nobody answers there in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if rendezvous.startswith(FILE):
        store = FileStore(rendezvous.removeprefix(FILE), num_ranks)
        store.set_timeout(timeout)
        return store
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    try:
        return TCPStore(
            host.strip("[]"), int(port), num_ranks, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        message = f"rank {rank} cannot meet the others at {host}:{port}: {reason}"
        raise ConfigError(message, field="dist_init_addr") from error


def close_rendezvous(store: Store) -> None:
    """Take no more connections; those of ranks stay. To be called when all ranks have met. Nothing happens in a process
    that does not serve the TCP store.
    """
    if isinstance(store, TCPStore):
        close_port(store.port)
