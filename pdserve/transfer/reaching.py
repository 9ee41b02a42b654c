"""Whether our ranks can write to a peer's, known before a prompt is computed for it. Called by `SendSide`.

Asked once for each peer, when the first receiver of it comes: engines connect meanwhile. A way that was reached stays
so until the peer is gone; a copy that finds it broken connects again, or fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pdserve.protocol.failure import Failure
from pdserve.transfer.chunk import Way
from pdserve.transfer.events import CopyEngine, PeerConnected
from pdserve.transfer.peers import Peer
from pdserve.transfer.wire import Hello


@dataclasses.dataclass(frozen=True, slots=True)
class ReachResult:
    """All our ranks reach the peer (`failure` None), or one cannot."""

    peer: str
    failure: Failure | None


class Connecting:
    """Ways to all peers; `ways` are those to one."""

    def __init__(self, engine: CopyEngine, ways: Callable[[Hello], Sequence[Way]]) -> None:
        self._engine = engine
        self._ways = ways
        self._missing: dict[str, set[Way]] = {}
        """By peer, for as long as it is known: those that have not been reached yet."""
        self._whose: dict[Way, str] = {}

    def begin(self, peer: Peer) -> bool:
        """Whether all our ranks reach `peer`, which has shaken hands. When not, a `ReachResult` follows."""
        assert peer.hello is not None
        if peer.instance not in self._missing:
            missing = {way for way in self._ways(peer.hello) if not self._engine.reach(*way)}
            self._missing[peer.instance] = missing
            self._whose |= dict.fromkeys(missing, peer.instance)
        return not self._missing[peer.instance]

    def take(self, event: PeerConnected) -> ReachResult | None:
        """One way was reached, or cannot be; the verdict if that makes one. After a failure it is asked for anew."""
        way = (event.rank, event.transport_address)
        peer = self._whose.pop(way, None)
        missing = None if peer is None else self._missing.get(peer)
        if peer is None or missing is None:
            return None
        missing.discard(way)
        if event.failure is not None:
            self.forget(peer)
            return ReachResult(peer, event.failure)
        return None if missing else ReachResult(peer, None)

    def forget(self, peer: str) -> None:
        """The peer is gone, or one of its ranks out of reach."""
        for way in self._missing.pop(peer, ()):
            self._whose.pop(way, None)
