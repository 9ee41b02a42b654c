"""Aux slots and page digests with the same content on every rank. Created by `engine` in each rank's process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdserve.executor.kv_hasher import KVHasher
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.rank_group import RankGroup
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.checksum import RankDigest


class SharedMetadata(MetadataBuffers):
    """Aux slots of one rank; reads return the content of rank 0's slots."""

    def __init__(self, num_slots: int, log: InputLog, *, shareable: bool = True) -> None:
        super().__init__(num_slots, shareable=shareable)
        self._log = log

    def read(self, slot: int) -> AuxRecord:
        """Return the content of rank 0's slot."""
        self.put_in(slot, self._log.answer(lambda: self.take_out(slot)))
        return super().read(slot)


class GroupHasher:
    """Implements `KVHasher` over `own`, this rank's hasher: returns the digests of all ranks, in rank order."""

    def __init__(self, own: KVHasher, rank_group: RankGroup, log: InputLog) -> None:
        self._own = own
        self._rank_group = rank_group
        self._log = log
        self._numbers = itertools.count()

    def digest(self, pages: Sequence[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`. Raises RankError when a rank is lost."""
        (own,) = self._own.digest(pages, first, num_tokens)
        found = self._rank_group.digested(next(self._numbers), own)
        return self._log.answer(lambda: found)
