"""Schemathesis plays our OpenAPI document against a real server: whatever it sends, no 5xx, nothing undocumented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.e2e.harness import Server, assert_idle, running_monolith
from tests.tiny import Family

NOT_FUZZED = r"^/(start_profile|stop_profile|pause_generation|health_generate|v1/tokenize|v1/detokenize)$"
"""These change what the server does for all others, or wait for it; or are other names of others."""
SHORT = {"max_new_tokens": 3}
SOUND: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": SHORT},
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
}
"""Bodies that are answered, for single fields to be put in: bodies all made up seldom get past the first check."""
KEPT = ("model", "rid", "priority", "bootstrap_room", "bootstrap_host", "bootstrap_port")
"""Fields of `SOUND` that stay: nearly any other value is the same refusal."""


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Server]:
    flags = (
        "--served-model-name",
        "tiny",
        "--max-total-tokens",
        "4096",
        "--dtype",
        "float32",
        "--context-length",
        "256",
    )
    with running_monolith(str(tiny_checkpoint("llama")), *flags) as started:
        yield started


def play(operation: Any, mode: GenerationMode, count: int, change: Callable[[Any, Any], None]) -> Counter[int]:
    """`count` requests to `operation`, each changed by `change(case, data)` before it is sent; the statuses."""
    seen: Counter[int] = Counter()

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def ask(case: Any, data: Any) -> None:
        change(case, data)
        answer = case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=60)
        seen[answer.status_code] += 1

    ask()
    return seen


def as_it_is(case: Any, data: Any) -> None:
    """All made up."""


def some_fields(case: Any, data: Any) -> None:
    """A sound body with up to two fields that are made up."""
    made_up = case.body if isinstance(case.body, dict) else {}
    names = sorted(made_up.keys() - set(KEPT))
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=2)) if names else set()
    case.body = SOUND[case.operation.path] | {name: made_up[name] for name in chosen}


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_request_breaks_the_server(server: Server, count: int) -> None:
    """Every operation with bodies after the document and against it; those that answer, with sound ones but for some
    fields.
    """
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path_regex=NOT_FUZZED)
    operations = [found.ok() for found in document.get_all_operations()]
    assert {operation.path for operation in operations} >= SOUND.keys()
    for operation in operations:
        play(operation, GenerationMode.POSITIVE, count, as_it_is)
        if len(operation.body):
            play(operation, GenerationMode.NEGATIVE, count, as_it_is)
        if operation.path in SOUND:
            good = play(operation, GenerationMode.POSITIVE, 3 * count, some_fields)
            bad = play(operation, GenerationMode.NEGATIVE, 3 * count, some_fields)
            both = good + bad
            assert both[200] and both[400], (operation.label, good, bad)
    assert_idle(server)
