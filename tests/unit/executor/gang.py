"""Processes that are the ranks of one replica after another, so that torch is imported once for many tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from pdserve.base.parallel import DpRankCoord, ParallelShape
from pdserve.base.process import die_with_parent
from pdserve.model.parallel import Parallel
from pdserve.model.torch_parallel import open_parallel

T = TypeVar("T")
ANSWER_S = 120.0
"""A rank that has not answered by then never will."""
COLLECTIVE_S = 60.0


@dataclasses.dataclass(frozen=True)
class _Task:
    """Call `function(parallel, *args)` as the rank at `coord`; `key` keeps this replica's meeting apart."""

    function: Callable[..., Any]
    coord: DpRankCoord
    port: int
    key: str
    args: tuple[Any, ...]
    fixed_order: bool
    timeout_s: float


class Gang:
    """`num_ranks` processes. Functions and what they take and give must be picklable."""

    def __init__(self, links: list[Connection]) -> None:
        self._links = links
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._keys = itertools.count()

    def run(
        self,
        shape: ParallelShape,
        function: Callable[..., T],
        *args: Any,
        fixed_order: bool = False,
        num_sharing: int = 1,
        timeout_s: float = COLLECTIVE_S,
    ) -> list[T]:
        """What `function(parallel, *args)` returns on each rank of a replica of that shape, or on those of
        `num_sharing` replicas that share their feed-forward layers.

        `fixed_order` and `timeout_s` are those of `open_parallel`.
        """
        key = str(next(self._keys))
        coords = [
            DpRankCoord(shape.coord(rank), num_sharing, replica)
            for replica in range(num_sharing)
            for rank in range(shape.num_ranks)
        ]
        for coord in coords:
            self._links[coord.rank].send(_Task(function, coord, self._store.port, key, args, fixed_order, timeout_s))
        answers = [self._answer(coord.rank) for coord in coords]
        failed = [answer for answer in answers if isinstance(answer, _Failed)]
        assert not failed, "\n".join(answer.text for answer in failed)
        return answers

    def _answer(self, rank: int) -> Any:
        assert self._links[rank].poll(ANSWER_S), f"rank {rank} does not answer"
        return self._links[rank].recv()


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A rank's exception."""

    text: str


@contextlib.contextmanager
def open_gang(num_ranks: int) -> Iterator[Gang]:
    """`num_ranks` processes, ended with the context."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that a dead rank is the end of its link
    try:
        yield Gang([ours for ours, _ in pipes])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(link: Connection, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    torch.set_num_threads(1)
    while True:
        task: _Task = link.recv()
        try:
            link.send(_run(task))
        except Exception:
            link.send(_Failed(f"rank {task.coord.rank}: {traceback.format_exc()}"))


def _run(task: _Task) -> Any:
    store = TCPStore("127.0.0.1", task.port, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S))
    parallel: Parallel = open_parallel(
        task.coord,
        PrefixStore(task.key, store),
        torch.device("cpu"),
        timeout_s=task.timeout_s,
        fixed_order=task.fixed_order,
    )
    try:
        return task.function(parallel, *task.args)
    finally:
        parallel.close()
