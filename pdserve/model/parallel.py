"""What a model needs of its replica: its place, and the few ways in which ranks exchange tensors.

Made once by each rank at start-up (`open_parallel`, or `SingleRank` where nothing is split); called by families and by
the executor, by all ranks of a group in the same order. `TorchParallel` is `torch.distributed`: gloo on CPU, NCCL on
CUDA. A process has one replica's rank, as torch has one default group.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pdserve.base.parallel import SINGLE, ParallelShape, Place
from pdserve.errors import ConfigError, RankError

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 300.0
"""Longer than any step: a rank that computes is no rank that is gone."""

Backend = Literal["gloo", "nccl"]


class Parallel(Protocol):
    """One rank among those of its replica. Raises RankError where another rank is gone or too late."""

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the tensor ranks of this stage; `x` itself is overwritten with it."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """`[n, ...]` of each tensor rank, one behind the other: `[tp_size * n, ...]` on all of them."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Deal rows out: the first `send[0]` of `x` go to tensor rank 0, and so on.

        Returns the `receive[0]` rows of tensor rank 0, then those of rank 1, and so on: `[sum(receive), ...]`.
        """
        ...

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """`[S, share]` of each tensor rank, side by side: `[S, vocab_size]` on tensor rank 0, None on the others."""
        ...

    def send(self, x: Tensor) -> None:
        """Begin to send `x` to the same tensor rank of the next stage; it must not change before `flush`."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same tensor rank of the stage before has sent."""
        ...

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        ...

    def share_tokens(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` on every rank of the replica with those of the sampling rank."""
        ...

    def close(self) -> None:
        """Leave the replica."""
        ...


def is_sampler(place: Place) -> bool:
    """Whether this is the one rank that has all logits: tensor rank 0 of the last stage."""
    return place.is_last_stage and place.tp_rank == 0


class SingleRank:
    """Implements `Parallel` for a replica of one rank."""

    place: Place = SINGLE

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Parallel.all_reduce`."""
        return x

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Parallel.all_gather`."""
        return part

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Parallel.all_to_all`."""
        assert list(send) == list(receive) == [len(x)], (send, receive, x.shape)
        return x

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """See `Parallel.gather_logits`."""
        assert part.shape[1] == vocab_size, (part.shape, vocab_size)
        return part

    def send(self, x: Tensor) -> None:
        """See `Parallel.send`; there is no next stage."""
        raise AssertionError("one rank has nobody to send to")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Parallel.receive`; there is no stage before."""
        raise AssertionError("one rank has nobody to receive from")

    def flush(self) -> None:
        """See `Parallel.flush`."""

    def share_tokens(self, tensors: Sequence[Tensor]) -> None:
        """See `Parallel.share_tokens`."""

    def close(self) -> None:
        """See `Parallel.close`."""


class TorchParallel:
    """Implements `Parallel` over `torch.distributed`. Made by `open_parallel`, which says what `fixed_order` is."""

    def __init__(self, place: Place, timeout: datetime.timedelta, fixed_order: bool) -> None:
        self.place = place
        self._gathers_to_add = fixed_order and place.shape.tp_size > 2
        shape = place.shape
        self._tensor_ranks = _group([_ranks_of_stage(shape, stage) for stage in range(shape.pp_size)], place, timeout)
        edges = [
            [shape.tp_size * stage + tensor, shape.tp_size * (stage + 1) + tensor]
            for stage in range(shape.pp_size - 1)
            for tensor in range(shape.tp_size)
        ]
        groups = [dist.new_group(edge, timeout=timeout) for edge in edges]
        self._next = self._previous = None
        for edge, group in zip(edges, groups, strict=True):
            if edge[0] == place.rank:
                self._next = group
            elif edge[1] == place.rank:
                self._previous = group
        self._sampler = _ranks_of_stage(shape, shape.pp_size - 1)[0]
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Parallel.all_reduce`."""
        if self._gathers_to_add:
            parts = self.all_gather(x).view(-1, *x.shape)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            return x.copy_(total)
        if self.place.shape.tp_size > 1:
            with _with_others("adding up"):
                dist.all_reduce(x, group=self._tensor_ranks)
        return x

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Parallel.all_gather`."""
        tp_size = self.place.shape.tp_size
        if tp_size == 1:
            return part
        whole = part.new_empty(tp_size * part.shape[0], *part.shape[1:])
        with _with_others("gathering"):
            dist.all_gather(list(whole.chunk(tp_size)), part.contiguous(), group=self._tensor_ranks)
        return whole

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Parallel.all_to_all`."""
        received = x.new_empty(sum(receive), *x.shape[1:])
        with _with_others("dealing rows out"):
            dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=self._tensor_ranks)
        return received

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """See `Parallel.gather_logits`."""
        tp_size = self.place.shape.tp_size
        if tp_size == 1:
            return part[:, :vocab_size]
        part, root = part.contiguous(), self.place.rank - self.place.tp_rank
        parts = None if self.place.tp_rank else [torch.empty_like(part) for _ in range(tp_size)]
        with _with_others("gathering logits"):
            dist.gather(part, parts, dst=root, group=self._tensor_ranks)
        return None if parts is None else torch.cat(parts, 1)[:, :vocab_size].contiguous()

    def send(self, x: Tensor) -> None:
        """See `Parallel.send`."""
        assert not self.place.is_last_stage, "the last stage has nobody to send to"
        x = x.contiguous()
        with _with_others("sending hidden states"):
            work = dist.isend(x, self.place.rank + self.place.shape.tp_size, group=self._next)
        assert work is not None, "this rank is of its edge"
        self._sending.append((work, x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Parallel.receive`."""
        assert not self.place.is_first_stage, "the first stage has nobody to receive from"
        x = torch.empty(shape, dtype=dtype, device=device)
        with _with_others("receiving hidden states"):
            dist.recv(x, self.place.rank - self.place.shape.tp_size, group=self._previous)
        return x

    def flush(self) -> None:
        """See `Parallel.flush`."""
        with _with_others("sending hidden states"):
            while self._sending:
                self._sending.pop(0)[0].wait()

    def share_tokens(self, tensors: Sequence[Tensor]) -> None:
        """See `Parallel.share_tokens`."""
        with _with_others("sharing tokens"):
            for tensor in tensors:
                dist.broadcast(tensor, self._sampler)

    def close(self) -> None:
        """See `Parallel.close`."""
        if dist.is_initialized():
            dist.destroy_process_group()


def open_parallel(
    place: Place,
    store: Store,
    device: torch.device,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
    fixed_order: bool = False,
) -> Parallel:
    """Meet the other ranks of the replica over `store`; returns when all are there.

    `host` is the address of this host that the other ranks reach, 127.0.0.1 when all are on one. The device says the
    backend: NCCL on CUDA, gloo elsewhere. With `fixed_order` a sum over ranks has the same bits wherever it stands in a
    tensor: backends add each part of one in another order, which shows from three ranks on.

    Raises:
        ConfigError: no network interface has the address `host`.
        RankError: a rank did not come in time, or left.
    """
    if place.shape.num_ranks == 1:
        return SingleRank()
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME", _interface_of(host))
    timeout = datetime.timedelta(seconds=timeout_s)
    with _with_others("meeting"):
        dist.init_process_group(
            backend,
            store=PrefixStore("parallel", store),
            rank=place.rank,
            world_size=place.shape.num_ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        joined = TorchParallel(place, timeout, fixed_order)
    _LOG.info("rank %d of %d is one of %s's", place.rank, place.shape.num_ranks, backend)
    return joined


@contextlib.contextmanager
def _with_others(what: str) -> Iterator[None]:
    """Torch's errors as ours; `what` says what the ranks were about."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankError(f"{what}: another rank of this replica is gone, or too late: {reason}") from error


def _ranks_of_stage(shape: ParallelShape, stage: int) -> list[int]:
    """The tensor ranks of a pipeline stage."""
    return list(range(shape.tp_size * stage, shape.tp_size * (stage + 1)))


def _group(members: list[list[int]], place: Place, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """This rank's group among `members`, all of which every rank makes in the same order."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    return next(group for ranks, group in zip(members, groups, strict=True) if place.rank in ranks)


def _interface_of(host: str) -> str:
    """The name of the network interface with an address of `host`. Raises ConfigError."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"{host} is no address of this host: {error}", field="disaggregation_host") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    raise ConfigError(f"no network interface of this host has the address {host}", field="disaggregation_host")
