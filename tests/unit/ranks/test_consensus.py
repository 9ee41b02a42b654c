"""Ranks agree on what has become of transfers: alike, once, by nothing but a MIN, and nobody waits for who is late."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.base.clock import ManualClock, MonotonicClock
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.errors import PdserveError, RankError
from pdserve.protocol.failure import Failure
from pdserve.ranks.consensus import PATIENCE_S, Consensus, Reduction
from pdserve.ranks.copies import LOST, Item, Outcome, RankCopies, item_of
from pdserve.ranks.input_log import FollowerLog, LeaderLog
from pdserve.ranks.messages import Entry
from pdserve.scheduler.input_source import FollowerInputSource, LeaderInputSource
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.events import CopyDone, CopyJob, Notified, PeerConnected, PeerFenced, ReceiverOpened
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import MemoryKey
from tests.unit.ranks.reductions import Ended, Reductions

DRAIN_TIMEOUT_S = 3.0
FENCE_DRAIN_TIMEOUT_S = 0.25
BROKEN = Failure(code="engine_failed", message="the wire is cut")


class Engine:
    """`CopyEngine` whose jobs end when the test says so."""

    drain_timeout_s = DRAIN_TIMEOUT_S
    fence_drain_timeout_s = 0.0
    notifies = True

    def __init__(self) -> None:
        self.jobs: list[CopyJob] = []
        self.cancelled: list[CopyJob] = []
        self.expected: list[MemoryKey] = []
        self.reaching: list[str] = []
        self.opening: list[str] = []
        self.fencing: list[str] = []
        self.knows = False

    def connect(self, rank: int, transport_address: str) -> bool:
        self.reaching.append(transport_address)
        return self.knows

    def submit(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def cancel(self, job: CopyJob) -> None:
        self.cancelled.append(job)

    def forget(self, transport_address: str) -> None: ...

    def open_receiver(self, rank: int, peer: str) -> None:
        self.opening.append(peer)

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None: ...

    def fence(self, rank: int, peer: str) -> None:
        self.fencing.append(peer)

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        self.expected.append(key)
        return self.knows


class Rank:
    """One rank's copies and what it has come to agree on, turn by turn."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.engine, self.copies = Engine(), RankCopies(number)
        self.told: deque[Outcome] = deque()
        log: LeaderLog | FollowerLog
        if number == 0:
            log = LeaderLog(ManualClock(), world.say)
        else:
            self.said: deque[Entry] = deque()
            log = FollowerLog(f"rank {number}", 0.0, self.said.popleft)
        self.consensus = Consensus(
            self.copies,
            lambda values, then: world.reductions.begin(number, values, then),
            log,
            lambda: world.lost,
            world.wake,
            in_step=False,
            now=world.clock.now,
        )
        mailbox: Mailbox[Event] = Mailbox()
        self._input_source = (
            LeaderInputSource(mailbox, log, self.consensus) if number == 0 else FollowerInputSource(log, self.consensus)
        )
        report = self.consensus.heard if number == 0 else self.told.append
        self.copies.drive(self.engine, DRAIN_TIMEOUT_S, FENCE_DRAIN_TIMEOUT_S, report)
        self.turns: list[list[Outcome]] = []

    def turn(self) -> None:
        """A turn of the loop; what it gives becomes known to the scheduler, which submits the same on all ranks."""
        found = self._input_source.drain()
        assert all(isinstance(event, Outcome) for event in found)
        self.turns.append(list(found))  # type: ignore[arg-type]


class World:
    """Ranks of one replica. Every rank makes the same turns, each when it likes, but behind the leader."""

    def __init__(self, num_ranks: int) -> None:
        self.reductions = Reductions(num_ranks)
        self.clock = ManualClock()
        self.num_wakes = 0
        self.lost: PdserveError | None = None
        self.followers: list[Rank] = []
        self.leader = Rank(self, 0)
        self.followers = [Rank(self, number) for number in range(1, num_ranks)]
        self.ranks = [self.leader, *self.followers]
        self.plan: list[list[Callable[[Rank], None]]] = []
        """What the scheduler does in each turn, on whatever rank."""

    def say(self, entry: Entry) -> None:
        for follower in self.followers:
            follower.said.append(entry)

    def wake(self) -> None:
        self.num_wakes += 1

    def lead(self, *does: Callable[[Rank], None]) -> None:
        """A turn of the leader, in which a scheduler does this."""
        self.plan.append(list(does))
        self.follow(self.leader)

    def follow(self, rank: Rank) -> None:
        """The next turn of a rank."""
        number = len(rank.turns)
        rank.turn()
        for do in self.plan[number]:
            do(rank)

    def next_entry(self) -> None:
        """What followers have told reaches the leader."""
        for follower in self.followers:
            while follower.told:
                self.leader.consensus.heard(follower.told.popleft())

    def catch_up(self) -> None:
        """All do all turns that there are."""
        for rank in self.followers:
            while len(rank.turns) < len(self.plan):
                self.follow(rank)


