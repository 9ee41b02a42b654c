"""Rooms have the shape that workers expect, and every sequence its own."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pdserve.protocol.messages import MAX_ROOM
from pdserve.router.proxy.attempts import batch_size, mint, num_sequences, with_rooms

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize(
    ("path", "body", "size"),
    [
        (CHAT, {"messages": []}, None),
        (CHAT, {"n": 1}, None),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": "3"}, None),
        (COMPLETIONS, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": "a", "n": 4}, None),
        (COMPLETIONS, {"prompt": ["a"]}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 2),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (COMPLETIONS, {"prompt": []}, None),
        (COMPLETIONS, {}, None),
        (GENERATE, {"text": "a"}, None),
        (GENERATE, {"text": ["a", "b"]}, 2),
        (GENERATE, {"text": ["a", "b"], "input_ids": None}, 2),
        (GENERATE, {"input_ids": [1, 2]}, None),
        (GENERATE, {"input_ids": [[1], [2], [3]]}, 3),
        (GENERATE, {"text": "a", "sampling_params": {"n": 2}}, None),
    ],
)
def test_batches_and_chat_n_get_lists_and_the_rest_one_room(path: str, body: dict[str, Any], size: int | None) -> None:
    assert batch_size(path, body) == size
    fields = json.loads(with_rooms(path, body, json.dumps(body).encode(), "10.0.0.1", None, random.Random(1)))
    assert {key: value for key, value in fields.items() if not key.startswith("bootstrap_")} == body
    if size is None:
        assert fields["bootstrap_host"] == "10.0.0.1" and fields["bootstrap_port"] is None
        assert 0 <= fields["bootstrap_room"] <= MAX_ROOM
    else:
        assert fields["bootstrap_host"] == ["10.0.0.1"] * size and fields["bootstrap_port"] == [None] * size
        assert len(set(fields["bootstrap_room"])) == size


@pytest.mark.parametrize(
    ("body", "count"),
    [({}, 1), ({"n": 5}, 5), ({"n": 0}, 1), ({"n": True}, 1), ({"n": 1 << 60}, 1), ({"sampling_params": {"n": 7}}, 7)],
)
def test_sequences_of_a_request(body: dict[str, Any], count: int) -> None:
    assert num_sequences(body) == count


def test_the_room_of_the_last_sequence_stays_within_63_bits() -> None:
    class Highest(random.Random):
        def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
            return start - 1 if stop is None else stop - 1

    for sequences in (1, 2, 100):
        assert mint(Highest(), sequences) + sequences - 1 == MAX_ROOM


def test_the_clients_own_bootstrap_fields_are_replaced() -> None:
    body = {"text": "a", "bootstrap_host": "2.2.2.2", "bootstrap_room": 1, "bootstrap_port": 5}
    fields = json.loads(with_rooms(GENERATE, body, json.dumps(body).encode(), "127.0.0.1", 9, random.Random(3)))
    assert len(fields) == 4
    assert (fields["bootstrap_host"], fields["bootstrap_port"]) == ("127.0.0.1", 9)
    assert fields["bootstrap_room"] != 1


def test_the_clients_json_is_kept_as_it_is_beside_the_rooms() -> None:
    data = b' {"text": "\\u00e4}", "n": 1e2, "a": {"b": []} }\n'
    sent = with_rooms(GENERATE, json.loads(data), data, "h", None, random.Random(1))
    assert sent.startswith(data.rstrip(b"}\n")) and json.loads(sent).items() > json.loads(data).items()
