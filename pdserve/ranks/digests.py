"""Hashes of the pages of every rank, asked for by the leader. Made by the composition root of the leader's process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pdserve.executor.kv_hasher import KVHasher
from pdserve.ranks.followers import Followers
from pdserve.ranks.orders import Digest, pack
from pdserve.transfer.kv_digest import RankDigest


class GroupHasher:
    """Implements `KVHasher` over `own`, the leader's, and those of `followers`. Waits for them: they obey in order."""

    def __init__(self, own: KVHasher, followers: Followers) -> None:
        self._own = own
        self._followers = followers
        self._numbers = itertools.count()

    def digest(self, pages: Sequence[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`. Raises RankError when a rank is lost."""
        number = next(self._numbers)
        self._followers.order(Digest(number, pack(pages), first, num_tokens))
        own = self._own.digest(pages, first, num_tokens)
        return (*own, *self._followers.wait_digests(number))
