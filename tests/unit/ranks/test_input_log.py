"""What the leader sees is what all ranks decide by, in its order; and who reads something else says so."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import get_args

import numpy as np
import pytest

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.errors import RankError
from pdserve.executor.interface import StepResult
from pdserve.protocol.hidden_states import HiddenStates
from pdserve.protocol.messages import AbortRequest, FlushCache, GenerateRequest, StateQuery, StopProfile
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.consensus import Reduction
from pdserve.ranks.input_log import PART_BYTES, FollowerLog, LeaderLog, TickInput
from pdserve.ranks.messages import Entry, SharedEvent, Tick, follower_codec
from pdserve.ranks.pre_step import StepRebalancer
from pdserve.ranks.rank_executor import SharedMetadata
from pdserve.scheduler.input_source import OWN, FollowerInputSource, LeaderInputSource
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.aux import AuxRecord
from pdserve.transfer.events import (
    CopyDone,
    FrameArrived,
    Notified,
    PeerConnected,
    PeerFenced,
    PeerHandshakeFailed,
    ReceiverOpened,
)


@dataclasses.dataclass
class Logs:
    """A leader's and a follower's, with what was said between them."""

    clock: ManualClock
    said: deque[Entry]
    leader: LeaderLog
    follower: FollowerLog


@pytest.fixture
def logs() -> Logs:
    clock, said = ManualClock(5.0), deque[Entry]()
    return Logs(clock, said, LeaderLog(clock, said.append), FollowerLog("rank 1", 5.0, said.popleft))


def test_all_ranks_have_the_same_time_and_it_moves_with_what_is_said(logs: Logs) -> None:
    assert logs.leader.now() == logs.follower.now() == 5.0
    logs.clock.advance(1.0)
    assert logs.leader.now() == 5.0, "nobody else would know"
    tick_input = TickInput([AbortRequest(rid="a")], 2, 3)
    assert logs.leader.tick(tick_input) is tick_input
    logs.leader.launched(3, 17)
    logs.clock.advance(1.0)
    result = StepResult(3, ())
    assert logs.leader.step_ended(result) is result and logs.leader.now() == 7.0
    assert logs.leader.answer(lambda: True)
    assert logs.follower.tick(TickInput(num_pending=3)) == tick_input and logs.follower.now() == 6.0
    logs.follower.launched(3, 17)
    assert logs.follower.step_ended(StepResult(3, ())) == result and logs.follower.now() == 7.0
    assert logs.follower.answer(lambda: False), "the leader's answer"
    assert not logs.said


def test_followers_learn_which_hidden_states_were_computed_but_not_their_values(logs: Logs) -> None:
    states = HiddenStates.pack(4, 2, np.ones((2, 8), dtype=np.float32))
    result = StepResult(3, (None,), hidden={0: states})
    assert logs.leader.step_ended(result) is result
    followed = logs.follower.step_ended(StepResult(3, ())).hidden[0]
    assert (followed.start, followed.end, followed.values) == (4, 6, b"")
    assert list(followed.parts(1)) == [followed]


def test_a_follower_that_is_elsewhere_says_so(logs: Logs) -> None:
    logs.leader.answer(lambda: True)
    with pytest.raises(RankError, match="rank 1 expects Tick, but rank 0 sent Answer: the schedulers of the ranks"):
        logs.follower.tick(TickInput())
    for step, seen in ((4, 17), (3, 18)):
        logs.leader.launched(3, 17)
        with pytest.raises(RankError, match=f"rank 1 has planned step {step} differently than rank 0, .* at step 3"):
            logs.follower.launched(step, seen)
    logs.leader.step_ended(StepResult(3, ()))
    with pytest.raises(RankError, match="rank 1 has computed step 4, rank 0 has computed step 3"):
        logs.follower.step_ended(StepResult(4, ()))
    logs.leader.tick(TickInput((), Reduction.BEGIN, 2))
    with pytest.raises(RankError, match="rank 1 has 1 pending transfer items, rank 0 has 2"):
        logs.follower.tick(TickInput(num_pending=1))


def test_what_came_in_is_told_in_parts_where_it_is_much(logs: Logs) -> None:
    """Prompts and frames by the thousand, in one turn."""
    large = [FrameArrived(bytes([number]) * (3 << 20)) for number in range(7)]
    long = [GenerateRequest(rid=str(n), input_ids=[1] * 500_000, sampling=CoreSamplingParams(seed=1)) for n in range(5)]
    events = [*large, *long, AbortRequest(rid="0")]
    logs.leader.tick(TickInput(events, 0, 0))
    sizes = [len(follower_codec().encode(entry)) for entry in logs.said]
    assert len(sizes) > 3 and max(sizes) < PART_BYTES + (1 << 20)
    assert logs.follower.tick(TickInput()).events == events and not logs.said


def test_questions_to_the_leader_and_what_only_wakes_it_are_its_own_affair(logs: Logs) -> None:
    mailbox: Mailbox[Event] = Mailbox()
    leader, follower = LeaderInputSource(mailbox, logs.leader, None), FollowerInputSource(logs.follower, None)
    shared = [FrameArrived(b"x"), FlushCache(query_id="f"), AbortRequest(rid=None)]
    alone = [StateQuery(query_id="s"), Woken(), StopProfile(query_id="p")]
    mixed = [alone[0], shared[0], shared[1], alone[1], shared[2], alone[2]]
    for event in mixed:
        mailbox.post(event)
    assert leader.wait(0.0) and list(leader.drain()) == mixed
    assert follower.wait(0.0) and list(follower.drain()) == shared
    assert not leader.drain() and not follower.drain(), "an empty turn is one, too: time goes on"


def test_every_event_that_a_loop_hears_is_shared_or_the_leader_s_own() -> None:
    """A follower cannot read others, and would end: an event that strangers cause would end a replica."""
    of_copies = (
        CopyDone | Notified | PeerConnected | ReceiverOpened | PeerFenced
    )  # each rank has its own, see `RankCopies`
    assert set(get_args(Event)) == {*get_args(SharedEvent), *get_args(OWN), *get_args(of_copies)}
    entry = Tick(now=0.0, events=(PeerHandshakeFailed("127.0.0.1:1"),))
    assert follower_codec().decode(follower_codec().encode(entry)) == entry


def test_a_request_without_a_seed_gets_one_for_all_ranks(logs: Logs) -> None:
    mailbox: Mailbox[Event] = Mailbox()
    for rid, seed in (("a", None), ("b", 5), ("c", None)):
        mailbox.post(GenerateRequest(rid=rid, input_ids=[1], sampling=CoreSamplingParams(seed=seed, stop=("x",))))
    ours = list(LeaderInputSource(mailbox, logs.leader, None).drain())
    assert list(FollowerInputSource(logs.follower, None).drain()) == ours
    seeds = [event.sampling.seed for event in ours if isinstance(event, GenerateRequest)]
    assert seeds[1] == 5 and None not in seeds and seeds[0] != seeds[2]


def test_all_ranks_read_what_is_in_the_leader_s_slot(logs: Logs) -> None:
    ours, theirs = SharedMetadata(3, logs.leader), SharedMetadata(3, logs.follower)
    record = AuxRecord(room=7, attempt=2, first_token=99, cached_tokens=16, logprob=-0.25, top=((5, -1.0),))
    ours.write(1, record)
    assert ours.read(1) == record == theirs.read(1)


class Planner:
    """Stands for `ExpertBalance`: a plan is there when the test says so."""

    def __init__(self) -> None:
        self.is_planned = False
        self.told: list[str] = []

    def plan(self) -> None:
        self.told.append("plan")

    def place(self) -> None:
        self.told.append("place")


def test_experts_move_on_all_ranks_between_the_same_steps(logs: Logs) -> None:
    """When the leader's plan is there; a follower waits for its own, and a stage without experts keeps count."""
    ours, theirs = Planner(), Planner()
    leader = StepRebalancer(ours, logs.leader, 3)  # type: ignore[arg-type]
    follower = StepRebalancer(theirs, logs.follower, 3)  # type: ignore[arg-type]
    for step in range(1, 8):
        ours.is_planned = step == 7
        for rank in (leader, follower):
            rank.before_step(step)
        assert ours.told == theirs.told == ["plan", "place"][: (step >= 4) + (step >= 7)], step
    assert not logs.said
    empty = StepRebalancer(None, logs.follower, 3)
    again = StepRebalancer(ours, logs.leader, 3)  # type: ignore[arg-type]
    for step in range(1, 7):
        again.before_step(step)
        empty.before_step(step)
    assert not logs.said
