"""Load of a replica over zmq: SGLang's wire, a load for each new subscriber, and the numbers of a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from pdserve.config.kv_events_group import LOAD_FIELD, parse_kv_events, parse_load_endpoint
from pdserve.errors import ConfigError
from pdserve.observe.load_events import LoadPublisher, LoadStat

STAT = LoadStat(2, 3, 400, 1000, 1, 50, 450, 8, 7000, 90_000)
EVENTS = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:7000", "bind": true}'


@contextlib.contextmanager
def reading(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber, as SGLang's router is one."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        socket.subscribe(b"load")
        yield socket


def test_the_wire_is_sglangs_and_a_new_subscriber_gets_the_present_load() -> None:
    endpoint = parse_load_endpoint("tcp://127.0.0.1:0", None)
    assert endpoint is not None
    publisher = LoadPublisher(endpoint, 1)
    try:
        publisher.post(STAT)
        for first in (0, 1):
            with reading(publisher.endpoint) as socket:
                topic, number, payload = socket.recv_multipart()
                assert topic == b"load" and int.from_bytes(number, "big", signed=True) >= first
                assert msgspec.msgpack.decode(payload) == ["LoadStat", 2, 3, 400, 1000, 1, 50, 450, 8, 7000, 90_000]
                publisher.post(msgspec.structs.replace(STAT, num_running_reqs=5 + first))
                while msgspec.msgpack.decode(payload)[1] != 5 + first:
                    _, number, payload = socket.recv_multipart()
                publisher.post(STAT)
                while msgspec.msgpack.decode(payload)[1] != 2:
                    _, number, payload = socket.recv_multipart()
    finally:
        publisher.close()
        publisher.close()
    taken = zmq.Context()
    with taken, taken.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        again = parse_load_endpoint(f"tcp://127.0.0.1:{port}", None)
        assert again is not None
        with pytest.raises(ConfigError) as caught:
            LoadPublisher(again)
        assert caught.value.field == LOAD_FIELD


@pytest.mark.parametrize(
    ("text", "events", "address"),
    [
        (None, EVENTS, None),
        ("off", EVENTS, None),
        ("auto", EVENTS, "tcp://127.0.0.1:7002"),
        ("auto", EVENTS[:-1] + ', "replay_endpoint": "tcp://127.0.0.1:7003"}', "tcp://127.0.0.1:7005"),
        ("auto", EVENTS[:-1] + ', "replay_endpoint": "tcp://127.0.0.1:7009"}', "tcp://127.0.0.1:7002"),
        ("auto", EVENTS.replace("7000", "0"), "tcp://127.0.0.1:0"),
        ("tcp://*:6000", EVENTS, "tcp://*:6000"),
        ("tcp://127.0.0.1:6000", None, "tcp://127.0.0.1:6000"),
        ("ipc:///tmp/load", None, "ipc:///tmp/load"),
    ],
)
def test_endpoints(text: str | None, events: str | None, address: str | None) -> None:
    found = parse_load_endpoint(text, parse_kv_events(events, 2), 2)
    assert (None if found is None else found.of_replica(0)) == address


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("auto", None),
        ("auto", EVENTS.replace("true", "false")),
        ("auto", '{"publisher": "zmq", "endpoint": "ipc:///tmp/x"}'),
        ("auto", EVENTS.replace("7000", "65533")),
        ("tcp://127.0.0.1:7001", EVENTS),
        ("ipc:///tmp/x", '{"publisher": "zmq", "endpoint": "ipc:///tmp/x"}'),
        ("127.0.0.1:7000", None),
        ("", None),
        ("tcp://127.0.0.1:65535", None),
    ],
)
def test_wrong_endpoints_are_refused_by_the_flag(text: str, events: str | None) -> None:
    with pytest.raises(ConfigError, match="--load-publish-endpoint") as caught:
        parse_load_endpoint(text, parse_kv_events(events, 2), 2)
    assert caught.value.field == LOAD_FIELD