def job(index: int, rank: int, room: int = 1) -> CopyJob:
    return CopyJob(MemoryKey(room, 1, "o"), index, "peer", "h:1", (), 8, rank=rank)


def submits(*jobs: CopyJob) -> Callable[[Rank], None]:
    return lambda rank: [rank.copies.submit(each) for each in jobs] and None  # type: ignore[func-returns-value]


def expects(key: MemoryKey, ranks: int) -> Callable[[Rank], None]:
    def do(rank: Rank) -> None:
        assert not any(rank.copies.expect(key, number, 2) for number in range(ranks))

    return do


def connects(address: str, ranks: int) -> Callable[[Rank], None]:
    def do(rank: Rank) -> None:
        assert not any(rank.copies.connect(number, address) for number in range(ranks))

    return do


def same(one: Outcome, other: Outcome) -> bool:
    """But for the words of a failure."""
    if isinstance(one, CopyDone) and isinstance(other, CopyDone):
        failed = (one.failure is None, other.failure is None)
        return failed[0] == failed[1] and (one.key, one.index, one.settled, one.write_s) == (
            other.key, other.index, other.settled, other.write_s,
        )  # fmt: skip
    if isinstance(one, PeerConnected) and isinstance(other, PeerConnected):
        return (one.transport_address, one.rank, one.failure is None) == (
            other.transport_address, other.rank, other.failure is None,
        )  # fmt: skip
    return one == other


def opens(peer: str, ranks: int) -> Callable[[Rank], None]:
    return lambda rank: [rank.copies.open_receiver(number, peer) for number in range(ranks)] and None  # type: ignore[func-returns-value]


def fences(peer: str, ranks: int) -> Callable[[Rank], None]:
    return lambda rank: [rank.copies.fence(number, peer) for number in range(ranks)] and None  # type: ignore[func-returns-value]


def test_the_leader_learns_where_every_rank_receives_and_waits_until_it_has_heard() -> None:
    world = World(2)
    leader = world.leader
    world.lead(opens("p#1", 2))
    world.catch_up()
    for rank in world.ranks:
        assert rank.engine.opening == ["p#1"]
        rank.copies.post(ReceiverOpened("p#1", f"address-{rank.number}", None))
    for _ in range(4):  # the follower has an engine, but its word is on its way
        world.lead()
        world.catch_up()
        world.clock.advance(PATIENCE_S / 2)
    assert not any(isinstance(event, ReceiverOpened) and event.rank == 1 for turn in leader.turns for event in turn)
    world.next_entry()
    for _ in range(6):
        world.lead()
        world.catch_up()
        world.clock.advance(PATIENCE_S / 2)
    heard = [[event for turn in rank.turns for event in turn] for rank in world.ranks]
    assert sorted(heard[0], key=str) == [
        ReceiverOpened("p#1", "address-0", None, 0),
        ReceiverOpened("p#1", "address-1", None, 1),
    ]
    assert sorted(heard[1], key=str) == [
        ReceiverOpened("p#1", "", None, 0),
        ReceiverOpened("p#1", "address-1", None, 1),
    ]


def test_a_session_is_fenced_at_each_rank_by_that_rank_s_word() -> None:
    world = World(2)
    world.lead(fences("p#1", 2))
    world.catch_up()
    for rank in world.ranks:
        assert rank.engine.fencing == ["p#1"]
        rank.copies.post(PeerFenced("p#1", rank.number == 1))
    world.next_entry()
    for _ in range(6):
        world.lead()
        world.catch_up()
        world.clock.advance(PATIENCE_S / 2)
    for rank in world.ranks:
        found = [event for turn in rank.turns for event in turn]
        assert sorted(found, key=str) == [PeerFenced("p#1", False, 0), PeerFenced("p#1", True, 1)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(5, 60))
