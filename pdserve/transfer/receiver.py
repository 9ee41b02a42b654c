"""The receiving half of the manager: finds the prefill server, publishes pages, and hears how a key has ended.

Published pages outlive the request: see `published`.
"""

from __future__ import annotations

import itertools
from collections import Counter

from pdserve.base.clock import Clock
from pdserve.errors import ProtocolError, RequestError
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import Address, CopyEngine, Notified
from pdserve.transfer.peers import Peer
from pdserve.transfer.remote_writable import RemoteWritable, RemoteWritablePages, WritableEnd
from pdserve.transfer.room import ReceiveRoom
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import Abort, Done, Ended, MemoryKey, Meta, Told, TransferStats


class ReceiveSide:
    """All rooms that this process receives for. Called by `KVManager` and `KVReceiver`."""

    def __init__(
        self,
        instance: str,
        sessions: Sessions,
        engine: CopyEngine,
        clock: Clock,
        bootstrap_timeout_s: float,
        waiting_timeout_s: float,
        page_tokens: int,
        num_ranks: int,
        counters: Counter[str],
    ) -> None:
        self._instance = instance
        self._sessions = sessions
        self._clock = clock
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._waiting_timeout_s = waiting_timeout_s
        self._page_tokens = page_tokens
        self._counters = counters
        self._attempts = itertools.count(1)
        self.rooms: dict[int, ReceiveRoom] = {}
        self.published = RemoteWritablePages(engine, clock, num_ranks)
        self.moved: dict[int, None] = {}
        self._seeking: dict[Address, dict[int, ReceiveRoom]] = {}
        """Rooms without a session, in the order of their opening."""
        self._expecting: dict[int, ReceiveRoom] = {}
        """Rooms whose pages are published, in that order."""

    # ------------------------------------------------------------------ called by receivers

    def open(
        self, room: int, address: Address, digest: str, fake: bool, *, takes_logprobs: bool = False
    ) -> ReceiveRoom:
        """A request will receive from the prefill server behind `address`; `takes_logprobs`: those of its prompt, too.

        Raises:
            RequestError: 409 when the room is live.
        """
        if room in self.rooms:
            raise RequestError(
                f"bootstrap_room {room} is in use", field="bootstrap_room", status=409, code="room_in_use"
            )
        key = MemoryKey(room, next(self._attempts), self._instance)
        record = ReceiveRoom(
            room=room,
            digest=digest,
            opened_at=self._clock.now(),
            moved=self.moved,
            address=address,
            key=key,
            takes_logprobs=takes_logprobs,
            fake=fake,
        )
        self.rooms[room] = record
        if fake:
            record.move(KVPoll.WAITING_FOR_INPUT)
        else:
            self._seeking.setdefault(address, {})[room] = record
            self._dial(address)
        return record

    def publish(self, room: ReceiveRoom, leases: tuple[Lease, ...], aux: Lease, cached_tokens: int = 0) -> None:
        """Tell the sender where to write; from here on the pages have the hold `remote`. One lease per layout group.

        The first `cached_tokens` tokens, whole pages, are here already. Their pages may be shared with other requests,
        so the sender does not learn their addresses.
        """
        num_cached, rest = divmod(cached_tokens, self._page_tokens)
        assert rest == 0 and num_cached <= min(len(lease.pages) for lease in leases), cached_tokens
        if room.fake:
            room.move(KVPoll.SUCCESS)
            return
        peer = None if room.peer is None else self._sessions.peer(room.peer)
        if room.state is not KVPoll.WAITING_FOR_INPUT or peer is None:
            return
        room.published_at = self._clock.now()
        self._expecting.pop(room.room, None)
        self._expecting[room.room] = room
        pages = tuple(tuple(lease.pages[num_cached:]) for lease in leases)
        num_told = sum(map(len, pages)) + len(aux.pages)
        self.published.add(
            RemoteWritable(room.key, peer.instance, peer.receiver, (*leases, aux), num_told, cached_tokens)
        )
        meta = Meta(
            key=room.key,
            cached_tokens=cached_tokens,
            pages=pages,
            aux_slot=aux.pages[0],
            prompt_digest=room.digest,
        )
        self._sessions.send(peer, meta)

    def fail(self, room: ReceiveRoom, failure: Failure) -> None:
        """End a room from our side and tell the sender."""
        if not room.fail(failure):
            return
        peer = None if room.peer is None else self._sessions.peer(room.peer)
        if peer is not None and not room.fake:
            self._sessions.send(peer, Abort(key=room.key, failure=failure, prompt_digest=room.digest))

    def close(self, room: ReceiveRoom) -> None:
        """The request has ended and let go of the room; its pages may stay published."""
        if self.rooms.get(room.room) is room:
            del self.rooms[room.room]
            self.moved.pop(room.room, None)
            self._expecting.pop(room.room, None)
            seeking = self._seeking.get(room.address, {})
            if seeking.pop(room.room, None) is not None and not seeking:
                del self._seeking[room.address]

    # ------------------------------------------------------------------ what comes in

    def on_peer_ready(self, peer: Peer) -> None:
        """A session is up: rooms that waited for it go on."""
        for address in peer.addresses:
            self._dial(address)

    def on_dial_failed(self, address: Address, failure: Failure) -> None:
        """No session with that prefill server can be had."""
        self._counters["bootstrap_failed"] += 1
        for room in self._seeking.pop(address, {}).values():
            room.fail(failure)

    def sends(self, peer: Peer, key: MemoryKey) -> bool:
        """True when the pages of `key` were given in the session with `peer`; no other can say how it ended."""
        entry = self.published.get(key)
        return entry is not None and entry.peer == peer.instance and entry.receiver == peer.receiver

    def on_done(self, done: Done) -> None:
        """The sender has seen every byte of a key land."""
        self._conclude(self.published.end(done))

    def on_notified(self, event: Notified) -> None:
        """What the engine of one of our ranks says of a key."""
        self._conclude(self.published.notified(event))

    def on_told(self, peer: Peer, told: Told) -> None:
        """A part of the prompt's log probabilities; perhaps behind Done, perhaps again."""
        room = self.rooms.get(told.key.room)
        if room is None or room.key != told.key or room.peer != peer.instance or not room.takes_logprobs:
            return
        try:
            told.part.check()
        except ProtocolError as error:
            self.fail(room, Failure(code="bad_metadata", message=str(error), origin=peer.endpoint, status=502))
            return
        room.told[told.index] = told.part
        self._look_whether_told(room)

    def on_ended(self, ended: Ended) -> None:
        """The sender gave a key up; perhaps it still writes."""
        room = self.rooms.get(ended.key.room)
        if room is not None and room.key == ended.key and not self._follow(room, ended):
            room.fail(ended.failure)
        if ended.quiesced:
            self._conclude(self.published.end(ended))

    def on_peer_lost(self, peer: Peer, failure: Failure) -> None:
        """The sender is silent, or the session with it has ended. It may still write."""
        for room in self.rooms.values():
            if room.peer == peer.instance:
                self.fail(room, failure)

    def on_fenced(self, receiver: str) -> None:
        """Nothing can land any more of what was published in the session with these receiving engines."""
        self.published.fenced(receiver)

    def on_quiesced(self, receiver: str) -> None:
        """The sender has promised to write no more in the session with these receiving engines."""
        self.published.quiesced(receiver)

    def tick(self) -> None:
        """Time-outs, and pages of dead peers whose last bytes have drained. Looks at the oldest rooms only."""
        now = self._clock.now()
        for address, seeking in list(self._seeking.items()):
            for room in list(itertools.takewhile(lambda r: self._seeks_too_long(r, now), seeking.values())):
                del seeking[room.room]
                message = f"no session with the prefill server within {self._bootstrap_timeout_s:g} s"
                self.fail(room, Failure(code="bootstrap_timeout", message=message, status=504))
            if seeking:
                self._dial(address)
            else:
                self._seeking.pop(address, None)
        for room in list(itertools.takewhile(lambda r: self._waits_too_long(r, now), self._expecting.values())):
            del self._expecting[room.room]
            message = f"the KV cache did not come within {self._waiting_timeout_s:g} s"
            self.fail(room, Failure(code="transfer_timeout", message=message, status=504))
        self.published.tick()

    @property
    def num_remote_pages(self) -> int:
        """KV pages and aux slots that a peer may write to."""
        return sum(entry.num_pages for entry in self.published)

    # ------------------------------------------------------------------ inside

    def _conclude(self, ending: WritableEnd | None) -> None:
        """A key has ended; what that means for whoever waits for it."""
        if ending is None:
            return
        done = ending.word if isinstance(ending.word, Done) else None
        if done is not None:
            self._count(ending.entry.peer, done.stats if ending.landed else None)
        elif isinstance(ending.word, Ended) and ending.word.moved_to is None:
            self._count(ending.entry.peer, None)
        self._counters["transfers_unconfirmed"] += not ending.landed
        room = self.rooms.get(ending.entry.key.room)
        if done is None or room is None or room.key != done.key:
            return
        if ending.landed:
            room.stats, room.num_told = done.stats, done.num_told
            self._look_whether_told(room)
        else:
            message = "prefill says that all KV cache was written, but the transfer engine does not say so here"
            room.fail(Failure(code="transfer_unconfirmed", message=message, status=502))

    def _look_whether_told(self, room: ReceiveRoom) -> None:
        if room.is_told:
            room.move(KVPoll.SUCCESS)

    def _dial(self, address: Address) -> None:
        """Ask for sessions; where there is one, the rooms that want it go on.

        Room % dp_size is a room's replica, until one says which other one has it.
        """
        replicas = self._sessions.dial(address)
        seeking = self._seeking.get(address, {})
        if not any(replicas):
            return
        for room in list(seeking.values()):
            peer = replicas[(room.room if room.replica is None else room.replica) % len(replicas)]
            if peer is not None:
                del seeking[room.room]
                room.peer = peer.instance
                room.move(KVPoll.WAITING_FOR_INPUT)
                if room.unheard is not None:
                    entry, room.unheard = room.unheard, None
                    self.publish(room, entry.leases[:-1], entry.leases[-1], entry.cached_tokens)
        if not seeking:
            self._seeking.pop(address, None)

    def _follow(self, room: ReceiveRoom, ended: Ended) -> bool:
        """Give the same pages to the replica that has the request, under a new key, as soon as there is a session with
        it; False when that cannot be.
        """
        replicas = self._sessions.dial(room.address)
        entry = self.published.get(room.key)
        if ended.moved_to is None or entry is None or room.state is not KVPoll.WAITING_FOR_INPUT:
            return False
        if replicas and ended.moved_to >= len(replicas):
            return False
        self.published.release(room.key)  # the request itself keeps them
        room.key = MemoryKey(room.room, next(self._attempts), self._instance)
        room.peer, room.replica, room.unheard = None, ended.moved_to, entry
        self._seeking.setdefault(room.address, {})[room.room] = room
        self._dial(room.address)
        return True

    def _count(self, instance: str, stats: TransferStats | None) -> None:
        """How a key that was given to a peer has ended; None: not well."""
        peer = self._sessions.peer(instance)
        if peer is None:
            return
        peer.received.ended(well=stats is not None)
        if stats is not None:
            peer.received.moved(stats.num_bytes, stats.write_s, self._clock.now())

    def _seeks_too_long(self, room: ReceiveRoom, now: float) -> bool:
        return now - room.opened_at > self._bootstrap_timeout_s

    def _waits_too_long(self, room: ReceiveRoom, now: float) -> bool:
        return room.published_at is not None and now - room.published_at > self._waiting_timeout_s
