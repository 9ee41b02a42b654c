"""Transfer states and the two pure functions, `advance` and `merge_ranks`, through which every state change goes."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class KVPoll(enum.IntEnum):
    """State of a transfer. Ranks merge with MIN: one FAILED rank fails the transfer, else the slowest rank decides."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


TERMINAL = frozenset({KVPoll.FAILED, KVPoll.SUCCESS})


def advance(current: KVPoll, new: KVPoll) -> KVPoll:
    """Return the state after a local event: states only move forward, terminal states stay, FAILED overrides live
    states.
    """
    if current in TERMINAL:
        return current
    return new if new is KVPoll.FAILED else max(current, new)


def merge_ranks(states: Iterable[KVPoll]) -> KVPoll:
    """Return the state of a transfer over all participating ranks: the minimum."""
    return min(states)