def test_all_ranks_hear_the_same_in_the_same_turn_and_of_each_thing_once(seed: int, num_ranks: int, steps: int) -> None:
    """Whoever is late, however outcomes, tidings and turns are mixed."""
    rng, world = random.Random(seed), World(num_ranks)
    truth: dict[Item, Outcome] = {}
    made = 0

    def end_something() -> None:
        rank = rng.choice(world.ranks)
        if rank.engine.reaching and rng.random() < 0.5:
            failure = rng.choice((None, None, BROKEN))
            address = rank.engine.reaching.pop(rng.randrange(len(rank.engine.reaching)))
            truth[address, rank.number] = PeerConnected(address, failure, rank.number)
            rank.copies.post(PeerConnected(address, failure))
        elif rank.engine.expected and rng.random() < 0.5:
            key = rank.engine.expected.pop(rng.randrange(len(rank.engine.expected)))
            note = Notified(key, rng.choice((0, 0, 3)))
            truth[key, -1 - rank.number] = Notified(key, int(note.num_missing > 0), rank.number)
            rank.copies.post(note)
        elif rank.engine.jobs:
            ended = rank.engine.jobs.pop(rng.randrange(len(rank.engine.jobs)))
            failure = rng.choice((None, None, BROKEN))
            settled = failure is None or rng.random() < 0.5
            done = CopyDone.of(ended, failure, settled=settled, write_s=rng.randrange(1 << 20) / 1e6)
            truth[ended.key, ended.index] = done
            rank.copies.post(done)

    def step() -> None:
        nonlocal made
        match rng.choice(("lead", "lead", "follow", "follow", "end", "end", "next_entry")):
            case "lead":
                does = []
                if rng.random() < 0.4:
                    jobs = [job(index, rng.randrange(num_ranks), made) for index in range(rng.randint(1, 4))]
                    does.append(submits(*jobs))
                    made += 1
                if rng.random() < 0.2:
                    does.append(expects(MemoryKey(1000 + made, 1, "o"), num_ranks))
                    made += 1
                if rng.random() < 0.2:
                    does.append(connects(f"h:{made}", num_ranks))
                    made += 1
                world.lead(*does)
            case "follow":
                behind = [rank for rank in world.followers if len(rank.turns) < len(world.plan)]
                if behind:
                    world.follow(rng.choice(behind))
            case "end":
                end_something()
            case "next_entry":
                world.next_entry()

    for _ in range(steps):
        step()
    world.catch_up()
    while any(rank.engine.jobs or rank.engine.expected or rank.engine.reaching for rank in world.ranks):
        end_something()
    for _ in range(4):
        world.next_entry()
        world.lead()
        world.catch_up()
    assert all(rank.copies.num_pending == 0 for rank in world.ranks)
    for rank in world.followers:
        for ours, theirs in zip(rank.turns, world.leader.turns, strict=True):
            assert len(ours) == len(theirs) and all(map(same, ours, theirs))
    heard = [event for turn in world.leader.turns for event in turn]
    assert len(heard) == len(truth)
    for event in heard:
        assert same(event, truth[item_of(event)])
        if isinstance(event, CopyDone | PeerConnected) and event.failure is not None:
            assert event.failure in (BROKEN, LOST), "the words, unless they have not come yet"


def test_nothing_is_reduced_without_something_pending_and_something_new() -> None:
    world = World(2)
    for _ in range(3):
        world.lead()
    world.lead(submits(job(0, rank=0), job(1, rank=1)))
    for _ in range(3):
        world.lead()
    world.catch_up()
    assert not world.reductions.rounds
    for rank, hears in ((world.leader, False), (world.followers[0], True)):
        assert not world.reductions.rounds, "a part of a transfer is no news"
        rank.copies.post(CopyDone.of(rank.engine.jobs[0], None, settled=True, write_s=0.0))
        if hears:
            world.next_entry()
        world.lead()
        world.catch_up()
    world.lead()
    assert len(world.reductions.rounds) == 1, "one for all that is polled"
    assert [event.index for event in world.leader.turns[-1]] == [0, 1]  # type: ignore[union-attr]
    for _ in range(3):
        world.lead()
    assert len(world.reductions.rounds) == 1


