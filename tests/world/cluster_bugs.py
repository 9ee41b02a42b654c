"""Bugs that `test_cluster_mutations` plants: plausible mistakes, by the kind of fault that shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.memory.lease import Lease
from pdserve.protocol.codec import Seal
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import AbortRequest
from pdserve.ranks.copies import Fencing, RankCopies
from pdserve.scheduler.kv_checksum import KVChecksum
from pdserve.scheduler.request import Req
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.scheduler import Scheduler
from pdserve.sim.hash_tier import HashHasher
from pdserve.transfer import sessions as sessions_module
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import Address, CopyDone, CopyJob, PeerFenced, PrefillFound, PrefillNotFound
from pdserve.transfer.in_flight import ClosedKeys, OutgoingKeys, WriteOutcome
from pdserve.transfer.peers import EndedSession, Notice, Peer, PeerTable, UnknownPeers
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.room import ReceiveRoom, RemoteWritable, RemoteWritablePages
from pdserve.transfer.sender import SendSide
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import MemoryKey, Reset, TransferEnded, TransferInfo

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- several servers, and tries again


def a_lost_receiver_is_everyones(patch: Patch) -> None:
    """Rooms of other decode servers fail with one that is lost."""
    lost = SendSide.on_peer_lost

    def blunt(self: SendSide, peer: Peer, failure: Failure, gone: bool) -> None:
        lost(self, peer, failure, gone)
        for room in self.rooms.values():
            if room.target is not None and room.fail(failure):
                self.outgoing.stop(room.target.key, failure)

    patch.setattr(SendSide, "on_peer_lost", blunt)


def keys_of_all_receivers_are_one(patch: Patch) -> None:
    """A key that one decode server has closed is closed for all."""
    add, contains = ClosedKeys.add, ClosedKeys.__contains__

    def bare(key: MemoryKey) -> MemoryKey:
        return MemoryKey(key.room, key.attempt, "")

    patch.setattr(ClosedKeys, "add", lambda self, key, notified=(): add(self, bare(key), notified))
    patch.setattr(ClosedKeys, "__contains__", lambda self, key: contains(self, bare(key)))


def a_key_is_its_room(patch: Patch) -> None:
    def by_room(self: RemoteWritablePages, key: MemoryKey) -> RemoteWritable | None:
        return next((entry for entry in self._entries.values() if entry.key.room == key.room), None)

    end = RemoteWritablePages.end

    def ending(self: RemoteWritablePages, word: TransferEnded) -> object:
        entry = by_room(self, word.key)
        return end(self, word if entry is None else msgspec.structs.replace(word, key=entry.key))

    patch.setattr(RemoteWritablePages, "get", by_room)
    patch.setattr(RemoteWritablePages, "end", ending)


# ---------------------------------------------------------------------- replicas


def no_replica_sends_receivers_on(patch: Patch) -> None:
    patch.setattr(SendSide, "redirect", lambda self, room, digest, replica: None)


def follow_with_the_old_key(patch: Patch) -> None:
    on_transfer_ended = ReceiveSide.on_transfer_ended

    def stubborn(self: ReceiveSide, ended: TransferEnded) -> None:
        room = self.rooms.get(ended.key.room)
        key = None if room is None else room.key
        on_transfer_ended(self, ended)
        if room is not None and key is not None:
            room.key = key

    patch.setattr(ReceiveSide, "on_transfer_ended", stubborn)


# ---------------------------------------------------------------------- ranks


def a_rank_has_copied_when_it_was_told_to(patch: Patch) -> None:
    submit = RankCopies.submit

    def hasty(self: RankCopies, job: CopyJob) -> None:
        submit(self, job)
        if job.rank == self._rank:
            self.post(CopyDone.of(job, None, settled=True, write_s=0.0))

    patch.setattr(RankCopies, "submit", hasty)


def a_follower_fences_nothing(patch: Patch) -> None:
    fence = RankCopies.fence

    def idle(self: RankCopies, rank: int, peer: str) -> None:
        if self._rank == 0 or rank != self._rank:
            fence(self, rank, peer)
            return
        self._add((Fencing(peer), rank), rank)
        self.post(PeerFenced(peer, fenced=True))

    patch.setattr(RankCopies, "fence", idle)


# ---------------------------------------------------------------------- deaths of one rank


def a_failed_copy_is_the_last_one_of_its_key(patch: Patch) -> None:
    """The pages of a request are free once a copy to one rank has failed, though those to others go on."""
    copied = OutgoingKeys.copied

    def hasty(self: OutgoingKeys, event: CopyDone) -> WriteOutcome | None:
        out = self.get(event.key)
        if out is not None and event.failure is not None and event.index in out.pending:
            out.pending = {event.index: out.pending[event.index]}
        return copied(self, event)

    patch.setattr(OutgoingKeys, "copied", hasty)


def a_cancelled_copy_reads_no_more(patch: Patch) -> None:
    """The pages of a failed request are free once its copies are cancelled, though one to another rank goes on."""
    stop = OutgoingKeys.stop

    def hasty(self: OutgoingKeys, key: MemoryKey, failure: Failure) -> None:
        stop(self, key, failure)
        out = self.get(key)
        if out is not None:
            out.pending.clear()
            self._finish(out)

    patch.setattr(OutgoingKeys, "stop", hasty)


# ---------------------------------------------------------------------- cut links


def an_ended_session_writes_no_more(patch: Patch) -> None:
    """Free the pages as soon as a session ends, fenced or not."""
    fence = SessionReceivers.fence

    def hasty(self: SessionReceivers, name: str) -> None:
        fence(self, name)
        for receiver in self._receivers.values():
            if receiver.fence_begun_at is not None and receiver.free_at is None:
                receiver.free_at = 0.0

    patch.setattr(SessionReceivers, "fence", hasty)


def a_rank_that_cannot_say_is_fenced(patch: Patch) -> None:
    fenced = SessionReceivers.fenced
    patch.setattr(
        SessionReceivers,
        "fenced",
        lambda self, event: fenced(self, PeerFenced(event.peer, fenced=True, rank=event.rank)),
    )


# ---------------------------------------------------------------------- probes that lie


def promise_quiet_while_writing_in_an_ended_session(patch: Patch) -> None:
    reset = UnknownPeers.reset

    def lying(self: UnknownPeers, instance: str, endpoint: str, session: int, *, answer: bool) -> None:
        self._writes_in = lambda session: False
        reset(self, instance, endpoint, session, answer=answer)

    patch.setattr(UnknownPeers, "reset", lying)


def an_end_is_not_told(patch: Patch) -> None:
    """The other side of a session is not told that it has ended."""
    patch.setattr(UnknownPeers, "reset", lambda self, instance, endpoint, session, *, answer: None)


def a_peer_that_was_gone_stays_gone(patch: Patch) -> None:
    dial = Sessions.dial

    def unforgiving(self: Sessions, address: Address) -> tuple[Peer | None, ...]:
        return tuple(
            peer if peer is None or not self._unknown.receivers_of(peer.instance) else None
            for peer in dial(self, address)
        )

    patch.setattr(Sessions, "dial", unforgiving)


# ---------------------------------------------------------------------- usurpers and replays


def an_endpoint_is_whose_Hello_says_so(patch: Patch) -> None:
    patch.setattr(UnknownPeers, "is_proved", lambda self, instance, endpoint, session: True)


def an_unanswered_challenge_is_an_answer(patch: Patch) -> None:
    is_proved = UnknownPeers.is_proved

    def trusting(self: UnknownPeers, instance: str, endpoint: str, session: int) -> bool:
        asked = (instance, session) in self._challenges
        return is_proved(self, instance, endpoint, session) or asked

    patch.setattr(UnknownPeers, "is_proved", trusting)


def a_known_name_needs_no_challenge(patch: Patch) -> None:
    arrived, is_proved = Sessions.arrived, UnknownPeers.is_proved
    known: set[str] = set()

    def arriving(self: Sessions, frame: bytes, source: str) -> list[Notice]:
        known.clear()
        known.update(peer.instance for peer in self)
        return arrived(self, frame, source)

    def trusting(self: UnknownPeers, instance: str, endpoint: str, session: int) -> bool:
        return instance in known or is_proved(self, instance, endpoint, session)

    patch.setattr(Sessions, "arrived", arriving)
    patch.setattr(UnknownPeers, "is_proved", trusting)


def an_ended_session_may_begin_again(patch: Patch) -> None:
    session = UnknownPeers.session

    def forgetful(self: UnknownPeers, instance: str, number: int) -> EndedSession | None:
        ended = session(self, instance, number)
        return None if ended is None or ended.receiver is None else ended

    patch.setattr(UnknownPeers, "session", forgetful)


def a_reset_of_any_session_counts(patch: Patch) -> None:
    arrived = Sessions.arrived

    def lax(self: Sessions, frame: bytes, source: str) -> list[Notice]:
        with contextlib.suppress(ProtocolError):
            packet = self._wire.decode(frame)
            peer = self.peer(packet.sender)
            if isinstance(packet.body, Reset) and peer is not None:
                frame = self._wire.encode(msgspec.structs.replace(packet, session=peer.session))
        return arrived(self, frame, source)

    patch.setattr(Sessions, "arrived", lax)


# ---------------------------------------------------------------------- servers that are stopped


def what_is_silent_is_dead(patch: Patch) -> None:
    lost = ReceiveSide.on_peer_lost

    def hasty(self: ReceiveSide, peer: Peer, failure: Failure) -> None:
        lost(self, peer, failure)
        if peer.receiver is not None:
            self.on_fenced(peer.receiver)

    patch.setattr(ReceiveSide, "on_peer_lost", hasty)


def one_that_listens_is_lost(patch: Patch) -> None:
    def listens(self: Sessions, instance: str) -> None:
        peer = self.peer(instance)
        if peer is not None:
            peer.num_missed = 1000

    patch.setattr(Sessions, "listens", listens)


def no_patience_with_one_that_listens(patch: Patch) -> None:
    patch.setattr(sessions_module, "BUSY_FACTOR", 1)


# ---------------------------------------------------------------------- clocks


def silence_by_the_clock(patch: Patch) -> None:
    """Missed pings are counted by our clock: its leap is taken for the peer's silence."""
    tick = Sessions.tick

    def timed(self: Sessions) -> list[Notice]:
        for peer in self:
            missed = int((self._clock.now() - peer.heard_at) / self._times.heartbeat_s)
            peer.num_missed = max(peer.num_missed, missed)
        return tick(self)

    patch.setattr(Sessions, "tick", timed)


