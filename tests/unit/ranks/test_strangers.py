"""Strangers at the ports of ranks and at the rendezvous: what they send is refused, and ends no rank."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import zmq
from torch.distributed import HashStore

from pdserve.errors import ProtocolError, RankError
from pdserve.protocol.codec import Seal
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.links import RankLink
from pdserve.ranks.messages import Alive, PoolSize, ToFollower, ToLeader, follower_codec, leader_codec
from pdserve.ranks.rendezvous import Introduction
from tests.unit.ranks.kit import HOST, TIMES, TOKEN, Losses, Tap, talking
from tests.waiting import wait_until

NAMES = ("rank 0", "rank 1")


# ---------------------------------------------------------------------- frames


def test_frames_of_strangers_are_refused_and_orders_keep_their_order(tap: Tap) -> None:
    with talking() as (leader, follower, got, losses):
        tap.send(follower, [b"", b"x", b"y" * 100, Seal("guess").close(b"y" * 100)])
        for number in range(500):
            leader.broadcast(PoolSize(number))
        wait_until(lambda: len(got) == 500 and follower.refused == 4, "all orders, and none of the stranger's")
        assert got == [PoolSize(number) for number in range(500)]
        assert not losses.errors


def test_a_recorded_frame_counts_once(tap: Tap) -> None:
    with talking(tap=tap.endpoint) as (leader, follower, got, losses):
        frames: list[bytes] = []
        for number in range(10):
            leader.broadcast(PoolSize(number))
        while len(got) < 10:
            frames += tap.take(1)
            tap.send(follower, [frames[-1], frames[-1], frames[0]])
            heard = len(frames)
            wait_until(lambda heard=heard: follower.refused == 2 * heard, "both repeats are refused")
        assert got == [PoolSize(number) for number in range(10)]
        assert not losses.errors


def test_a_recorded_frame_opens_for_no_other_rank_and_at_no_later_start(tap: Tap) -> None:
    """A frame that went to rank 1 is sent back to rank 0, to rank 2, and to both after they were started anew."""
    with contextlib.ExitStack() as stack:
        leader, _, _, losses = stack.enter_context(talking(tap=tap.endpoint))
        frames = tap.take(3)
        later = stack.enter_context(talking())
        other: RankLink[ToLeader, ToFollower] = RankLink(2, HOST, leader_codec(), follower_codec(), TIMES)
        stack.callback(other.close)
        of_leader = PeerRank(0, NAMES[0], tap.endpoint, leader.nonce)
        heard: list[object] = []
        other.connect(
            [of_leader], TOKEN, alive=Alive(), on_message=lambda *said: heard.append(said), on_lost=Losses()
        )  # fmt: skip
        for links in (leader, other, *later[:2]):
            tap.send(links, frames)
            wait_until(lambda links=links: links.refused == len(frames), f"rank {links.rank} refuses all")
        assert not heard and not losses.errors and not later[3].errors


def test_a_stranger_who_sends_without_a_pause_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten frames that come nine are a stranger's, and there is always a next one."""
    with talking(LinkTimes(beat_s=0.05, silent_s=1.0, grace_s=0.1)) as (leader, follower, _, losses):
        real, turns = follower.receive, itertools.count()

        def receive() -> bytes:
            if next(turns) % 10 == 0:
                with contextlib.suppress(zmq.Again):
                    return real()
            return b"junk"

        with monkeypatch.context() as patch:
            patch.setattr(follower, "receive", receive)
            since = leader.num_heard
            wait_until(lambda: leader.num_heard > since + 30 or bool(losses.errors), "heartbeats beside the junk")
        assert not losses.errors and follower.refused > 0


# ---------------------------------------------------------------------- the rendezvous


def meet(store: HashStore, rank: int, timeout_s: float = 5.0) -> Introduction:
    return Introduction(NAMES, rank, store, TOKEN, {}, timeout_s)


def test_a_contact_opens_only_with_the_token_and_where_its_rank_wrote_it() -> None:
    store = HashStore()
    meet(store, 0).publish("tcp://127.0.0.1:1", "nonce")
    assert meet(store, 1).lookup(0) == PeerRank(0, meet(store, 1).lookup(0).name, "tcp://127.0.0.1:1", "nonce")
    for forged in (store.get("contact/0"), b"", b"zz", Seal("guess").close(b"contact").hex(), b"\xff" * 40):
        store.set("contact/1", forged)
        with pytest.raises(RankError, match="rank 1 was started with another PDSERVE_CONTROL_TOKEN"):
            meet(store, 0).lookup(1)


def test_guesses_of_the_token_cannot_be_tested_without_stretching_them() -> None:
    store = HashStore()
    meet(store, 0).publish("tcp://127.0.0.1:1", "nonce")
    sealed = bytes.fromhex(store.get("contact/0").decode())
    with pytest.raises(ProtocolError, match="not sealed"):
        Seal(TOKEN).open(sealed, max_bytes=len(sealed))


@pytest.mark.parametrize("written", [b"tp_size: rank 7 has 8", b"00" * 40, b"\xff"])
def test_what_a_stranger_writes_refuses_nobody(written: bytes) -> None:
    store = HashStore()
    store.set("refused", written)
    with pytest.raises(RankError, match=r"rank 1 did not come within 0\.1 s"):
        meet(store, 0, timeout_s=0.1).lookup(1)
