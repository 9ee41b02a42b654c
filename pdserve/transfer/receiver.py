"""Receiving side of `KVManager`: finds the prefill server, publishes pages, and handles the end of a key.

Published pages outlive the request: see `room`.
"""

from __future__ import annotations

import itertools
from collections import Counter

from pdserve.base.clock import Clock
from pdserve.errors import ProtocolError, RequestError
from pdserve.memory.layout import KVLayout
from pdserve.memory.lease import Lease, pages_of_group
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import Address, CopyEngine, Notified
from pdserve.transfer.peers import Peer
from pdserve.transfer.room import KVPoll, ReceiveRoom, RemoteWritable, RemoteWritablePages, WritableEnd
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import (
    Abort,
    MemoryKey,
    PromptLogprobsPart,
    TransferDone,
    TransferEnded,
    TransferInfo,
    TransferStats,
)


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
        layout: KVLayout,
        num_ranks: int,
        counters: Counter[str],
    ) -> None:
        self._instance = instance
        self._sessions = sessions
        self._clock = clock
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._waiting_timeout_s = waiting_timeout_s
        self._layout = layout
        self._counters = counters
        self._attempts = itertools.count(1)
        self.rooms: dict[int, ReceiveRoom] = {}
        self.published = RemoteWritablePages(engine, clock, num_ranks)
        self.changed_rooms: dict[int, None] = {}
        self._awaiting_session: dict[Address, dict[int, ReceiveRoom]] = {}
        """Rooms without a session, in the order of opening."""
        self._awaiting_kv: dict[int, ReceiveRoom] = {}
        """Rooms whose pages are published, in that order."""

    # ------------------------------------------------------------------ called by receivers

    def open(
        self, room: int, address: Address, digest: str, fake: bool, *, takes_logprobs: bool = False
    ) -> ReceiveRoom:
        """Open a room to receive from the prefill server behind `address`.

        `takes_logprobs`: the room also receives the log probabilities of the prompt.

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
            changed_rooms=self.changed_rooms,
            address=address,
            key=key,
            takes_logprobs=takes_logprobs,
            fake=fake,
        )
        self.rooms[room] = record
        if fake:
            record.move(KVPoll.WAITING_FOR_INPUT)
        else:
            self._awaiting_session.setdefault(address, {})[room] = record
            self._dial(address)
        return record

    def publish(
        self, room: ReceiveRoom, lease: Lease, aux: Lease, cached_tokens: int = 0, num_tokens: int | None = None
    ) -> None:
        """Send the pages to the sender, which may write from now on; they get the hold `remote`.

        The KV cache of the first `cached_tokens` tokens (whole pages) is already here. These pages may be shared with
        other requests, so their addresses are not sent. `num_tokens`: tokens of the prompt; None: as many as the pages
        hold.
        """
        num_cached = self._layout.whole_pages(cached_tokens)
        assert self._layout.tokens_in(num_cached) == cached_tokens, cached_tokens
        assert num_cached <= len(lease.pages), cached_tokens
        room.num_tokens = num_tokens
        num_held = self._layout.tokens_in(len(lease.pages)) if num_tokens is None else num_tokens
        if room.fake:
            room.move(KVPoll.SUCCESS)
            return
        peer = None if room.peer is None else self._sessions.peer(room.peer, dialled=True)
        if room.state is not KVPoll.WAITING_FOR_INPUT or peer is None:
            return
        room.published_at = self._clock.now()
        self._awaiting_kv.pop(room.room, None)
        self._awaiting_kv[room.room] = room
        pages = tuple(
            tuple(pages_of_group(self._layout, group, lease, num_held, num_cached)) for group in self._layout.groups
        )
        kv_pages, state_indices = self._layout.split(pages)
        room.num_state_items = sum(map(len, state_indices))
        num_pages = sum(map(len, pages)) + len(aux.pages)
        self.published.add(
            RemoteWritable(room.key, peer.instance, peer.receiver, (lease, aux), num_pages, cached_tokens)
        )
        info = TransferInfo(
            key=room.key,
            cached_tokens=cached_tokens,
            pages=kv_pages,
            state_indices=state_indices,
            aux_slot=aux.pages[0],
            prompt_digest=room.digest,
            weights=self._sessions.weights,
        )
        self._sessions.send(peer, info)

    def fail(self, room: ReceiveRoom, failure: Failure) -> None:
        """Fail a room locally, and send the failure to the sender."""
        if not room.fail(failure):
            return
        peer = None if room.peer is None else self._sessions.peer(room.peer, dialled=True)
        if peer is not None and not room.fake:
            self._sessions.send(peer, Abort(key=room.key, failure=failure, prompt_digest=room.digest))

    def close(self, room: ReceiveRoom) -> None:
        """Release the room of an ended request; its pages may stay published."""
        if self.rooms.get(room.room) is room:
            del self.rooms[room.room]
            self.changed_rooms.pop(room.room, None)
            self._awaiting_kv.pop(room.room, None)
            rooms = self._awaiting_session.get(room.address, {})
            if rooms.pop(room.room, None) is not None and not rooms:
                del self._awaiting_session[room.address]

    # ------------------------------------------------------------------ events

    def on_peer_ready(self, peer: Peer) -> None:
        """Continue the rooms that wait for a session with `peer`."""
        for address in peer.addresses:
            self._dial(address)

    def on_dial_failed(self, address: Address, failure: Failure) -> None:
        """Fail the rooms that wait for the prefill server at `address`."""
        self._counters["dials_failed"] += 1
        for room in self._awaiting_session.pop(address, {}).values():
            room.fail(failure)

    def sends(self, peer: Peer, key: MemoryKey) -> bool:
        """True when the pages of `key` were published in the session with `peer`: only that peer may end the key."""
        entry = self.published.get(key)
        return entry is not None and entry.peer == peer.instance and entry.receiver == peer.receiver

    def on_transfer_done(self, done: TransferDone) -> None:
        """Handle `TransferDone`: the sender has seen every byte of a key land."""
        self._conclude(self.published.end(done))

    def on_notified(self, event: Notified) -> None:
        """Handle an engine's report, at one local rank, on the writes of a key."""
        self._conclude(self.published.notified(event))

    def on_logprobs(self, peer: Peer, part: PromptLogprobsPart) -> None:
        """Store a part of the prompt's log probabilities, which may arrive after `TransferDone` or repeatedly."""
        room = self.rooms.get(part.key.room)
        if room is None or room.key != part.key or room.peer != peer.instance or not room.takes_logprobs:
            return
        try:
            part.part.check()
        except ProtocolError as error:
            self.fail(room, Failure(code="bad_metadata", message=str(error), origin=peer.endpoint, status=502))
            return
        room.logprob_parts[part.index] = part.part
        self._check_logprobs(room)

    def on_transfer_ended(self, ended: TransferEnded) -> None:
        """Handle `TransferEnded`: the sender gave up a key, and may still write unless `quiesced`."""
        room = self.rooms.get(ended.key.room)
        if room is not None and room.key == ended.key and not self._follow(room, ended):
            room.fail(ended.failure)
        if ended.quiesced:
            self._conclude(self.published.end(ended))

    def on_peer_lost(self, peer: Peer, failure: Failure) -> None:
        """Fail the rooms of a peer that is silent or whose session has ended. The peer may still write."""
        for room in self.rooms.values():
            if room.peer == peer.instance:
                self.fail(room, failure)

    def on_fenced(self, receiver: str) -> None:
        """Free the pages published in the session of `receiver`: writes cannot land there any more."""
        self.published.fenced(receiver)

    def on_quiesced(self, receiver: str) -> None:
        """Handle the sender's promise to write no more in the session of `receiver`."""
        self.published.quiesced(receiver)

    def tick(self) -> None:
        """Apply timeouts, and free pages whose writes have drained. Looks at the oldest rooms only."""
        now = self._clock.now()
        for address, rooms in list(self._awaiting_session.items()):
            for room in list(itertools.takewhile(lambda r: self._session_is_overdue(r, now), rooms.values())):
                del rooms[room.room]
                message = f"no session with the prefill server within {self._bootstrap_timeout_s:g} s"
                self.fail(room, Failure(code="bootstrap_timeout", message=message, status=504))
            if rooms:
                self._dial(address)
            else:
                self._awaiting_session.pop(address, None)
        for room in list(itertools.takewhile(lambda r: self._kv_is_overdue(r, now), self._awaiting_kv.values())):
            del self._awaiting_kv[room.room]
            limit = f"within {self._waiting_timeout_s:g} s after decode published its pages"
            message = f"prefill did not finish the KV transfer {limit}"
            self.fail(room, Failure(code="transfer_timeout", message=message, status=504))
        self.published.tick()

    @property
    def num_awaiting_session(self) -> int:
        """Number of rooms without a session."""
        return sum(map(len, self._awaiting_session.values()))

    @property
    def num_remote_pages(self) -> int:
        """Number of KV pages and aux slots that a peer may write to."""
        return sum(entry.num_pages for entry in self.published)

    # ------------------------------------------------------------------ inside

    def _conclude(self, ending: WritableEnd | None) -> None:
        """Apply the end of a key to the counters and to its room."""
        if ending is None:
            return
        done = ending.final_message if isinstance(ending.final_message, TransferDone) else None
        if done is not None:
            self._count(ending.entry.peer, done.stats if ending.landed else None)
        elif isinstance(ending.final_message, TransferEnded) and ending.final_message.moved_to is None:
            self._count(ending.entry.peer, None)
        self._counters["transfers_unconfirmed"] += not ending.landed
        room = self.rooms.get(ending.entry.key.room)
        if done is None or room is None or room.key != done.key:
            return
        if ending.landed:
            room.stats, room.num_logprob_parts = done.stats, done.num_logprob_parts
            self._check_logprobs(room)
        else:
            message = "prefill reports all KV cache as written, but the local transfer engine does not confirm it"
            room.fail(Failure(code="transfer_unconfirmed", message=message, status=502))

    def _check_logprobs(self, room: ReceiveRoom) -> None:
        if room.has_all_logprobs:
            room.move(KVPoll.SUCCESS)

    def _dial(self, address: Address) -> None:
        """Look up sessions with `address`, and continue the rooms that wait there.

        A room belongs to replica `room % dp_size`, until a replica redirects it.
        """
        replicas = self._sessions.dial(address)
        rooms = self._awaiting_session.get(address, {})
        if not any(replicas):
            return
        for room in list(rooms.values()):
            peer = replicas[(room.room if room.replica is None else room.replica) % len(replicas)]
            if peer is not None:
                del rooms[room.room]
                room.peer = peer.instance
                room.move(KVPoll.WAITING_FOR_INPUT)
                if room.republish is not None:
                    entry, room.republish = room.republish, None
                    lease, aux = entry.leases
                    self.publish(room, lease, aux, entry.cached_tokens, room.num_tokens)
        if not rooms:
            self._awaiting_session.pop(address, None)

    def _follow(self, room: ReceiveRoom, ended: TransferEnded) -> bool:
        """Publish the same pages under a new key to the replica that has the request, once a session with it is READY.

        Returns False when that is not possible.
        """
        replicas = self._sessions.dial(room.address)
        entry = self.published.get(room.key)
        if ended.moved_to is None or entry is None or room.state is not KVPoll.WAITING_FOR_INPUT:
            return False
        if replicas and ended.moved_to >= len(replicas):
            return False
        self.published.release(room.key)  # the request itself keeps them
        room.key = MemoryKey(room.room, next(self._attempts), self._instance)
        room.peer, room.replica, room.republish = None, ended.moved_to, entry
        self._awaiting_session.setdefault(room.address, {})[room.room] = room
        self._dial(room.address)
        return True

    def _count(self, instance: str, stats: TransferStats | None) -> None:
        """Count the end of a key of a peer; `stats` None: a failure."""
        peer = self._sessions.peer(instance, dialled=True)
        if peer is None:
            return
        peer.received.ended(well=stats is not None)
        if stats is not None:
            peer.received.moved(stats.num_bytes, stats.write_s, self._clock.now())

    def _session_is_overdue(self, room: ReceiveRoom, now: float) -> bool:
        return now - room.opened_at > self._bootstrap_timeout_s

    def _kv_is_overdue(self, room: ReceiveRoom, now: float) -> bool:
        return room.published_at is not None and now - room.published_at > self._waiting_timeout_s
