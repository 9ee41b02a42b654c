"""A trainer in a process of its own: it meets servers in a group of torch.distributed, and broadcasts tensors.

    python -m tests.trainer PORT WORLD_SIZE GROUP CHECKPOINT NAME...

It makes its group as trainers for SGLang do. It reads a line from standard input before it broadcasts, and ends after
the last tensor.
"""

from __future__ import annotations

import datetime
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = datetime.timedelta(seconds=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str]) -> None:
    port, world_size, name, checkpoint, *names = arguments
    tensors = load_file(Path(checkpoint, "model.safetensors"))
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, int(world_size), timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=c10d.GroupName(name),
        timeout=TIMEOUT,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    print("met", flush=True)
    sys.stdin.readline()
    for each in names:
        dist.broadcast(tensors[each].to(torch.bfloat16), src=0, group=group)
    print("sent", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
