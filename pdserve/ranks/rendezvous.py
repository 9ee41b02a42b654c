"""Where the ranks of a replica first meet: a torch store, in a file on one host, over TCP on several.

Opened by each rank's process at start-up; the leader serves the TCP store.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from pdserve.errors import ConfigError

MEET_TIMEOUT_S = 600.0
"""How long ranks wait for each other: one of them may still be loading its program from a slow disk."""
FILE, TCP = "file://", "tcp://"


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
