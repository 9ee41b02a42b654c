"""Receiving engines: one for each peer, destroyed by `fence`. Used by the transports over native engines.

    peer A ── its own address ──> engine A ──┐
    peer B ── its own address ──> engine B ──┴─> the same pools

A sender that was stopped and continues after the fence retries at the ports that it knew. So no later engine of this
process may listen there (`EnginePorts`): Mooncake's engine accepted 58 MB that way.

Engines over TCP do not authenticate their peers. So their ports drop new connections from all addresses but those of
the peer (`EnginePorts.allow`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from pdserve.base.env import DATA_PORT_FILTER, filters_data_ports
from pdserve.base.hosts import MAX_PEER_ADDRESSES, peer_addresses
from pdserve.base.listeners import allow_sources, drop_connections, listening_sockets
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transports.link import Destroyable

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Destroyable)
Listeners = Mapping[int, int]
"""Ports of listening sockets by inode. Two engines may have one port number on different local addresses."""
MAX_SPENT = 800
"""Most remembered ports; Mooncake takes its two from a range of 2,000."""
MAX_TRIES = 64
UNREACHABLE_HINT = f"If its process runs, it may drop connections from this host: see {DATA_PORT_FILTER}"


class EnginePorts:
    """Listening sockets of engines, and the ports of fenced peers' engines, the newest `MAX_SPENT`. Thread-safe.

    With `filtered` the sockets of a new engine accept connections from no address until `allow`. Else they are open to
    all.
    """

    def __init__(self, *, filtered: bool = False) -> None:
        self._filtered = filtered
        self._lock = threading.Lock()
        self._spent: OrderedDict[int, None] = OrderedDict()

    @classmethod
    def of_tcp_engines(cls, name: str) -> EnginePorts:
        """Return the ports of engines called `name` that do not authenticate peers, and log whether they are filtered.

        Raises:
            ConfigError: the value of `PDSERVE_DATA_PORT_FILTER` is invalid.
        """
        filtered = filters_data_ports()
        sources = "the addresses of its peer only" if filtered else "ALL ADDRESSES"
        log.info("each %s engine accepts connections from %s (%s=%d)", name, sources, DATA_PORT_FILTER, filtered)
        return cls(filtered=filtered)

    def start(self, make: Callable[[], E]) -> tuple[E, Listeners]:
        """Create an engine with `make` that listens at no spent port; return it and the sockets that it opened.

        With a filter, connections that were made in the meantime are shut down. Register memory only after this call.
        The sockets may include a few of another thread that began to listen in the meantime.

        Raises:
            TransferError: each of many engines listened at a spent port, or the process has no free descriptor.
        """
        unfit: list[E] = []  # kept alive so that new engines take other ports
        try:
            with self._lock:
                while len(unfit) < MAX_TRIES:
                    before = listening_sockets()
                    unfit.append(make())
                    opened = {inode: port for inode, port in listening_sockets().items() if inode not in before}
                    if self._spent.keys().isdisjoint(opened.values()):
                        self.allow(opened, ())
                        if self._filtered:
                            drop_connections(opened)
                        return unfit.pop(), opened
        except OSError as error:
            raise TransferError(f"an engine did not start: {error}", code="engine_failed") from error
        finally:
            for engine in unfit:
                engine.destroy()
        raise TransferError("every port that the engine took is known to a fenced peer", code="engine_failed")

    def allow(self, opened: Listeners, addresses: Iterable[str] | None) -> None:
        """Accept new connections at these sockets only from these IP addresses; None: from all."""
        if self._filtered:
            allow_sources(opened, addresses)

    def spend(self, opened: Listeners) -> None:
        """Mark the ports of a fenced peer's engine as spent."""
        with self._lock:
            for port in opened.values():
                self._spent[port] = None
                self._spent.move_to_end(port)
            while len(self._spent) > MAX_SPENT:
                self._spent.popitem(last=False)


@dataclasses.dataclass(eq=False)
class _Opened(Generic[E]):
    """A receiving engine, its listening sockets, and the known addresses of its peer."""

    engine: E
    listeners: Listeners
    sources: dict[str, None] = dataclasses.field(default_factory=dict)


class ReceivingEngines(Generic[E]):
    """One receiving engine for each peer that may write here. Thread-safe; calls for one peer run one at a time.

    `start` creates an engine that listens, `prepare` registers local memory with it; either may take seconds.
    `before_end` gets an engine that a fence is about to destroy. `before_end` and the callback of `visit` must be
    brief, and keep no reference to the engine.
    """

    def __init__(
        self,
        ports: EnginePorts,
        start: Callable[[], E],
        prepare: Callable[[E], None],
        before_end: Callable[[E], None] = lambda engine: None,
    ) -> None:
        self._ports = ports
        self._start = start
        self._prepare = prepare
        self._before_end = before_end
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        """Peers whose engine is being started or destroyed."""
        self._engines: dict[str, _Opened[E]] = {}
        self._undead: set[str] = set()
        """Peers with an engine that could not be destroyed: their writes may land for ever."""
        self._closed = False

    def open(self, peer: str) -> E:
        """Return the engine of `peer`, and start it if there is none.

        Raises:
            TransferError: the engine does not start, or the transport is closed.
        """
        with self._turn(peer):
            with self._changed:
                found = self._engines.get(peer)
            if found is not None:
                return found.engine
            opened = self._make()
            with self._changed:
                if not self._closed:
                    self._engines[peer] = opened
                    return opened.engine
        opened.engine.destroy()
        raise TransferError("the transport is closed", code="closed", retryable=False)

    def allow_sources(self, peer: str, addresses: Iterable[str]) -> None:
        """Also accept connections of `peer` from these addresses; see `peer_addresses`. Unknown peers are ignored."""
        with self._turn(peer):
            with self._changed:
                opened = self._engines.get(peer)
            if opened is None:
                return
            for address in addresses:
                if len(opened.sources) < MAX_PEER_ADDRESSES:
                    opened.sources[address] = None
            self._ports.allow(opened.listeners, peer_addresses(opened.sources))

    def fence(self, peer: str) -> bool:
        """Destroy the engine of `peer`. Returns False when that failed, now or before."""
        with self._turn(peer):
            with self._changed:
                opened = self._engines.pop(peer, None)
                if opened is not None:
                    self._before_end(opened.engine)
            if opened is not None:
                self._ports.spend(opened.listeners)  # before they are free
                try:
                    opened.engine.destroy()
                except Exception:
                    log.exception("the engine that %s writes to could not be destroyed", peer)
                    self._undead.add(peer)
            return peer not in self._undead

    def visit(self, look: Callable[[E], None]) -> None:
        """Call `look` with each engine; none of them is destroyed meanwhile."""
        with self._changed:
            for opened in self._engines.values():
                look(opened.engine)

    def close(self) -> None:
        """Destroy all engines; no more are started."""
        with self._changed:
            self._closed = True
            all_opened = list(self._engines.values())
            self._engines.clear()
        for opened in all_opened:
            opened.engine.destroy()

    def _make(self) -> _Opened[E]:
        try:
            engine, opened = self._ports.start(self._start)
        except ConfigError as error:
            raise TransferError(f"no engine for a peer to write to: {error}", code="engine_failed") from None
        try:
            self._prepare(engine)
        except BaseException:
            engine.destroy()
            raise
        return _Opened(engine, opened)

    @contextlib.contextmanager
    def _turn(self, peer: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: peer not in self._busy)
            self._busy.add(peer)
        try:
            yield
        finally:
            with self._changed:
                self._busy.remove(peer)
                self._changed.notify_all()
