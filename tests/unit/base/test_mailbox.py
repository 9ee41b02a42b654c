"""Posts from many threads arrive once each, in each poster's order, and wake a waiting reader."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from pdserve.base.mailbox import Mailbox


def test_drain_takes_everything_once_and_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for event in range(3):
        mailbox.post(event)
    assert mailbox.drain() == [0, 1, 2]
    assert mailbox.drain() == []


def test_wait_says_whether_there_is_an_event_and_takes_none() -> None:
    mailbox: Mailbox[str] = Mailbox()
    assert not mailbox.wait(0.0)
    mailbox.post("a")
    assert mailbox.wait(0.0)
    assert mailbox.drain() == ["a"]
    assert not mailbox.wait(0.0)


def test_post_wakes_a_waiting_reader() -> None:
    mailbox: Mailbox[str] = Mailbox()
    woken: list[bool] = []
    reader = threading.Thread(target=lambda: woken.append(mailbox.wait(30.0)))
    reader.start()
    mailbox.post("a")
    reader.join(timeout=10.0)
    assert woken == [True]


def test_events_of_each_poster_keep_their_order() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox()

    def post_all(poster: int) -> None:
        for number in range(500):
            mailbox.post((poster, number))

    posters = [threading.Thread(target=post_all, args=(poster,)) for poster in range(4)]
    for thread in posters:
        thread.start()
    seen: list[tuple[int, int]] = []
    while len(seen) < 2000:
        assert mailbox.wait(10.0)
        seen += mailbox.drain()
    for thread in posters:
        thread.join()
    for poster in range(4):
        assert [number for who, number in seen if who == poster] == list(range(500))


class Pipe:
    """A `EventSource` of the bytes that are written to a pipe."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        return self._read

    def ready(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])

    def take(self) -> list[str]:
        return list(os.read(self._read, 100).decode()) if self.ready() else []

    def put(self, text: str) -> None:
        os.write(self._write, text.encode())

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_what_arrives_at_a_source_is_drained_with_what_was_posted(pipe: Pipe) -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.attach(pipe)
    assert not mailbox.wait(0.0) and mailbox.drain() == []
    pipe.put("bc")
    assert mailbox.wait(0.0)
    mailbox.post("a")
    assert mailbox.drain() == ["b", "c", "a"], "what was posted may say that no more comes"
    assert not mailbox.wait(0.0)


def test_a_source_and_a_post_each_wake_the_reader_and_it_sleeps_again_in_between(pipe: Pipe) -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.attach(pipe)
    seen: list[str] = []

    def read() -> None:
        while len(seen) < 100:
            assert mailbox.wait(30.0)
            seen.extend(mailbox.drain())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        (pipe.put if number % 2 else mailbox.post)("x")
    reader.join(timeout=30.0)
    assert not reader.is_alive() and seen == ["x"] * 100
    assert not mailbox.wait(0.0)


def test_stale_events_are_discarded_and_the_others_keep_their_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for event in range(6):
        mailbox.post(event)
    mailbox.discard(lambda event: event % 2 == 1)
    mailbox.post(7)
    assert mailbox.drain() == [0, 2, 4, 7]
