"""`Parallel` over `torch.distributed`: gloo on CPU, NCCL on CUDA.

A process is a rank of one replica, because torch has one default process group. That group is the replica's. With DP
attention it has the ranks of all replicas, which share their feed-forward layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pdserve.base.listeners import ports_closed_afterwards
from pdserve.base.parallel import DpRankCoord, ParallelShape, RankCoord
from pdserve.errors import ConfigError, RankError
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.dp_attention_experts import AllReplicas
from pdserve.model.parallel import Arrival, Parallel, SingleRank, StageRanks

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 300.0
"""Default timeout of a collective, in seconds. Longer than any step, so that a computing rank is not taken for lost."""

_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""Torch's variable: gloo connects two ranks at their first exchange instead of at start."""

Backend = Literal["gloo", "nccl"]
_SHARING = "broadcast of tokens"


class TorchParallel:
    """Implements `Parallel` over `torch.distributed`. Made by `open_parallel`, which documents `fixed_order`."""

    def __init__(self, coord: DpRankCoord, timeout: datetime.timedelta, fixed_order: bool) -> None:
        self.coord = own = coord.in_replica
        self._gathers_to_add = fixed_order and own.shape.tp_size > 2
        self._first = coord.first_rank
        replicas = [_ranks_of_replica(coord, dp_rank) for dp_rank in range(coord.dp_size)]
        stages = [stage for replica in replicas for stage in _stages(replica, own.shape)]
        self._tensor_ranks = _group(stages, coord, timeout)
        edges = [list(edge) for replica in replicas for edge in _edges(replica, own.shape)]
        groups = [dist.new_group(edge, timeout=timeout) for edge in edges]
        self._next = self._previous = None
        for edge, group in zip(edges, groups, strict=True):
            if edge[0] == coord.rank:
                self._next = group
            elif edge[1] == coord.rank:
                self._previous = group
        self._replica = None if coord.dp_size == 1 else _group(replicas, coord, timeout)
        self._schedulers = None if own.shape.num_ranks == 1 else _group(replicas, coord, timeout, "gloo")
        self._sampler = _stages(replicas[coord.dp_rank], own.shape)[-1][0]
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._max_sending = own.shape.pp_size**2  # upper bound of the micro-batches in flight
        self._dp_attention_group: DPAttentionGroup = StageRanks(self)
        if coord.dp_size > 1:
            on_host = dist.get_backend() == "gloo"
            numbers = None if on_host else dist.new_group(backend="gloo", timeout=timeout)
            self._dp_attention_group = AllReplicas(coord, self.all_gather, _with_others, numbers)

    @property
    def dp_attention_group(self) -> DPAttentionGroup:
        """See `Parallel.dp_attention_group`."""
        return self._dp_attention_group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Parallel.all_reduce`."""
        if self._gathers_to_add:
            parts = self.all_gather(x).view(-1, *x.shape)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            return x.copy_(total)
        if self.coord.shape.tp_size > 1:
            with _with_others("all_reduce"):
                dist.all_reduce(x, group=self._tensor_ranks)
        return x

    def all_gather(self, part: Tensor) -> Tensor:
        """See `Parallel.all_gather`."""
        tp_size = self.coord.shape.tp_size
        if tp_size == 1:
            return part
        whole = part.new_empty(tp_size * part.shape[0], *part.shape[1:])
        with _with_others("all_gather"):
            dist.all_gather(list(whole.chunk(tp_size)), part.contiguous(), group=self._tensor_ranks)
        return whole

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Parallel.all_to_all`."""
        received = x.new_empty(sum(receive), *x.shape[1:])
        with _with_others("all_to_all"):
            dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=self._tensor_ranks)
        return received

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor | None:
        """See `Parallel.gather_logits`."""
        tp_size = self.coord.shape.tp_size
        if tp_size == 1:
            return part[:, :vocab_size]
        part, root = part.contiguous(), self._first + self.coord.rank - self.coord.tp_rank
        parts = None if self.coord.tp_rank else [torch.empty_like(part) for _ in range(tp_size)]
        with _with_others("gather of logits"):
            dist.gather(part, parts, dst=root, group=self._tensor_ranks)
        return None if parts is None else torch.cat(parts, 1)[:, :vocab_size].contiguous()

    def send(self, x: Tensor) -> None:
        """See `Parallel.send`."""
        assert not self.coord.is_last_stage, "the last stage has no next stage"
        x = x.contiguous()
        with _with_others("send of hidden states"):
            work = dist.isend(x, self._first + self.coord.rank + self.coord.shape.tp_size, group=self._next)
            while len(self._sending) >= self._max_sending:
                self._sending.popleft()[0].wait()
        assert work is not None, "this rank belongs to its edge's group"
        self._sending.append((work, x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Parallel.receive`."""
        assert not self.coord.is_first_stage, "the first stage has no previous stage"
        x = torch.empty(shape, dtype=dtype, device=device)
        with _with_others("receive of hidden states"):
            dist.recv(x, self._first + self.coord.rank - self.coord.shape.tp_size, group=self._previous)
        return x

    def share_tokens(self, tensors: Sequence[Tensor]) -> Arrival:
        """See `Parallel.share_tokens`."""
        if self.coord.shape.num_ranks == 1:
            return _Works((), _SHARING)
        with _with_others(_SHARING):
            works = [dist.broadcast(x, self._sampler, group=self._replica, async_op=True) for x in tensors]
        return _Works(tuple(work for work in works if work is not None), _SHARING)

    def begin_least(self, values: Tensor, then: Callable[[], None]) -> Arrival:
        """See `Parallel.begin_least`."""
        with _with_others("consensus"):
            work = dist.all_reduce(values, dist.ReduceOp.MIN, group=self._schedulers, async_op=True)
        assert work is not None, "this rank belongs to its replica's group"
        work.get_future().add_done_callback(lambda _: then())
        return _Works((work,), "consensus")

    def close(self) -> None:
        """See `Parallel.close`."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class _Works:
    """Implements `Arrival`; `what` names the operation in errors."""

    works: tuple[dist.Work, ...]
    what: str

    def wait(self) -> None:
        """See `Arrival.wait`."""
        with _with_others(self.what):
            for work in self.works:
                work.wait()


def open_parallel(
    coord: RankCoord | DpRankCoord,
    store: Store,
    device: torch.device,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
    fixed_order: bool = False,
) -> Parallel:
    """Join the other ranks over `store` and return once all have joined.

    The group has the replica's ranks, or with DP attention the ranks of all replicas. `host` is this host's address as
    the other ranks reach it; 127.0.0.1 when all ranks are on one host. The device decides the backend: NCCL on CUDA,
    gloo elsewhere. `timeout_s` is in seconds.

    With `fixed_order` a sum over ranks has the same bits at every position of a tensor. Backends add each part of a
    tensor in a different order, which changes bits from three ranks on. Once all ranks have joined, gloo's ports are
    closed to other processes.

    Raises:
        ConfigError: no network interface has the address `host`.
        RankError: a rank timed out or left.
    """
    coord = DpRankCoord(coord) if isinstance(coord, RankCoord) else coord
    if coord.num_ranks == 1:
        return SingleRank()
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    interface = _interface_of(host)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # with NCCL, gloo still carries host tensors
        os.environ.setdefault(variable, interface)
    timeout = datetime.timedelta(seconds=timeout_s)
    makes_all_now = backend == "gloo" and _LAZY_GLOO not in os.environ  # NCCL connects later
    with _with_others("rendezvous"), ports_closed_afterwards() if makes_all_now else contextlib.nullcontext():
        dist.init_process_group(
            backend,
            store=PrefixStore("parallel", store),
            rank=coord.rank,
            world_size=coord.num_ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        joined = TorchParallel(coord, timeout, fixed_order)
    _LOG.info("rank %d of %d joined the %s process group", coord.rank, coord.num_ranks, backend)
    return joined


@contextlib.contextmanager
def _with_others(what: str) -> Iterator[None]:
    """Convert torch's RuntimeError to RankError; `what` names the operation."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankError(f"{what}: another rank of this server is gone or timed out: {reason}") from error


