"""Sending side of `KVManager`: binds receivers' pages to rooms, and turns chunks into copy jobs.

A chunk is pages times layers of one request. Each of its layer ranges becomes one job per rank pair. The job waits
until these layers are written. Pages that the receiver already has are in no job.

Life of a key: TransferInfo binds it -> chunks are submitted -> all have landed: TransferDone.
                                          \\-> failed or aborted: queued jobs are cancelled, running ones awaited
                                          -> TransferEnded(quiesced)
`OutgoingKeys` sends the final message of a key with copy jobs. `SendSide` sends `TransferEnded` for a key that it
refuses, or that the receiver aborts before the first job.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from pdserve.base.clock import Clock
from pdserve.errors import RequestError
from pdserve.memory.layer_events import ALL_WRITTEN, LayerEvents
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease, numbers_to_move, numbers_with, pages_at
from pdserve.protocol.failure import Failure, weights_mismatch
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.transfer.events import CopyDone, CopyEngine, PeerConnected
from pdserve.transfer.in_flight import Connecting, EarlyArrivals, OutgoingKeys, Tombstone
from pdserve.transfer.peers import Peer
from pdserve.transfer.plan import ChunkPart, ChunkPlanner
from pdserve.transfer.room import (
    TERMINAL,
    KVPoll,
    SendRoom,
    check_draft_pages,
    check_prompt_fits_pages,
    check_receiver_pages,
)
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import (
    Abort,
    Hello,
    MemoryKey,
    PromptLogprobsPart,
    TransferEnded,
    TransferInfo,
    TransferStats,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Pages of a request by layout group: `source` are local, `target` the peer's."""

    key: MemoryKey
    peer: Peer
    hello: Hello
    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]


PEER_GONE = Failure(code="peer_gone", message="the decode server is gone")


