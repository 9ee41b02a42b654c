"""A test of the tests: two planted bugs for each kind of fault of a cluster, which it must notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.protocol.codec import Seal
from pdserve.protocol.failure import Failure
from pdserve.ranks.copies import Fencing, RankCopies
from pdserve.scheduler.kv_checksum import KVChecksum
from pdserve.scheduler.request import Req
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.sim.hash_lm import HashHasher
from pdserve.transfer import sessions as sessions_module
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import Address, CopyDone, CopyJob, PeerFenced, PrefillFound, PrefillNotFound
from pdserve.transfer.in_flight import ClosedKeys
from pdserve.transfer.peers import EndedSession, Notice, Peer, UnknownPeers
from pdserve.transfer.receiver import ReceiveSide
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.room import RemoteWritable, RemoteWritablePages
from pdserve.transfer.sender import SendSide
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import MemoryKey, Reset, TransferEnded
from tests.world.campaign import play

Patch = pytest.MonkeyPatch
MAX_SEEDS = 60


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
    patch.setattr(UnknownPeers, "owns", lambda self, instance, endpoint, session: True)


def an_unanswered_challenge_is_an_answer(patch: Patch) -> None:
    owns = UnknownPeers.owns

    def trusting(self: UnknownPeers, instance: str, endpoint: str, session: int) -> bool:
        asked = (instance, session) in self._challenges
        return owns(self, instance, endpoint, session) or asked

    patch.setattr(UnknownPeers, "owns", trusting)


def a_known_name_needs_no_challenge(patch: Patch) -> None:
    arrived, owns = Sessions.arrived, UnknownPeers.owns
    known: set[str] = set()

    def arriving(self: Sessions, frame: bytes, source: str) -> list[Notice]:
        known.clear()
        known.update(peer.instance for peer in self)
        return arrived(self, frame, source)

    def trusting(self: UnknownPeers, instance: str, endpoint: str, session: int) -> bool:
        return instance in known or owns(self, instance, endpoint, session)

    patch.setattr(Sessions, "arrived", arriving)
    patch.setattr(UnknownPeers, "owns", trusting)


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
    """A leap of our clock is taken for the peer's silence."""
    tick = Sessions.tick

    def timed(self: Sessions) -> list[Notice]:
        for peer in self:
            if self._clock.now() - peer.heard_at > 5.5:
                peer.num_missed = 1000
        return tick(self)

    patch.setattr(Sessions, "tick", timed)


def times_of_another_machine(patch: Patch) -> None:
    """The age of a room by the time of the peer."""
    tick = ReceiveSide.tick

    def early(self: ReceiveSide) -> None:
        self._waiting_timeout_s = 1.0
        tick(self)

    patch.setattr(ReceiveSide, "tick", early)


# ---------------------------------------------------------------------- frames


def no_frame_is_damaged(patch: Patch) -> None:
    """The seal is not looked at."""
    patch.setattr(Seal, "open", lambda self, sealed, max_bytes: sealed[16:])


def a_key_is_its_room(patch: Patch) -> None:
    def by_room(self: RemoteWritablePages, key: MemoryKey) -> RemoteWritable | None:
        return next((entry for entry in self._entries.values() if entry.key.room == key.room), None)

    end = RemoteWritablePages.end

    def ending(self: RemoteWritablePages, word: TransferEnded) -> object:
        entry = by_room(self, word.key)
        return end(self, word if entry is None else msgspec.structs.replace(word, key=entry.key))

    patch.setattr(RemoteWritablePages, "get", by_room)
    patch.setattr(RemoteWritablePages, "end", ending)


# ---------------------------------------------------------------------- damaged pages


def nothing_is_compared(patch: Patch) -> None:
    patch.setattr(KVChecksum, "received", lambda self, req: None)