def test_the_leader_goes_on_while_another_rank_is_late() -> None:
    """A transfer that all have done waits for it; turns do not."""
    world = World(2)
    first = job(0, rank=0)
    world.lead(submits(first))
    world.leader.copies.post(CopyDone.of(first, None, settled=True, write_s=0.25))
    for _ in range(50):
        world.lead()
    assert not any(world.leader.turns) and len(world.reductions.rounds) == 1
    wakes = world.num_wakes
    world.catch_up()
    assert world.num_wakes > wakes, "the end of a reduction wakes the loop"
    world.lead()
    world.catch_up()
    assert world.leader.turns[-1] == [CopyDone(first.key, 0, None, True, 0.25)] == world.followers[0].turns[-1]


def test_a_failure_whose_words_have_not_come_is_a_failure() -> None:
    world = World(2)
    world.lead(submits(job(0, rank=1)))
    world.catch_up()
    (theirs,) = world.followers[0].engine.jobs
    world.followers[0].copies.post(CopyDone.of(theirs, BROKEN, settled=False, write_s=0.0))
    other = job(0, rank=1, room=9)
    world.leader.consensus.heard(CopyDone.of(other, BROKEN, settled=True, write_s=0.0))
    for _ in range(2):
        world.lead()
        world.catch_up()
    (event,) = world.leader.turns[-1]
    assert event == CopyDone(theirs.key, 0, LOST, False, 0.0)
    world.next_entry()
    assert world.leader.copies.num_reports == 1, "late"
    again = job(1, rank=0)
    world.lead(submits(again))
    world.leader.copies.post(CopyDone.of(again, None, settled=True, write_s=0.0))
    for _ in range(2):
        world.lead()
        world.catch_up()
    assert world.leader.copies.num_reports == 0, "and forgotten"


def test_what_an_engine_knows_at_once_is_agreed_on_as_well() -> None:
    world = World(3)
    for rank in world.ranks:
        rank.engine.knows = True
    key = MemoryKey(7, 1, "o")
    world.lead(expects(key, 3), connects("h:1", 3))
    world.catch_up()
    world.next_entry()
    for _ in range(2):
        world.lead()
        world.catch_up()
    expected = [Notified(key, 0, number) for number in range(3)] + [
        PeerConnected("h:1", None, number) for number in range(3)
    ]
    assert all(rank.turns[-1] == expected for rank in world.ranks)


def test_a_rank_that_is_lost_is_the_error() -> None:
    def broken(values: Tensor, then: Callable[[], None]) -> Ended:
        raise RankError("agreeing: connection closed by peer")

    copies, lost = RankCopies(0), RankError("rank 1 is gone")
    consensus = Consensus(copies, broken, LeaderLog(ManualClock(), lambda entry: None), lambda: lost, lambda: None,
                          in_step=True)  # fmt: skip
    with pytest.raises(RankError, match="rank 1 is gone"):
        consensus.poll_and_all_reduce(Reduction.BEGIN)


def test_a_word_that_comes_late_wakes_nobody_for_nothing() -> None:
    """Of what has been agreed on by then: the loop would turn again and again."""
    world = World(2)
    first = job(0, rank=1)
    world.lead(submits(first))
    world.catch_up()
    done = CopyDone.of(first, BROKEN, settled=True, write_s=0.0)
    world.followers[0].copies.post(done)
    world.next_entry()
    assert world.leader.consensus.is_due
    for _ in range(2):
        world.lead()
        world.catch_up()
    world.leader.consensus.heard(done)
    assert world.leader.copies.num_pending == 0 and not world.leader.consensus.is_due
    assert world.leader.consensus.due() is Reduction.NOTHING


def test_while_a_reduction_is_under_way_only_its_end_is_due() -> None:
    world = World(2)
    world.lead(submits(job(0, rank=0, room=1), job(0, rank=0, room=2)))
    for each in list(world.leader.engine.jobs):
        world.leader.copies.post(CopyDone.of(each, None, settled=True, write_s=0.0))
        world.lead()
    assert len(world.reductions.rounds) == 1 and not world.leader.consensus.is_due, "the other rank is late"
    world.catch_up()
    assert world.leader.consensus.is_due
    world.lead()
    world.catch_up()
    assert len(world.leader.turns[-1]) == 1 and len(world.reductions.rounds) == 2, "now the other one's turn has come"


