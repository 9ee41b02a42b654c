"""Process groups of torch.distributed in which a trainer sends weights to the ranks of this server.

    join      rendezvous at the trainer's address, with all members, on a thread
    receive   broadcasts of rank 0, the trainer, one for each tensor, in order
    leave     forgets the group

The names of the stores are those of SGLang's `init_custom_process_group`, which trainers call, too. All waits end after
the group's timeout. A group whose broadcast fails is left: its members no longer agree on what comes next.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from pdserve.errors import ModelError
from pdserve.protocol.weights import SentTensor

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SOURCE = 0
"""Rank of the trainer in the group."""


@dataclasses.dataclass(frozen=True)
class GroupAddress:
    """Where a group meets. `rank`: this process's in the group of `world_size`. `timeout_s`: of each wait."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    timeout_s: float


class WeightsGroups:
    """The groups of one rank, by name. One call at a time, on any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, tuple[c10d.ProcessGroup, str]] = {}
        """By name: the group and its backend."""

    def join(self, address: GroupAddress) -> None:
        """Meet the other members.

        Raises:
            ModelError: the name is taken, the backend does not fit the device, or not all members come in time.
        """
        if address.name in self._groups:
            raise ModelError(f"group_name: this server is in a group {address.name!r} already; destroy it first")
        if address.backend == "nccl" and self._device.type != "cuda":
            raise ModelError("backend: nccl needs a GPU, and this server computes on a CPU; use gloo")
        timeout = datetime.timedelta(seconds=address.timeout_s)
        try:
            found = rendezvous(
                f"tcp://{address.host}:{address.port}", address.rank, address.world_size, timeout=timeout
            )
            store, rank, world_size = next(found)
            store.set_timeout(timeout)
            prefixed = c10d.PrefixStore(address.name, store)
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(address.backend),
                prefixed,
                group_name=c10d.GroupName(address.name),
                timeout=timeout,
            )
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{address.host}:{address.port}"
            raise ModelError(
                f"master_address: the group {address.name!r} did not meet at {where} within {address.timeout_s:g} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
        self._groups[address.name] = group, address.backend
        log.info("joined the group %r as rank %d of %d", address.name, rank, world_size)

    def receive(self, name: str, sent: Sequence[SentTensor]) -> dict[str, Tensor]:
        """Receive tensors from the trainer, whole, by name.

        Raises:
            ModelError: there is no such group, memory is short, or a broadcast fails; the group is then left.
        """
        if name not in self._groups:
            raise ModelError(f"group_name: this server is in no group {name!r}")
        group, backend = self._groups[name]
        device = self._device if backend == "nccl" else torch.device("cpu")
        found: dict[str, Tensor] = {}
        for one in sent:
            try:
                tensor = torch.empty(one.shape, dtype=DTYPES[one.dtype], device=device)
                options = c10d.BroadcastOptions()
                options.rootRank, options.rootTensor = _SOURCE, 0
                group.broadcast([tensor], options).wait()
            except RuntimeError as error:
                self.leave(name)
                raise ModelError(
                    f"{one.name} did not arrive, so the group {name!r} is left: {str(error).splitlines()[0]}"
                ) from error
            found[one.name] = tensor
        return found

    def leave(self, name: str) -> None:
        """Forget a group. Raises ModelError when there is none."""
        if name not in self._groups:
            raise ModelError(f"group_name: this server is in no group {name!r}")
        group, _ = self._groups.pop(name)
        try:
            c10d.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError) as error:
            log.warning("the group %r does not close: %s", name, error)
