"""Prefixes that are copied to another decode server, and requests that move there in stages: on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.e2e.moves import Servers, greedy, refusal, servers
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = ("--dtype", "float32", "--max-total-tokens", "16384", "--disaggregation-transfer-backend", "shm")
CACHED = "--disaggregation-decode-enable-radix-cache"


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Servers]:
    """Two decode servers with a prefix cache; the prefill server has none."""
    flags = ("--disable-radix-cache",)
    with servers(str(tiny_checkpoint("llama")), [(CACHED,), (CACHED,)], *COMMON, prefill=flags) as made:
        yield made


def test_a_copied_prefix_is_found_there(pair: Servers) -> None:
    """With and without a salt; a prefix of another salt is none."""
    source, target = pair.decodes
    for number, salt in enumerate(({}, {"cache_salt": "ours"})):
        body = greedy(8, 100, seed=7 + number) | salt
        expected = pair.run(source, body)
        asked = {"input_ids": body["input_ids"], "to": target.url, **salt}
        wrong = requests.post(f"{source.url}/replicate", json={**asked, "cache_salt": "theirs"}, timeout=60)
        assert refusal(wrong) == (404, "no_prefix", "input_ids")
        answer = requests.post(f"{source.url}/replicate", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["num_tokens"] == 96
        events = list(pair.events(target, body))
        assert events[-1]["meta_info"]["cached_tokens"] == 96
        assert events[-1]["output_ids"] == expected["ids"]
        other = list(pair.events(target, {**body, "cache_salt": "theirs"}))
        assert other[-1]["meta_info"]["cached_tokens"] == 0, "salts do not share pages"


def test_a_long_request_moves_in_stages(pair: Servers) -> None:
    source, target = pair.decodes
    sent = source.counter("prefixes_sent")
    (answer,) = pair.check_moves(source, target, greedy(300, 1500, seed=3))
    assert answer["num_stages"] >= 1
    assert source.counter("prefixes_sent") - sent == answer["num_stages"]
