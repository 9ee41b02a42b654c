"""Answers of all ranks to a question that the input log gives them in the same turn. Scheduler thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve.ranks.input_log import InputLog, RankGroup


class RankReports(Protocol):
    """Gathers what the ranks of a replica report. All ranks call it equally often, in the same order."""

    def gather(self, own: bytes) -> Sequence[bytes]:
        """Return the reports of all ranks, in rank order, on rank 0; on other ranks only `own`, without waiting."""
        ...

    def first_trouble(self, own: str | None) -> str | None:
        """Return why a rank cannot go on, the same on all ranks; None: all can. `own`: why this one cannot."""
        ...


class OwnReport:
    """Implements `RankReports` for a replica of one rank."""

    def gather(self, own: bytes) -> Sequence[bytes]:
        """See `RankReports`."""
        return (own,)

    def first_trouble(self, own: str | None) -> str | None:
        """See `RankReports`."""
        return own


class GroupReports:
    """Implements `RankReports` for several ranks. Raises RankError when a rank is lost."""

    def __init__(self, rank_group: RankGroup, log: InputLog) -> None:
        self._rank_group, self._log = rank_group, log
        self._numbers = itertools.count()

    def gather(self, own: bytes) -> Sequence[bytes]:
        """See `RankReports`."""
        return self._rank_group.reported(next(self._numbers), own)

    def first_trouble(self, own: str | None) -> str | None:
        """See `RankReports`."""
        reports = self.gather(msgspec.msgpack.encode(own))
        found = self._log.answer(lambda: _first(reports))
        return msgspec.msgpack.decode(found, type=str | None)


def _first(reports: Sequence[bytes]) -> bytes:
    """Return the first report of trouble, with its rank."""
    for rank, report in enumerate(reports):
        trouble = msgspec.msgpack.decode(report, type=str | None)
        if trouble is not None:
            return msgspec.msgpack.encode(trouble if len(reports) == 1 else f"rank {rank}: {trouble}")
    return msgspec.msgpack.encode(None)