def test_a_word_that_makes_nothing_whole_is_told_of_after_a_while() -> None:
    world = World(2)
    world.lead(submits(job(0, rank=0), job(1, rank=1)))
    world.leader.copies.post(CopyDone.of(world.leader.engine.jobs[0], None, settled=True, write_s=0.0))
    assert not world.leader.consensus.is_due
    world.clock.advance(PATIENCE_S)
    assert not world.leader.consensus.is_due
    world.clock.advance(0.001)
    assert world.leader.consensus.is_due


def test_who_asks_again_for_what_is_being_asked_for_gets_that_answer() -> None:
    """And none is left over for whoever asks next."""
    world = World(2)
    world.lead(connects("h:1", 2))
    world.lead(connects("h:1", 2))
    world.catch_up()
    assert [len(rank.engine.reaching) for rank in world.ranks] == [1, 1]
    for rank in world.ranks:
        rank.copies.post(PeerConnected("h:1", None))
        rank.copies.post(PeerConnected("h:1", BROKEN))
    for _ in range(3):
        world.next_entry()
        world.lead()
        world.catch_up()
    heard = [event for turn in world.leader.turns for event in turn]
    assert len(heard) == 2 and not any(rank.copies.num_reports for rank in world.ranks)


class _Over(Exception):
    """The leader has said all."""


def test_in_step_a_turn_takes_what_is_soon_done_and_the_others_take_it_as_well() -> None:
    """Two ranks in threads of their own, over a queue: every outcome once, in the same turn on both."""
    reductions, lock = Reductions(2), threading.Lock()
    said: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
    leader_log = LeaderLog(MonotonicClock(), said.put)

    def next_entry() -> Entry:
        entry = said.get(timeout=10.0)
        if entry is None:
            raise _Over
        return entry

    logs = (leader_log, FollowerLog("rank 1", 0.0, next_entry))
    num_rooms, mailbox, deadline = 40, Mailbox[Event](), time.monotonic() + 20.0
    sides: list[tuple[RankCopies, Consensus, Engine]] = []

    def begin(number: int) -> Callable[[Tensor, Callable[[], None]], Ended]:
        def least(values: Tensor, then: Callable[[], None]) -> Ended:
            with lock:
                return reductions.begin(number, values, then)

        return least

    for number in range(2):
        copies, engine = RankCopies(number), Engine()
        consensus = Consensus(
            copies, begin(number), logs[number], lambda: None, lambda: mailbox.post(Woken()), in_step=True
        )
        sides.append((copies, consensus, engine))
    for copies, _, engine in sides:
        copies.drive(engine, DRAIN_TIMEOUT_S, FENCE_DRAIN_TIMEOUT_S, sides[0][1].heard)
    turns: list[list[list[Outcome]]] = [[], []]

    def turn(number: int, input_source: LeaderInputSource | FollowerInputSource) -> None:
        copies, _, engine = sides[number]
        found = [event for event in input_source.drain() if not isinstance(event, Woken)]
        room = len(turns[number])
        turns[number].append(found)  # type: ignore[arg-type]
        for owner in range(2) if room < num_rooms else ():
            copies.submit(job(owner, owner, room=room))
        while engine.jobs:
            ended = engine.jobs.pop()
            copies.post(CopyDone.of(ended, BROKEN if ended.key.room % 3 else None, settled=True, write_s=0.0))

    def follow() -> None:
        input_source = FollowerInputSource(logs[1], sides[1][1])
        with contextlib.suppress(_Over):
            while True:
                turn(1, input_source)

    follower = threading.Thread(target=follow)
    follower.start()
    input_source = LeaderInputSource(mailbox, logs[0], sides[0][1])
    while len(turns[0]) < num_rooms or sides[0][0].num_pending:
        assert time.monotonic() < deadline, "they do not agree"
        turn(0, input_source)
        input_source.wait(0.01)
    said.put(None)
    follower.join(20.0)
    assert not follower.is_alive()
    for ours, theirs in zip(*turns, strict=True):
        assert len(ours) == len(theirs) and all(map(same, ours, theirs))
    items = list(map(item_of, itertools.chain(*turns[0])))
    assert len(items) == len(set(items)) and set(items) == {
        (MemoryKey(room, 1, "o"), owner) for room in range(num_rooms) for owner in range(2)
    }


def test_the_numbers_of_states_are_what_a_least_needs() -> None:
    assert KVPoll.FAILED < KVPoll.TRANSFERRING < KVPoll.SUCCESS < torch.iinfo(torch.int64).max
