"""Where threads report to the loop: any thread posts, the scheduler thread drains once a step and may sleep until a
post.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded thread-safe queue with one reader. Events of one poster keep their order."""

    def __init__(self) -> None:
        self._events: deque[T] = deque()
        self._ready = threading.Condition()

    def post(self, event: T) -> None:
        """Add `event` and wake the reader. Any thread; never blocks for long."""
        with self._ready:
            self._events.append(event)
            self._ready.notify()

    def drain(self) -> list[T]:
        """Take everything posted so far, oldest first. The reader's thread; never waits."""
        with self._ready:
            events = list(self._events)
            self._events.clear()
        return events

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is an event, at most `timeout_s` seconds. True when there is one; takes nothing."""
        with self._ready:
            return self._ready.wait_for(lambda: bool(self._events), timeout_s)
