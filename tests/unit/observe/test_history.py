"""The history of a server or a router: points, their fields, time windows, and the meter of a request."""

from __future__ import annotations

import pytest

from pdserve.errors import RequestError
from pdserve.observe.history import INTERVAL_S, NUM_POINTS, History, StoreTraffic

ERROR = b'data: {"error":{"code":"worker_failed"}}\n\n'


def test_a_stream_has_a_first_a_second_and_later_pieces() -> None:
    history = History()
    meter = history.meter(100.0)
    meter.name = "http://d"
    for piece, now_s in ((b"data: 1\n\n", 100.5), (b"data: 2\n\n", 100.7), (b"data: 3\n\n", 100.8)):
        meter.piece(piece, now_s)
    meter.piece(b"data: [DONE]\n\n", 200.0)
    meter.ended(failed=False)
    history.record(1000.0, {"queued": 3}, {"http://d": {"running": 1}})
    for query in ({}, {"worker": "http://d"}):
        series = history.answer(query, 1000.0)["series"]
        assert series["ttft_p50_s"] == [pytest.approx(0.5, rel=0.05)]
        assert series["second_token_p99_s"] == [pytest.approx(0.7, rel=0.05)]
        assert series["itl_p99_s"] == [pytest.approx(0.2, rel=0.05)]
        assert series["itl_p50_s"] == [pytest.approx(0.1, rel=0.05)]
        assert (series["requests"], series["failed"]) == ([1], [0])
    assert history.answer({}, 1000.0)["series"]["queued"] == [3]
    assert "queued" not in history.answer({"worker": "http://d"}, 1000.0)["series"], "no value is no field"


@pytest.mark.parametrize("piece", [ERROR, b"data: 2\n\n" + ERROR, b'event: error\ndata: {"type":"error"}\n\n'])
def test_an_error_event_makes_the_request_a_failed_one(piece: bytes) -> None:
    history = History()
    meter = history.meter(0.0)
    meter.piece(b"data: 1\n\n", 1.0)
    meter.piece(piece, 2.0)
    meter.ended(failed=False)
    text = history.meter(0.0)
    text.piece(rb'data: {"text":"data: {\"error\":"}' + b"\n\n", 1.0)
    text.ended(failed=False)
    history.record(5.0, {})
    assert history.answer({}, 5.0)["series"]["failed"] == [1]


def test_the_oldest_points_go_and_windows_are_of_their_seconds() -> None:
    history = History()
    for number in range(NUM_POINTS + 20):
        meter = history.meter(0.0)
        meter.piece(b"data: 1\n\n", 10.0 if number < NUM_POINTS else 1.0)
        meter.ended(failed=number % 2 == 0)
        history.record(number * INTERVAL_S, {"running": number})
    answer = history.answer({}, (NUM_POINTS + 19) * INTERVAL_S)
    assert len(answer["times"]) == NUM_POINTS and answer["times"][0] == 20 * INTERVAL_S
    assert answer["series"]["running"] == list(range(20, NUM_POINTS + 20))
    windows = answer["windows"]
    assert {name: one["requests"] for name, one in windows.items()} == {"60": 12, "300": 60, "900": NUM_POINTS}
    assert windows["60"]["failed"] == 6
    assert windows["60"]["ttft_p99_s"] == pytest.approx(1.0, rel=0.05)
    assert windows["900"]["ttft_p50_s"] == pytest.approx(10.0, rel=0.05)


def test_a_reader_gets_the_points_that_it_has_not_seen() -> None:
    history = History()
    for number in range(10):
        history.record(number * 5.0, {"running": number})
    assert history.answer({"since": "30"}, 45.0)["times"] == [35.0, 40.0, 45.0]
    assert history.answer({"seconds": "10"}, 45.0)["series"]["running"] == [8, 9]
    assert history.answer({"since": "45"}, 45.0)["series"] == {}


def test_a_worker_begins_later_and_goes() -> None:
    history = History()
    history.record(5.0, {}, {"a": {"running": 1}})
    history.record(10.0, {}, {"a": {"running": 2}, "b": {"running": 7}})
    answer = history.answer({"worker": "b"}, 10.0)
    assert answer["series"]["running"] == [None, 7] and answer["workers"] == ["a", "b"]
    meter = history.meter(0.0)
    meter.name = "a"
    meter.ended(failed=True)
    history.record(15.0, {}, {"b": {"running": 8}})
    assert history.answer({}, 15.0)["series"]["failed"][-1] == 1, "its last requests are the fleet's"
    with pytest.raises(RequestError, match="worker") as caught:
        history.answer({"worker": "a"}, 15.0)
    assert caught.value.status == 404


@pytest.mark.parametrize("query", [{"seconds": "x"}, {"since": "-1"}, {"seconds": "nan"}, {"since": "inf"}])
def test_a_bad_number_is_named(query: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=next(iter(query))):
        History().answer(query, 0.0)


def test_the_traffic_of_a_store_is_the_difference_of_its_totals() -> None:
    traffic = StoreTraffic()
    assert traffic.rates(100.0, 5e9, 0.0) == {}, "a total alone is no rate"
    assert traffic.rates(105.0, 5e9 + 1000, 500.0) == {"kv_store_read": 200.0, "kv_store_written": 100.0}
    assert traffic.rates(107.0, 5e9 + 1000, 500.0) == {"kv_store_read": 0.0, "kv_store_written": 0.0}
    assert traffic.rates(107.0, 6e9, 700.0) == {}, "no time has passed"
    assert traffic.rates(110.0, 300.0, 800.0) == {}, "the server has started anew"
    assert traffic.rates(112.0, 320.0, 800.0) == {"kv_store_read": 10.0, "kv_store_written": 0.0}
