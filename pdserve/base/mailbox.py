"""The scheduler loop's event queue. Any thread posts; the scheduler thread drains it once a step, or sleeps on it.

The scheduler thread itself reads file descriptors such as sockets. A forwarding thread would cost a wake-up and a GIL
switch for each message.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Woken:
    """An event without content that only wakes the reader."""


class EventSource(Protocol[T_co]):
    """A file descriptor from which the reader takes events. Called by the reader's thread only."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when an event arrives after `ready` returned False; may wake spuriously."""
        ...

    def ready(self) -> bool:
        """Whether `take` would return something."""
        ...

    def take(self) -> Sequence[T_co]:
        """Return the events that have arrived, oldest first. Never blocks."""
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

    def ignore(self, file: int) -> None:
        self._poller.unregister(file)

    def ring(self) -> None:
        os.eventfd_write(self._file, 1)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until `ring` is called, a watched descriptor becomes readable, or `timeout_s` seconds pass."""
        if any(file == self._file for file, _ in self._poller.poll(math.ceil(timeout_s * 1000))):
            os.eventfd_read(self._file)


class Mailbox(Generic[T]):
    """An unbounded thread-safe queue with one reader. Events of one thread, or of one source, keep their order."""

    def __init__(self) -> None:
        self._events: deque[T] = deque()
        self._sources: list[EventSource[T]] = []
        self._alarm: _Alarm | None = None
        self._asleep = False

    def attach(self, source: EventSource[T]) -> None:
        """Also read events from `source`. Reader's thread only; `source` must stay open while the mailbox is in use."""
        self._sources.append(source)
        self._open_alarm().watch(source.fileno())

    def detach(self, source: EventSource[T]) -> None:
        """Stop to read events from `source`, which may be closed then. Reader's thread only."""
        self._sources.remove(source)
        self._open_alarm().ignore(source.fileno())

    def discard(self, is_stale: Callable[[T], bool]) -> None:
        """Remove the posted events for which `is_stale` is true; the others keep their order. Reader's thread only."""
        kept = [event for event in (self._events.popleft() for _ in range(len(self._events))) if not is_stale(event)]
        self._events.extendleft(reversed(kept))  # in front of what other threads have posted meanwhile

    def post(self, event: T) -> None:
        """Append `event` and wake the reader. Any thread; never waits for the reader."""
        self._events.append(event)
        if self._asleep and self._alarm is not None:
            self._alarm.ring()

    def drain(self) -> list[T]:
        """Take all events: those of sources, then posted ones, oldest first. Reader's thread only; never blocks.

        Events of sources come first, because a posted event may say that its source has ended.
        """
        num_posted = len(self._events)  # a bound, because other threads keep posting
        events = [event for source in self._sources for event in source.take()]
        return events + [self._events.popleft() for _ in range(num_posted)]

    def wait(self, timeout_s: float) -> bool:
        """Sleep until an event is available, at most `timeout_s` seconds. True if one is available; takes none."""
        alarm = self._open_alarm()
        deadline = time.monotonic() + timeout_s
        while not self._holds_something():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._asleep = True
            if not self._events:  # an event posted before `_asleep` was set did not ring the alarm
                alarm.sleep(left_s)
            self._asleep = False
        return True

    def _holds_something(self) -> bool:
        return bool(self._events) or any(source.ready() for source in self._sources)

    def _open_alarm(self) -> _Alarm:
        if self._alarm is None:
            self._alarm = _Alarm()
        return self._alarm
