"""Posts from many threads arrive once each, in each poster's order, and wake a waiting reader."""

from __future__ import annotations

import threading

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