def times_of_another_machine(patch: Patch) -> None:
    """A receiver's message carries the time by its clock; the sender refuses one that is old by its own clock."""
    publish, on_transfer_info = ReceiveSide.publish, SendSide.on_transfer_info
    published_at: dict[MemoryKey, float] = {}

    def publishing(
        self: ReceiveSide, room: ReceiveRoom, lease: Lease, aux: Lease, cached_tokens: int, num_tokens: int | None
    ) -> None:
        published_at[room.key] = self._clock.now()
        publish(self, room, lease, aux, cached_tokens, num_tokens)

    def refusing(self: SendSide, peer: Peer, meta: TransferInfo) -> None:
        now = self._clock.now()
        if now - published_at.get(meta.key, now) > self._timeout_s:
            self._refuse(peer, meta.key, "it is too old")
        else:
            on_transfer_info(self, peer, meta)

    patch.setattr(ReceiveSide, "publish", publishing)
    patch.setattr(SendSide, "on_transfer_info", refusing)


# ---------------------------------------------------------------------- frames


def no_frame_is_damaged(patch: Patch) -> None:
    """The seal is not looked at."""
    patch.setattr(Seal, "open", lambda self, sealed, max_bytes: sealed[16:])


def a_frame_is_read_by_any_receiver(patch: Patch) -> None:
    """A Reset that answers a stranger is read by the peer whose Ping the stranger has copied."""
    arrived = Sessions.arrived

    def lax(self: Sessions, frame: bytes, source: str) -> list[Notice]:
        with contextlib.suppress(ProtocolError):
            packet = self._wire.decode(frame)
            frame = self._wire.encode(msgspec.structs.replace(packet, receiver=self.instance))
        return arrived(self, frame, source)

    patch.setattr(Sessions, "arrived", lax)


