"""Links to peers over several engines: who gets which, and when they end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from pdserve.errors import TransferError
from pdserve.transfer.transports.link import Link, LinkedPeers


class KitEngine:
    """An engine that knows whether it was destroyed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_destroyed = 0

    def destroy(self) -> None:
        self.num_destroyed += 1


def make(*, owned: bool = True) -> tuple[Link[KitEngine], list[KitEngine]]:
    engines = [KitEngine("a"), KitEngine("b")]
    return Link(engines, "host:1", owned=owned, num_permits=1), engines


def test_writers_at_the_same_time_get_different_engines() -> None:
    link, _ = make()
    with link.borrow() as first, link.borrow() as second:
        assert {first.name, second.name} == {"a", "b"}
        with link.borrow() as third:
            assert third is first, "both have one borrower, and this one was taken earlier"


def test_writers_one_after_the_other_take_the_engines_in_turn() -> None:
    link, _ = make()
    taken = []
    for _ in range(4):
        with link.borrow() as engine:
            taken.append(engine.name)
    assert taken == ["a", "b", "a", "b"]


def test_a_doomed_link_is_cut_when_the_last_borrower_of_any_engine_has_left() -> None:
    link, engines = make()
    with link.borrow():
        with link.borrow():
            link.doom()
            with pytest.raises(TransferError, match="given up") as caught, link.borrow():
                pass
            assert caught.value.settled
        assert not link.await_cut(0.0) and [engine.num_destroyed for engine in engines] == [0, 0]
    assert link.await_cut(0.0) and [engine.num_destroyed for engine in engines] == [1, 1]
    link.doom()
    assert [engine.num_destroyed for engine in engines] == [1, 1]


def test_shared_engines_are_not_destroyed() -> None:
    link, engines = make(owned=False)
    link.doom()
    assert link.doomed and not link.await_cut(0.0), "nobody can promise that no byte moves"
    assert [engine.num_destroyed for engine in engines] == [0, 0]


class SlowDoor:
    """Opens links, or fails to, when it is told to; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.failure: TransferError | None = None
        self.opened: list[Link[KitEngine]] = []
        self.num_asked = 0

    def open(self, session: str) -> Link[KitEngine]:
        self.num_asked += 1
        self.asked.set()
        assert self.may_answer.wait(30.0)
        if self.failure is not None:
            raise self.failure
        self.opened.append(Link([KitEngine(session)], session, owned=True, num_permits=1))
        return self.opened[-1]


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_connect_at_the_same_time_share_one_attempt_and_what_comes_of_it(fails: bool) -> None:
    """A link that is opened for nothing has to be destroyed again, which took its thread seconds."""
    drain_gate = SlowDoor()
    drain_gate.failure = TransferError("nobody there", code="peer_unreachable") if fails else None
    peers = LinkedPeers(drain_gate.open)
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(peers.connect, "here", "host:1")]
        assert drain_gate.asked.wait(30.0)
        connecting += [pool.submit(peers.connect, "here", "host:1") for _ in range(2)]
        assert not wait(connecting, timeout=0.2).done, "somebody did not wait for what comes of it"
        drain_gate.may_answer.set()
        errors = [one.exception(30.0) for one in connecting]
    assert drain_gate.num_asked == 1
    if fails:
        assert all(isinstance(error, TransferError) for error in errors)
        drain_gate.failure = None
        peers.connect("here", "host:1")
        assert len(drain_gate.opened) == 1, "a later attempt is one of its own"
    else:
        assert errors == [None] * 3
        assert peers.get("here").usable_link() is drain_gate.opened[0]
        assert not drain_gate.opened[0].doomed
