"""Waiting for a condition, with a deadline: never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdserve.base.mailbox import Mailbox
from pdserve.transfer.events import TransferEvent

T = TypeVar("T")
DEADLINE_S = 20.0
PAUSE_S = 0.005
"""Seconds between two looks at a condition."""


def wait_until(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S, *, pause_s: float = PAUSE_S
) -> None:
    """Poll until `condition()` is true. `what` says in words what is awaited."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause_s)


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition()` is true, while the event loop goes on."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"the condition is not true within {deadline_s:g} s"
        await asyncio.sleep(PAUSE_S)


async def seen_until(
    look: Callable[[], Awaitable[T]], good: Callable[[T], object], deadline_s: float = DEADLINE_S
) -> T:
    """Look until what is seen is good; return it."""
    end = time.monotonic() + deadline_s
    while not good(seen := await look()):
        assert time.monotonic() < end, f"not good within {deadline_s:g} s: {seen}"
        await asyncio.sleep(PAUSE_S)
    return seen


async def settle(turns: int = 50) -> None:
    """Run `turns` turns of the event loop, so that every task that can run does."""
    for _ in range(turns):
        await asyncio.sleep(0)


def events_of(mailbox: Mailbox[TransferEvent], count: int) -> list[TransferEvent]:
    """The next `count` events."""
    events: list[TransferEvent] = []
    end = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < end, f"{len(events)} of {count} events: {events}"
        mailbox.wait(0.1)
        events += mailbox.drain()
    assert len(events) == count
    return events
