"""A transport between parts of one process whose peers are notified."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from pdserve.transfer.transport import Copy, TransportFacts
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport


class Notes:
    """What an engine has been notified of."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def take(self) -> Sequence[bytes]:
        taken = []
        while not self.came.empty():
            note = self.came.get()
            if isinstance(note, Exception):
                raise note
            taken.append(note)
        return taken


class NotifyingMemory(MemoryTransport):
    """Whose peers are notified at once."""

    facts = TransportFacts(protocol="memory", moves_bytes=True, notifies=True)

    def __init__(self, hub: MemoryHub, peers: dict[str, NotifyingMemory]) -> None:
        super().__init__(hub)
        self.notes = Notes()
        self._peers = peers
        peers[self.address()] = self

    def write_and_notify(self, address: str, copies: Sequence[Copy], note: bytes) -> None:
        self.write(address, copies)
        self._peers[address].notes.came.put(note)

    def take_notifications(self) -> Sequence[bytes]:
        return self.notes.take()
