"""A reader of KV events: decodes batches, and applies them in the order of their numbers.

The rules are those of `docs/kv-events.md` ("Following a server"). `KVEventFollower` has no sockets: its owner gives it
batches that were published, and batches of replays. Used by the router, and by tests as the reader of a server.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

from pdserve.observe.kv_events import (
    AllBlocksCleared,
    ArrayAllBlocksCleared,
    ArrayBlockRemoved,
    ArrayBlockStored,
    BlockRemoved,
    BlockStored,
    Event,
)

REPLAY_END = -1
"""Sequence number of the message that ends a replay."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayBlockStored | ArrayBlockRemoved | ArrayAllBlocksCleared]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    """A batch whose events are not decoded."""

    ts: float
    events: list[msgspec.Raw]


_RAW = msgspec.msgpack.Decoder(_RawBatch)
_MAPS = msgspec.msgpack.Decoder(_Batch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)


def decode_batch(payload: bytes) -> tuple[float, Sequence[Event]]:
    """Return the time of a batch in seconds since 1970, and its events, which are maps or arrays on the wire.

    Raises:
        msgspec.DecodeError: the payload is no batch.
    """
    raw = _RAW.decode(payload)
    if raw.events and _is_array(bytes(raw.events[0])[0]):
        arrays = _ARRAYS.decode(payload)
        return arrays.ts, arrays.events
    maps = _MAPS.decode(payload)
    return maps.ts, maps.events


def _is_array(first: int) -> bool:
    """Whether a msgpack value with this first byte is an array."""
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


class Taken(enum.Enum):
    """What `KVEventFollower` did with a batch."""

    APPLIED = enum.auto()
    KNOWN = enum.auto()
    """It was applied before, from a replay."""
    GAP = enum.auto()
    """Nothing: batches are missing before it, from `next_seq` on."""
    RESTARTED = enum.auto()
    """Applied as the first batch of a restarted server."""


class KVEventFollower:
    """Applies the batches of one replica in order.

    `apply` gets each event; applying one twice must change nothing. `clear` forgets everything, before the events of a
    restarted server.
    """

    def __init__(self, apply: Callable[[Event], None], clear: Callable[[], None]) -> None:
        self._apply, self._clear = apply, clear
        self._last_live: int | None = None
        self.next_seq: int | None = None
        """Number of the next batch; None before the first one."""
        self.sent_at: float | None = None
        """Time at which the last applied batch was made, in seconds since 1970 by the server's clock."""

    def published(self, seq: int, payload: bytes) -> Taken:
        """Take a batch that was published. Give it again after a replay if it is a `GAP`.

        Raises:
            msgspec.DecodeError: the payload is no batch; nothing has changed.
        """
        restarted = self._last_live is not None and seq <= self._last_live
        if restarted:
            self._clear()
            self.next_seq = None
        taken = self._take(seq, payload)
        if taken is not Taken.GAP:
            self._last_live = seq
        return Taken.RESTARTED if restarted else taken

    def replayed(self, seq: int, payload: bytes) -> Taken:
        """Take a batch of a replay.

        Raises:
            msgspec.DecodeError: the payload is no batch; nothing has changed.
        """
        return self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> Taken:
        if self.next_seq is not None and seq < self.next_seq:
            return Taken.KNOWN
        sent_at, events = decode_batch(payload)
        if self.next_seq not in (None, seq) and not (events and isinstance(events[0], AllBlocksCleared)):
            return Taken.GAP
        for event in events:
            self._apply(event)
        self.next_seq, self.sent_at = seq + 1, sent_at
        return Taken.APPLIED