# ---------------------------------------------------------------------- damaged pages


def nothing_is_compared(patch: Patch) -> None:
    patch.setattr(KVChecksum, "received", lambda self, req: None)


def only_the_first_page_is_hashed(patch: Patch) -> None:
    digest = HashHasher.digest

    def short(
        self: HashHasher, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int
    ) -> tuple[RankDigest, ...]:
        page_tokens = self._executor.layout.groups[0].page_tokens
        return digest(self, pages, firsts, min(num_tokens, page_tokens))

    patch.setattr(HashHasher, "digest", short)


# ---------------------------------------------------------------------- the directory


def a_failed_look_up_is_the_last(patch: Patch) -> None:
    not_found = Sessions.not_found

    def final(self: Sessions, event: PrefillNotFound) -> list[Notice]:
        notices = not_found(self, event)
        self._dialled[event.address] = ()
        return notices

    patch.setattr(Sessions, "not_found", final)


def a_failed_look_up_is_not_told(patch: Patch) -> None:
    patch.setattr(Sessions, "not_found", lambda self, event: [])


def what_was_found_once_is_there_for_good(patch: Patch) -> None:
    """A lost peer's address is not looked up again."""
    dial, found = Sessions.dial, Sessions.found

    def known(self: Sessions) -> dict[Address, tuple[str, ...]]:
        return vars(self).setdefault("known", {})  # type: ignore[no-any-return]

    def finding(self: Sessions, event: PrefillFound) -> list[Notice]:
        known(self)[event.address] = tuple(instance for instance, _ in event.replicas)
        return found(self, event)

    def stubborn(self: Sessions, address: Address) -> tuple[Peer | None, ...]:
        if address in known(self):
            self._dialled.setdefault(address, known(self)[address])
        return dial(self, address)

    patch.setattr(Sessions, "found", finding)
    patch.setattr(Sessions, "dial", stubborn)


