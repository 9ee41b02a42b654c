"""Waiting for threads with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.base.mailbox import Mailbox
from pdserve.transfer.events import (
    TransferEvent,
)

DEADLINE_S = 10.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def events_of(mailbox: Mailbox[TransferEvent], count: int) -> list[TransferEvent]:
    """The next `count` events."""
    events: list[TransferEvent] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events: {events}"
        mailbox.wait(0.1)
        events += mailbox.drain()
    assert len(events) == count
    return events
