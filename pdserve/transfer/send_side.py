"""The sending half of the manager: binds receivers' pages to rooms, turns chunks into copy jobs, says how keys ended.

A key's way: Meta binds it -> chunks are submitted -> all have landed: Done.
                                  \\-> failed or aborted: queued jobs are cancelled, running ones awaited ->
                                  Ended(quiesced)
`Ended(quiesced)` is a promise, so it is sent only when no job of the key runs and failed writes have settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import RequestError
from pdserve.memory.layout import KVLayout
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyDone, CopyEngine, CopyJob
from pdserve.transfer.peers import Peer, PeerState
from pdserve.transfer.plan import PageCopy, plan_pages
from pdserve.transfer.room import ClosedKeys, Outgoing, SendRoom, misfit
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.state import TERMINAL, KVPoll
from pdserve.transfer.wire import Abort, Done, Ended, Key, Meta, TransferStats

MAX_EARLY = 4096


class SendSide:
    """All rooms that this process sends for. Called by `KVManager` and `KVSender`."""

    def __init__(
        self,
        layout: KVLayout,
        kv_bases: Sequence[int],
        aux_base: int,
        aux_slot_bytes: int,
        sessions: Sessions,
        engine: CopyEngine,
        clock: Clock,
        timeout_s: float,
        counters: Counter[str],
    ) -> None:
        self._layout = layout
        self._kv_bases = kv_bases
        self._aux_base = aux_base
        self._aux_slot_bytes = aux_slot_bytes
        self._sessions = sessions
        self._engine = engine
        self._clock = clock
        self._timeout_s = timeout_s
        self._counters = counters
        self.rooms: dict[int, SendRoom] = {}
        self.outgoing: dict[Key, Outgoing] = {}
        self._early: dict[Key, tuple[float, str, Meta]] = {}
        self._tombstones: dict[tuple[int, str], tuple[float, Failure]] = {}
        self._closed = ClosedKeys()

    # ------------------------------------------------------------------ called by senders

    def open(self, room: int, digest: str, fake: bool) -> SendRoom:
        """A request will send for `room`.

        Raises:
            RequestError: 409 when the room is live.
        """
        if room in self.rooms:
            raise RequestError(
                f"bootstrap_room {room} is in use", field="bootstrap_room", status=409, code="room_in_use"
            )
        record = SendRoom(room=room, digest=digest, opened_at=self._clock.now(), fake=fake)
        self.rooms[room] = record
        self._tombstones.pop((room, digest), None)
        if fake:
            record.move(KVPoll.WAITING_FOR_INPUT)
        for key, (_, instance, meta) in list(self._early.items()):
            peer = self._sessions.peer(instance)
            if key.room == room and peer is not None:
                del self._early[key]
                self.on_meta(peer, meta)
        return record

    def send(self, room: SendRoom, lease: Lease, first_page: int, num_pages: int) -> None:
        """Send pages `[first_page, first_page + num_pages)` of the request. The key must be bound."""
        assert room.target is not None
        target = tuple(pages[first_page : first_page + num_pages] for pages in room.target.pages)
        source = lease.pages[first_page : first_page + num_pages]
        if any(len(pages) < len(source) for pages in target):
            self.fail(
                room, _failure("bad_metadata", "the decode server gave fewer pages than the prompt has", status=500)
            )
            return
        peer = self._sessions.peer(room.target.key.origin)
        if peer is None or peer.hello is None:
            room.fail(Failure(code="peer_gone", message="the decode server is gone"))
            return
        pieces = tuple(
            (base, region.address, tuple(plan_pages(group, source, pages)))
            for group, base, region, pages in zip(
                self._layout.groups, self._kv_bases, peer.hello.kv_regions, target, strict=True
            )
        )
        if num_pages:
            self._submit(room, peer, lease, pieces, num_pages)

    def send_aux(self, room: SendRoom, slot: Lease, times: TransferStats) -> None:
        """Send the aux slot, the last piece of the key; nothing may be sent for it afterwards. `times` go into Done."""
        assert room.target is not None
        peer = self._sessions.peer(room.target.key.origin)
        if peer is None or peer.hello is None:
            room.fail(Failure(code="peer_gone", message="the decode server is gone"))
            return
        size = self._aux_slot_bytes
        copy = PageCopy(slot.pages[0] * size, room.target.aux_slot * size, size)
        self._submit(room, peer, slot, ((self._aux_base, peer.hello.aux_region.address, (copy,)),), 0)
        out = self.outgoing.get(room.target.key)
        if out is not None:
            out.sealed_at, out.times = self._clock.now(), times

    def fail(self, room: SendRoom, failure: Failure) -> None:
        """End a room from our side, and let the receiver know as soon as there is one to tell."""
        if not room.fail(failure):
            return
        if room.target is None:
            self._tombstones.pop((room.room, room.digest), None)
            self._tombstones[room.room, room.digest] = (self._clock.now() + self._timeout_s, failure)
            return
        key = room.target.key
        self._say(key, Ended(key=key, failure=failure, quiesced=False))
        self._stop(key, failure)

    def close(self, room: SendRoom) -> None:
        """The request has ended and let go of the room."""
        if self.rooms.get(room.room) is room:
            del self.rooms[room.room]

    # ------------------------------------------------------------------ what comes in

    def on_meta(self, peer: Peer, meta: Meta) -> None:
        """A receiver tells its pages for a room."""
        key = meta.key
        if key in self._closed or key.origin != peer.instance:
            return
        assert peer.hello is not None
        wrong = misfit(meta, peer.hello, self._layout, self._aux_slot_bytes)
        if wrong is not None:
            self._counters["metas_refused"] += 1
            self._turn_away(peer, key, _failure("bad_metadata", wrong, status=500))
            return
        room = self.rooms.get(key.room)
        if room is None or room.state in TERMINAL:
            self._early_meta(peer, meta)
            return
        if room.target is not None and room.target.key == key:
            return
        if room.digest != meta.prompt_digest:
            message = "prefill and decode have different prompts for this room"
            self._turn_away(peer, key, _failure("prompt_mismatch", message))
        elif room.target is None or self._supersedes(room, key):
            room.target = meta
            room.move(KVPoll.WAITING_FOR_INPUT)
        else:
            self._turn_away(peer, key, _failure("room_in_use", f"room {key.room} already sends to another receiver"))

    def on_abort(self, peer: Peer, abort: Abort) -> None:
        """A receiver does not want its key any more."""
        key = abort.key
        if key.origin != peer.instance:
            return
        already_closed = key in self._closed
        self._closed.add(key)
        self._early.pop(key, None)
        room = self.rooms.get(key.room)
        if room is not None and room.digest == abort.prompt_digest:
            bound = room.target is not None and room.target.key == key
            if bound or (room.target is None and not already_closed):
                room.fail(abort.failure)
        if key in self.outgoing:
            self._stop(key, abort.failure)
        else:
            self._sessions.send(peer, Ended(key=key, failure=abort.failure, quiesced=True))

    def on_copy(self, event: CopyDone) -> None:
        """A copy job has ended."""
        out = self.outgoing.get(event.job.key)
        if out is None or out.pending.pop(event.job.index, None) is None:
            return
        out.write_s += event.write_s
        if event.failure is not None:
            self._counters["copies_failed"] += not event.job.cancelled
            if not event.settled:
                out.settled_at = max(out.settled_at, self._clock.now() + self._engine.settle_s)
            if out.failure is None:
                room = self.rooms.get(out.key.room)
                if room is not None and room.target is not None and room.target.key == out.key:
                    room.fail(event.failure)
                self._say(out.key, Ended(key=out.key, failure=event.failure, quiesced=False))
                self._stop(out.key, event.failure)
                return
        else:
            out.num_bytes += event.job.num_bytes
            self._counters["kv_transfer_bytes"] += event.job.num_bytes
        self._finish(out)

    def on_peer_lost(self, peer: Peer, failure: Failure, gone: bool) -> None:
        """The receiver's process is silent or dead."""
        for room in self.rooms.values():
            if room.target is not None and room.target.key.origin == peer.instance and room.fail(failure):
                self._stop(room.target.key, failure)
        for key, (_, instance, _) in list(self._early.items()):
            if instance == peer.instance and gone:
                del self._early[key]

    def tick(self) -> None:
        """Time-outs, and failed writes that have settled."""
        now = self._clock.now()
        for room in list(self.rooms.values()):
            if room.state is KVPoll.BOOTSTRAPPING and now - room.opened_at > self._timeout_s:
                message = f"no decode server came for room {room.room} within {self._timeout_s:g} s"
                self.fail(room, Failure(code="bootstrap_timeout", message=message, status=504))
        for out in list(self.outgoing.values()):
            if out.settled_at:
                self._finish(out)
        while self._early:  # the oldest comes first, and all wait equally long
            key, (expiry, instance, _) = next(iter(self._early.items()))
            if now < expiry:
                break
            del self._early[key]
            peer = self._sessions.peer(instance)
            if peer is not None:
                message = f"prefill never got a request for room {key.room}"
                self._turn_away(peer, key, _failure("bootstrap_timeout", message, status=504))
        while self._tombstones:
            mark, (expiry, _) = next(iter(self._tombstones.items()))
            if now < expiry:
                break
            del self._tombstones[mark]

    @property
    def num_early(self) -> int:
        """Receivers whose prefill request has not come yet."""
        return len(self._early)

    # ------------------------------------------------------------------ inside

    def _supersedes(self, room: SendRoom, key: Key) -> bool:
        """A receiver counts its attempts, so a higher one means the bound one is dead; nothing must have been sent."""
        assert room.target is not None
        bound = room.target.key
        return key.origin == bound.origin and key.attempt > bound.attempt and bound not in self.outgoing

    def _early_meta(self, peer: Peer, meta: Meta) -> None:
        mark = (meta.key.room, meta.prompt_digest)
        entry = self._tombstones.pop(mark, None)
        if entry is not None:
            self._turn_away(peer, meta.key, entry[1])
        elif len(self._early) >= MAX_EARLY:
            message = "too many rooms wait for their prefill request"
            self._turn_away(peer, meta.key, _failure("prefill_overloaded", message, status=503))
        else:
            expiry = self._clock.now() + self._timeout_s
            self._early.setdefault(meta.key, (expiry, peer.instance, meta))

    def _turn_away(self, peer: Peer, key: Key, failure: Failure) -> None:
        self._closed.add(key)
        self._sessions.send(peer, Ended(key=key, failure=failure, quiesced=True))

    def _say(self, key: Key, body: Ended | Done) -> None:
        peer = self._sessions.peer(key.origin)
        if peer is not None and peer.hello is not None and peer.state is not PeerState.REFUSED:
            self._sessions.send(peer, body)

    def _submit(
        self,
        room: SendRoom,
        peer: Peer,
        lease: Lease,
        pieces: tuple[tuple[int, int, tuple[PageCopy, ...]], ...],
        num_pages: int,
    ) -> None:
        assert room.target is not None and peer.hello is not None
        if room.state is KVPoll.FAILED:
            return
        key = room.target.key
        out = self.outgoing.setdefault(key, Outgoing(key=key, peer=peer.instance, leases=[]))
        if not lease.held_by("send"):
            lease.hold("send")
            out.leases.append(lease)
        num_bytes = sum(copy.num_bytes for _, _, copies in pieces for copy in copies)
        job = CopyJob(key, out.num_chunks, peer.instance, peer.hello.transport_address, pieces, num_bytes)
        out.pending[job.index] = job
        out.num_chunks += 1
        out.num_pages += num_pages
        room.move(KVPoll.TRANSFERRING)
        self._engine.submit(job)

    def _stop(self, key: Key, failure: Failure) -> None:
        """Write nothing more for `key`; promise so once it is true."""
        out = self.outgoing.get(key)
        if out is None:
            self._closed.add(key)
            self._say(key, Ended(key=key, failure=failure, quiesced=True))
            return
        out.failure = out.failure or failure
        for job in out.pending.values():
            job.cancelled = True
        self._finish(out)

    def _finish(self, out: Outgoing) -> None:
        """When the last write of a key has ended: say how, and let go of the source pages."""
        if out.pending or self._clock.now() < out.settled_at:
            return
        if out.failure is None and out.sealed_at is None:
            return
        del self.outgoing[out.key]
        self._closed.add(out.key)
        for lease in out.leases:
            lease.drop("send")
        if out.failure is not None:
            self._say(out.key, Ended(key=out.key, failure=out.failure, quiesced=True))
            return
        room = self.rooms.get(out.key.room)
        if room is not None and room.target is not None and room.target.key == out.key:
            room.move(KVPoll.SUCCESS)
        self._counters["transfers_done"] += 1
        self._say(out.key, Done(key=out.key, stats=self._stats(out)))

    def _stats(self, out: Outgoing) -> TransferStats:
        return msgspec.structs.replace(
            out.times,
            num_bytes=out.num_bytes,
            num_pages=out.num_pages,
            write_s=out.write_s,
            tail_s=0.0 if out.sealed_at is None else self._clock.now() - out.sealed_at,
        )


def _failure(code: str, message: str, status: int = 502) -> Failure:
    return Failure(code=code, message=message, origin="prefill", status=status)