def only_the_first_page_is_hashed(patch: Patch) -> None:
    digest = HashHasher.digest

    def short(self: HashHasher, pages: list[int], first: int, num_tokens: int) -> tuple[RankDigest, ...]:
        return digest(self, pages[:1], first, num_tokens)

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
    known: dict[tuple[str, Address], tuple[str, ...]] = {}

    def finding(self: Sessions, event: PrefillFound) -> list[Notice]:
        known[self.instance, event.address] = tuple(instance for instance, _ in event.replicas)
        return found(self, event)

    def stubborn(self: Sessions, address: Address) -> tuple[Peer | None, ...]:
        if (self.instance, address) in known:
            self._dialled.setdefault(address, known[self.instance, address])
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


def a_successor_is_its_predecessor(patch: Patch) -> None:
    """A session is with whoever is at an endpoint."""
    found = Sessions.found

    def faithful(self: Sessions, event: PrefillFound) -> list[Notice]:
        known = {peer.endpoint: peer.instance for peer in self}
        replicas = tuple((known.get(endpoint, instance), endpoint) for instance, endpoint in event.replicas)
        return found(self, PrefillFound(event.address, replicas))

    patch.setattr(Sessions, "found", faithful)


MUTANTS: list[tuple[Callable[[Patch], None], str, int]] = [
    (a_lost_receiver_is_everyones, "kills", 23),
    (keys_of_all_receivers_are_one, "lost", 7),
    (no_replica_sends_receivers_on, "replicas", 0),
    (follow_with_the_old_key, "replicas", 14),
    (a_rank_has_copied_when_it_was_told_to, "ranks", 0),
    (a_follower_fences_nothing, "ranks+lies", 2),
    (an_ended_session_writes_no_more, "lies", 5),
    (promise_quiet_while_writing_in_an_ended_session, "lies+cuts", 34),
    (a_peer_that_was_gone_stays_gone, "lies", 1),
    (an_end_is_not_told, "lies", 0),
    (an_endpoint_is_whose_Hello_says_so, "usurpers", 0),
    (an_unanswered_challenge_is_an_answer, "usurpers+replays", 0),
    (a_known_name_needs_no_challenge, "usurpers", 0),
    (a_reset_of_any_session_counts, "replays+lies", 5),
    (an_ended_session_may_begin_again, "replays+kills", 8),
    (what_is_silent_is_dead, "cuts", 4),
    (a_rank_that_cannot_say_is_fenced, "cuts", 21),
    (what_was_found_once_is_there_for_good, "deaths", 3),
    (a_lost_receiver_is_everyones, "deaths", 29),
    (one_that_listens_is_lost, "stops", 15),
    (no_patience_with_one_that_listens, "stops", 15),
    (silence_by_the_clock, "clocks", 0),
    (times_of_another_machine, "clocks", 0),
    (no_frame_is_damaged, "frames", 0),
    (a_key_is_its_room, "frames", 2),
    (nothing_is_compared, "damage", 0),
    (only_the_first_page_is_hashed, "damage", 0),
    (a_failed_look_up_is_the_last, "look-ups", 0),
    (a_failed_look_up_is_not_told, "look-ups", 0),
    (what_was_found_once_is_there_for_good, "look-ups+lies", 1),
    (an_ended_request_may_still_publish, "switches", 15),
    (a_successor_is_its_predecessor, "switches", 9),
]


SLOW = {a_successor_is_its_predecessor, an_end_is_not_told}
CASES = [pytest.param(*case, marks=pytest.mark.slow) if case[0] in SLOW else case for case in MUTANTS]


@pytest.mark.parametrize(("mutant", "kind", "first"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bug_is_caught(mutant: Callable[[Patch], None], kind: str, first: int, monkeypatch: Patch) -> None:
    """It is looked for from seed `first` on, which has caught it, and then in the others."""
    mutant(monkeypatch)
    for seed in (*range(first, MAX_SEEDS), *range(first)):
        try:
            play(seed, kind)
        except (OSError, MemoryError):
            raise  # this machine ran out of something: that does not catch the bug
        except Exception:
            return
    pytest.fail(f"{mutant.__name__}: not caught in {MAX_SEEDS} seeds")
