"""Schemathesis plays the router's OpenAPI document before a real pair, for `test_bad_input`, which has one running."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import requests
import schemathesis
from schemathesis.generation import GenerationMode

from tests.e2e.harness import Pair
from tests.e2e.test_fuzzed_api import LATER, SOUND, UNDO, as_it_is, play, some_fields

ADDS_WORKERS = ("/workers", "/add_worker")
OWN = frozenset({*ADDS_WORKERS, "/workers/{name}", "/remove_worker", "/metrics", "/engine_metrics", "/observe", "/"})


def nowhere(case: Any, data: Any) -> None:
    """All made up, but no host is asked that is not this one."""
    fields = case.body if case.operation.path == "/workers" else case.query
    if isinstance(fields, dict) and str(fields.get("url", "")).lstrip().lower().startswith("http"):
        fields["url"] = "http://127.0.0.1:1"


def play_all(pair: Pair, count: int, *, all_paths: bool) -> Counter[int]:
    """`count` requests to every operation with bodies after the document, and as many against it; to those that
    answer, three times as many with sound bodies but for some fields, whose statuses are returned. Without `all_paths`
    those that are slow, or other names of others, are left out.

    Workers that are added meanwhile are dead; both real ones must be there at the end, without a request.
    """
    document = schemathesis.openapi.from_url(f"{pair.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert {operation.path for operation in operations} >= OWN | SOUND.keys() | UNDO.keys()
    seen: Counter[int] = Counter()
    for operation in operations:
        if not all_paths and re.search(LATER, operation.path):
            continue
        change = nowhere if operation.path in ADDS_WORKERS else as_it_is
        few = count if operation.path not in UNDO else max(2, count // 5)
        play(operation, GenerationMode.POSITIVE, few, change)
        if len(operation.body) or operation.query:
            play(operation, GenerationMode.NEGATIVE, few, change)
        if operation.path in SOUND:
            seen += play(operation, GenerationMode.POSITIVE, 3 * count, some_fields)
            seen += play(operation, GenerationMode.NEGATIVE, 3 * count, some_fields)
        if operation.path in UNDO:
            answer = requests.post(pair.url + UNDO[operation.path], timeout=60)
            assert answer.status_code in (200, 400), answer.text
    workers = requests.get(f"{pair.url}/workers", timeout=10).json()["workers"]
    alive = {worker["url"]: worker["load"] for worker in workers if worker["is_healthy"]}
    assert alive == {server.url: 0 for server in pair.workers}
    return seen
