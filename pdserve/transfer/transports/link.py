"""The way to one peer through an engine that can be destroyed. Used by the transports over native engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from pdserve.errors import TransferError


class Destroyable(Protocol):
    """A native engine."""

    def destroy(self) -> None:
        """End it: no byte moves after this."""
        ...


E = TypeVar("E", bound=Destroyable)


class Window:
    """Permits for entries under way to one peer. Thread-safe."""

    def __init__(self, num_permits: int) -> None:
        self._free = num_permits
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def hold(self, num_entries: int) -> Iterator[None]:
        """Hold `num_entries` permits, waiting for them; each holder ends within its own time limit."""
        with self._returned:
            self._returned.wait_for(lambda: self._free >= num_entries)
            self._free -= num_entries
        try:
            yield
        finally:
            with self._returned:
                self._free += num_entries
                self._returned.notify_all()


class Link(Generic[E]):
    """The way to one peer. With an engine of its own (`owned`), the link can be cut, and then no byte moves on it.

    open ── doom ──> doomed ── last borrower leaves, engine destroyed ──> cut
    """

    def __init__(self, engine: E, session: str, *, owned: bool, num_permits: int) -> None:
        self.session = session
        self.window = Window(num_permits)
        self._engine = engine
        self._owned = owned
        self._lock = threading.Lock()
        self._num_borrowers = 0
        self._doomed = False
        self._cut = threading.Event()

    @property
    def doomed(self) -> bool:
        """True once a write on it failed, or it was given up."""
        return self._doomed

    @contextlib.contextmanager
    def borrow(self) -> Iterator[E]:
        """The engine for the length of one batch. Raises TransferError (settled) when the link is doomed."""
        with self._lock:
            if self._doomed:
                raise TransferError(f"the link to {self.session} was given up", code="link_down")
            self._num_borrowers += 1
        try:
            yield self._engine
        finally:
            with self._lock:
                self._num_borrowers -= 1
                last = self._doomed and self._num_borrowers == 0
            if last:
                self._end()

    def doom(self) -> None:
        """Let nobody in any more; cut the link when the last borrower has left. Any thread, any number of times."""
        with self._lock:
            if self._doomed:
                return
            self._doomed = True
            last = self._num_borrowers == 0
        if last:
            self._end()

    def await_cut(self, timeout_s: float) -> bool:
        """True when no byte can move on this link any more; False after `timeout_s`, or when the engine is shared."""
        return self._owned and self._cut.wait(timeout_s)

    def _end(self) -> None:
        if self._owned:
            self._engine.destroy()
        self._cut.set()