class SendSide:
    """All rooms that this process sends for. Called by `KVManager` and `KVSender`."""

    def __init__(
        self,
        chunks: ChunkPlanner,
        sessions: Sessions,
        engine: CopyEngine,
        clock: Clock,
        timeout_s: float,
        counters: Counter[str],
    ) -> None:
        self._chunks = chunks
        self._layout = chunks.layout
        self._sessions = sessions
        self._clock = clock
        self._timeout_s = timeout_s
        self._counters = counters
        self.rooms: dict[int, SendRoom] = {}
        self.outgoing = OutgoingKeys(sessions, engine, clock, counters)
        self.changed_rooms: dict[int, None] = {}
        self._early_arrivals = EarlyArrivals(clock, timeout_s)
        self._connecting = Connecting(engine, chunks.rank_pairs)
        self._bound: dict[int, SendRoom] = {}
        """Rooms with a known receiver, while it is unknown whether all local ranks can write to it."""

    # ------------------------------------------------------------------ called by senders

    def open(self, room: int, digest: str, fake: bool, num_tokens: int | None = None) -> SendRoom:
        """Open a room to send for.

        With `num_tokens`, the prompt's tokens, a receiver whose pages do not fit the prompt is refused on arrival.

        Raises:
            RequestError: 409 when the room is live.
        """
        if room in self.rooms:
            raise RequestError(
                f"bootstrap_room {room} is in use", field="bootstrap_room", status=409, code="room_in_use"
            )
        record = SendRoom(
            room=room,
            digest=digest,
            opened_at=self._clock.now(),
            changed_rooms=self.changed_rooms,
            num_tokens=num_tokens,
            fake=fake,
        )
        self.rooms[room] = record
        self._early_arrivals.pop_tombstone(room, digest)
        if fake:
            record.move(KVPoll.WAITING_FOR_INPUT)
        for early in self._early_arrivals.take_room(room):
            peer = self._sessions.peer(early.instance, dialled=False)
            if peer is not None:
                self.on_transfer_info(peer, early.info)
        return record

    def send(
        self, room: SendRoom, lease: Lease, pages: range, layer_ranges: Sequence[range], layer_events: LayerEvents
    ) -> None:
        """Send `pages` (at least one, numbers within the request) of `lease`, each layer range once it is written.

        The key must be bound, and its receiver must not have any of these pages.
        """
        assert pages
        chunk = self._chunk(room, lease, pages)
        if chunk is None:
            return
        for layers in self._chunks.layer_ranges(layer_ranges):
            for part in self._chunks.pages(chunk.hello, chunk.source, chunk.target, layers):
                self._submit(room, chunk.peer, (lease,), part, layer_events)
        out = self.outgoing.get(chunk.key)
        if out is not None:
            out.num_pages += len(chunk.source[0])

    def send_last(
        self,
        room: SendRoom,
        lease: Lease | None,
        pages: range,
        slot: Lease,
        times: TransferStats,
        write_record: Callable[[int], None],
    ) -> None:
        """Send `pages`, whose layers are all written, and the aux slot as the last piece of the key. No lease: no
        pages.

        The slot is in the same job as pages for the same rank pair, so that one job ends both. No send for the key may
        follow. `times` go into `TransferDone`. `write_record` fills the aux slot; its argument is the number of state
        items that are sent for the key.
        """
        chunk = self._chunk(room, lease, pages)
        if chunk is None or room.target is None:
            return
        write_record(room.num_state_items)
        parts = []
        for layers in self._chunks.layer_ranges(()) if pages else ():
            parts += self._chunks.pages(chunk.hello, chunk.source, chunk.target, layers)
        for part in self._chunks.with_aux(parts, chunk.hello, slot.pages[0], room.target.aux_slot):
            self._submit(room, chunk.peer, (slot,) if lease is None else (lease, slot), part)
        out = self.outgoing.get(chunk.key)
        if out is not None:
            out.num_pages += len(chunk.source[0])
            self._send_queued_logprobs(room)
            out.sealed_at, out.times = self._clock.now(), times

    def sends_drafts(self, room: SendRoom) -> bool:
        """Return whether the receiver of this room has an equal drafter; False before it is known."""
        peer = None if room.target is None else self._sessions.peer(room.target.key.origin, dialled=False)
        return peer is not None and peer.hello is not None and self._chunks.sends_drafts(peer.hello)

    def send_logprobs(self, room: SendRoom, part: PromptLogprobs) -> None:
        """Send log probabilities of the prompt to the receiver, as soon as its key is final."""
        room.queued_logprobs += part.parts()
        self._send_queued_logprobs(room)

    def fail(self, room: SendRoom, failure: Failure) -> None:
        """Fail a room locally; the receiver is notified at once, or when it arrives."""
        if not room.fail(failure):
            return
        if room.target is None:
            self._early_arrivals.add_tombstone(room.room, room.digest, Tombstone(failure))
            return
        key = room.target.key
        self.outgoing.notify_receiver(key, TransferEnded(key=key, failure=failure, quiesced=False))
        self.outgoing.stop(key, failure)

    def close(self, room: SendRoom) -> None:
        """Release the room of an ended request."""
        if self.rooms.get(room.room) is room:
            del self.rooms[room.room]
            self.changed_rooms.pop(room.room, None)
            self._bound.pop(room.room, None)

    def redirect(self, room: int, digest: str, replica: int) -> None:
        """Redirect the receiver of this room and prompt to `replica` of this server, which has the request."""
        self._early_arrivals.add_tombstone(
            room, digest, Tombstone(_failure("moved", f"replica {replica} has the request"), replica)
        )
        for early in self._early_arrivals.take_room(room):
            peer = self._sessions.peer(early.instance, dialled=False)
            if peer is not None:
                self._early_info(peer, early.info)

    # ------------------------------------------------------------------ events

    def on_transfer_info(self, peer: Peer, info: TransferInfo) -> None:
        """Handle `TransferInfo`: a receiver publishes its pages for a room."""
        key = info.key
        if key in self.outgoing.closed or key in self.outgoing or key.origin != peer.instance:
            return
        assert peer.hello is not None
        wrong = check_receiver_pages(info, peer.hello, self._chunks.layout, self._chunks.aux_bytes(peer.hello))
        if wrong is None and self._chunks.sends_drafts(peer.hello):
            wrong = check_draft_pages(info, peer.hello, self._chunks.drafts)
        if wrong is not None:
            self._refuse(peer, key, wrong)
            return
        room = self.rooms.get(key.room)
        if room is None or room.state in TERMINAL:
            self._early_info(peer, info)
            return
        if room.target is not None and room.target.key == key:
            return
        if room.digest != info.prompt_digest:
            code, message = "prompt_mismatch", "prefill and decode have different prompts for this room"
            if room.digest.partition(".")[0] == info.prompt_digest.partition(".")[0]:
                code, message = "lora_mismatch", "prefill and decode have different LoRA adapters for this request"
            self._turn_away(peer, key, _failure(code, message))
        elif info.weights != self._sessions.weights:
            failure = weights_mismatch(f"{self._sessions.weights} here, {info.weights} at the decode server")
            self._turn_away(peer, key, failure)
            if room.target is None:
                room.fail(failure)
        elif (wrong := self._validation_failure(room, info)) is not None:
            self._refuse(peer, key, wrong)
        elif room.target is None or self._supersedes(room, key):
            room.target = info
            if self._connecting.begin(peer):
                room.move(KVPoll.WAITING_FOR_INPUT)
            else:
                self._bound[room.room] = room
        else:
            self._turn_away(peer, key, _failure("room_in_use", f"room {key.room} already sends to another receiver"))

    def on_abort(self, peer: Peer, abort: Abort) -> None:
        """Handle Abort: a receiver aborts its key."""
        key = abort.key
        if key.origin != peer.instance:
            return
        already_closed = key in self.outgoing.closed
        self.outgoing.closed.add(key)
        self._early_arrivals.forget_key(key)
        room = self.rooms.get(key.room)
        if room is not None and room.digest == abort.prompt_digest:
            bound = room.target is not None and room.target.key == key
            if bound or (room.target is None and not already_closed):
                room.fail(abort.failure)
        if key in self.outgoing:
            self.outgoing.stop(key, abort.failure)
        else:
            self._sessions.send(peer, self.outgoing.quiesced(key, abort.failure))

    def on_connected(self, event: PeerConnected) -> None:
        """Handle a rank pair's connection result. A room moves on only when its receiver is reachable: no prefill is
        wasted.
        """
        verdict = self._connecting.take(event)
        if verdict is None:
            return
        for room in list(self._bound.values()):
            if room.target is None or room.target.key.origin != verdict.peer:
                continue
            del self._bound[room.room]
            if verdict.failure is None:
                room.move(KVPoll.WAITING_FOR_INPUT)
            else:
                self.fail(room, verdict.failure)

    def on_copy(self, event: CopyDone) -> None:
        """Handle the end of a copy job."""
        outcome = self.outgoing.copied(event)
        room = None if outcome is None else self.rooms.get(outcome.key.room)
        if outcome is None or room is None or room.target is None or room.target.key != outcome.key:
            return
        match outcome.how:
            case Failure():
                room.fail(outcome.how)
            case TransferStats():
                room.stats = outcome.how
                room.move(KVPoll.SUCCESS)

    def on_peer_lost(self, peer: Peer, failure: Failure, gone: bool) -> None:
        """Fail the rooms of a receiver whose process is silent or dead."""
        for room in self.rooms.values():
            if room.target is not None and room.target.key.origin == peer.instance and room.fail(failure):
                self.outgoing.stop(room.target.key, failure)
        if gone:
            self._early_arrivals.forget_peer(peer.instance)
            self._connecting.forget(peer.instance)

    def tick(self) -> None:
        """Apply timeouts, and finish failed writes that have drained. Looks at the oldest rooms only."""
        now = self._clock.now()
        for room in list(itertools.takewhile(lambda r: now - r.opened_at > self._timeout_s, self.rooms.values())):
            if room.state is KVPoll.BOOTSTRAPPING:
                unpublished = room.target is None
                what = "no decode server published pages" if unpublished else "the decode server could not be reached"
                message = f"{what} for room {room.room} within {self._timeout_s:g} s"
                self.fail(room, Failure(code="bootstrap_timeout", message=message, status=504))
        self.outgoing.tick()
        for early in self._early_arrivals.expire():
            peer = self._sessions.peer(early.instance, dialled=False)
            if peer is not None:
                message = f"prefill never got a request for room {early.info.key.room}"
                self._turn_away(peer, early.info.key, _failure("bootstrap_timeout", message, status=504))

    def forget_early(self) -> None:
        """Drop the receivers whose prefill request has not arrived. The end of the session tells them."""
        self._early_arrivals.forget_all()

    @property
    def num_early(self) -> int:
        """Number of receivers whose prefill request has not arrived yet."""
        return self._early_arrivals.num_early

    @property
    def num_tombstones(self) -> int:
        """Number of requests that ended before their receiver came."""
        return self._early_arrivals.num_tombstones

    # ------------------------------------------------------------------ inside

    def _supersedes(self, room: SendRoom, key: MemoryKey) -> bool:
        """True when `key` replaces the bound key: same receiver, higher attempt, nothing sent to the bound key."""
        assert room.target is not None
        bound = room.target.key
        return key.origin == bound.origin and key.attempt > bound.attempt and bound not in self.outgoing

    def _early_info(self, peer: Peer, info: TransferInfo) -> None:
        verdict = self._early_arrivals.pop_tombstone(info.key.room, info.prompt_digest)
        if verdict is not None:
            self._turn_away(peer, info.key, verdict.failure, verdict.moved_to)
        elif not self._early_arrivals.keep(peer.instance, info):
            message = "too many rooms wait for their prefill request"
            self._turn_away(peer, info.key, _failure("prefill_overloaded", message, status=503))

    def _validation_failure(self, room: SendRoom, info: TransferInfo) -> str | None:
        return None if room.num_tokens is None else check_prompt_fits_pages(info, room.num_tokens, self._layout)

    def _refuse(self, peer: Peer, key: MemoryKey, wrong: str) -> None:
        """Refuse a `TransferInfo` that no correct receiver sends."""
        self._counters["metas_refused"] += 1
        self._turn_away(peer, key, _failure("bad_metadata", wrong, status=500))

    def _turn_away(self, peer: Peer, key: MemoryKey, failure: Failure, moved_to: int | None = None) -> None:
        self.outgoing.closed.add(key)
        self._sessions.send(peer, TransferEnded(key=key, failure=failure, quiesced=True, moved_to=moved_to))

    def _send_queued_logprobs(self, room: SendRoom) -> None:
        out = None if room.target is None else self.outgoing.get(room.target.key)
        if out is None or room.state is KVPoll.FAILED:
            return
        for part in room.queued_logprobs:
            message = PromptLogprobsPart(key=out.key, index=out.num_logprob_parts, part=part)
            self.outgoing.notify_receiver(out.key, message)
            out.num_logprob_parts += 1
        room.queued_logprobs.clear()

    def _chunk(self, room: SendRoom, lease: Lease | None, pages: range) -> _Chunk | None:
        """Return where `pages` of the request lie on both sides; None, and the room fails, when they do not fit."""
        assert room.target is not None
        key = room.target.key
        first = self._layout.whole_pages(room.target.cached_tokens)
        assert not pages or pages.start >= first, (pages, first)
        source: list[Sequence[int]] = []
        target: list[Sequence[int]] = []
        published_items = self._layout.merge(room.target.pages, room.target.state_indices)
        for group, theirs in zip(self._layout.groups, published_items, strict=True):
            numbers, published = pages, first
            if group.space is not PageSpace.TOKENS:
                assert room.num_tokens is not None, "the sender knows the length of the prompt"
                numbers = numbers_with(self._layout, group, pages, room.num_tokens)
                published = numbers_to_move(self._layout, group, room.num_tokens).start
            source.append([] if lease is None else pages_at(group, lease, numbers))
            target.append(theirs[numbers.start - published : numbers.stop - published])
            assert lease is None or len(source[-1]) == len(numbers), (group.name, numbers, len(source[-1]))
        room.num_state_items += sum(map(len, self._layout.split(source)[1]))
        if any(len(theirs) < len(ours) for ours, theirs in zip(source, target, strict=True)):
            message = "the decode server gave fewer pages than the prompt has"
            self.fail(room, _failure("bad_metadata", message, status=500))
            return None
        peer = self._sessions.peer(key.origin, dialled=False)
        if peer is None or peer.hello is None:
            room.fail(PEER_GONE)
            return None
        return _Chunk(key, peer, peer.hello, source, target)

    def _submit(
        self,
        room: SendRoom,
        peer: Peer,
        leases: Sequence[Lease],
        part: ChunkPart,
        layer_events: LayerEvents = ALL_WRITTEN,
    ) -> None:
        """Queue the copies of `part`, which read from pages of `leases`: held until the key's last job has ended."""
        assert room.target is not None
        if room.state is KVPoll.FAILED:
            return
        room.move(KVPoll.TRANSFERRING)
        self.outgoing.submit(room.target.key, peer, leases, part, layer_events)


def _failure(code: str, message: str, status: int = 502) -> Failure:
    return Failure(code=code, message=message, origin="prefill", status=status)
