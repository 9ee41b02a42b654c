"""Where the loop hears of the world: any thread posts, the scheduler thread drains once a step and may sleep until
there is something. What arrives at a file descriptor, such as a socket, it takes itself: a thread that did nothing but
pass it on would cost a wake-up and a turn with the interpreter's lock for each message.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Woken:
    """Posted to wake the reader alone, which sees by itself what for."""


class EventSource(Protocol[T_co]):
    """Something that events arrive at by themselves. Only the reader's thread calls it."""

    def fileno(self) -> int:
        """Becomes readable when something has arrived since `ready` said no; may do so for nothing."""
        ...

    def ready(self) -> bool:
        """Whether `take` would return something."""
        ...

    def take(self) -> Sequence[T_co]:
        """What has arrived, oldest first. Never waits."""
        ...


class _Alarm:
    """Wakes the reader from `poll`."""

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._poller = select.poll()
        self.watch(self._file)

    def watch(self, file: int) -> None:
        self._poller.register(file, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self._file, 1)

    def sleep(self, timeout_s: float) -> None:
        """Until somebody rings, or something arrives at a watched file."""
        if any(file == self._file for file, _ in self._poller.poll(math.ceil(timeout_s * 1000))):
            os.eventfd_read(self._file)


class Mailbox(Generic[T]):
    """An unbounded thread-safe queue with one reader. Events of one poster, or one source, keep their order."""

    def __init__(self) -> None:
        self._events: deque[T] = deque()
        self._sources: list[EventSource[T]] = []
        self._alarm: _Alarm | None = None
        self._asleep = False

    def attach(self, source: EventSource[T]) -> None:
        """Look at `source`, too. The reader's thread; `source` stays open for as long as anybody drains or waits."""
        self._sources.append(source)
        self._open_alarm().watch(source.fileno())

    def post(self, event: T) -> None:
        """Add `event` and wake the reader. Any thread; never blocks for long."""
        self._events.append(event)
        if self._asleep and self._alarm is not None:
            self._alarm.ring()

    def drain(self) -> list[T]:
        """Take everything there is: what sources hold, then what was posted, oldest first. The reader's; never waits.

        A source's come first, because what was posted may say that no more will come of it.
        """
        num_posted = len(self._events)  # no more: others go on posting
        events = [event for source in self._sources for event in source.take()]
        return events + [self._events.popleft() for _ in range(num_posted)]

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is an event, at most `timeout_s` seconds. True when there is one; takes nothing."""
        alarm = self._open_alarm()
        deadline = time.monotonic() + timeout_s
        while not self._holds_something():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._asleep = True
            if not self._events:  # else it was posted by somebody who saw us awake
                alarm.sleep(left_s)
            self._asleep = False
        return True

    def _holds_something(self) -> bool:
        return bool(self._events) or any(source.ready() for source in self._sources)

    def _open_alarm(self) -> _Alarm:
        if self._alarm is None:
            self._alarm = _Alarm()
        return self._alarm
