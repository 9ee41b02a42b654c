"""Links to peers over several engines: who gets which, and when they end."""

from __future__ import annotations

import pytest

from pdserve.errors import TransferError
from pdserve.transfer.transports.link import Link


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
