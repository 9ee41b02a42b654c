"""The state of a transfer as a table: two pure functions, and nothing else may move a state."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class KVPoll(enum.IntEnum):
    """Where a transfer stands. The numbers matter: MIN over ranks lets one failure fail all, the slowest lead."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


TERMINAL = frozenset({KVPoll.FAILED, KVPoll.SUCCESS})


def advance(current: KVPoll, new: KVPoll) -> KVPoll:
    """The state after a local event: forward only, the first terminal state wins, FAILED wins from any live state."""
    if current in TERMINAL:
        return current
    return new if new is KVPoll.FAILED else max(current, new)


def merge_ranks(states: Iterable[KVPoll]) -> KVPoll:
    """The state of a transfer over all ranks that take part."""
    return min(states)