def _ranks_of_replica(coord: DpRankCoord, dp_rank: int) -> list[int]:
    """Return all ranks of replica `dp_rank`."""
    num_ranks = coord.in_replica.shape.num_ranks
    return list(range(dp_rank * num_ranks, (dp_rank + 1) * num_ranks))


def _stages(replica: list[int], shape: ParallelShape) -> list[list[int]]:
    """Return the tensor ranks of each pipeline stage."""
    tp_size = shape.tp_size
    return [replica[tp_size * stage : tp_size * (stage + 1)] for stage in range(shape.pp_size)]


def _edges(replica: list[int], shape: ParallelShape) -> list[tuple[int, int]]:
    """Return pairs of ranks; the first of a pair sends hidden states to the second."""
    return list(zip(replica, replica[shape.tp_size :], strict=False))


def _group(
    members: list[list[int]], coord: DpRankCoord, timeout: datetime.timedelta, backend: Backend | None = None
) -> dist.ProcessGroup:
    """Create all groups of `members`, in the same order on every rank, and return this rank's group.

    `backend` None selects the device's default backend.
    """
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members]
    return next(group for ranks, group in zip(members, groups, strict=True) if coord.rank in ranks)


def _interface_of(host: str) -> str:
    """Return the name of the network interface with an address of `host`. Raises ConfigError."""
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"{host} is not an address of this host: {error}", field="disaggregation_host") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in wanted for address in addresses):
            return name
    raise ConfigError(f"no network interface of this host has the address {host}", field="disaggregation_host")