# ---------------------------------------------------------------------- servers that drain


def an_ended_request_may_still_publish(patch: Patch) -> None:
    end = DecodeRole.end

    def careless(self: DecodeRole, req: Req, failure: Failure | None) -> None:
        was_ready = req in self._ready
        end(self, req, failure)
        if was_ready:
            self._ready.add(req)

    patch.setattr(DecodeRole, "end", careless)


def a_drain_that_cuts_requests_frees_all_pages(patch: Patch) -> None:
    abort = Scheduler.abort_requests

    def hasty(self: Scheduler, message: AbortRequest) -> None:
        abort(self, message)
        if message.rid is None and self.kv is not None:
            published = self.kv.receive_side.published
            for entry in list(published):
                published.release(entry.key)

    patch.setattr(Scheduler, "abort_requests", hasty)


def a_successor_is_its_predecessor(patch: Patch) -> None:
    """A session belongs to an endpoint, whichever instance listens there, and whatever that one answers."""
    found = Sessions.found

    def faithful(self: Sessions, event: PrefillFound) -> list[Notice]:
        known = {peer.endpoint: peer.instance for peer in self}
        replicas = tuple((known.get(endpoint, instance), endpoint) for instance, endpoint in event.replicas)
        return found(self, PrefillFound(event.address, replicas))

    patch.setattr(Sessions, "found", faithful)
    patch.setattr(PeerTable, "replaced_by", lambda *_: [])
