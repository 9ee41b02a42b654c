"""Schemathesis plays our OpenAPI document against a real server: whatever it sends, no 5xx, nothing undocumented."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import status_code_conformance

from pdserve.protocol.snapshot import CONTENT_TYPE
from tests.e2e.harness import Server, assert_idle, running_monolith
from tests.tiny import Family

LATER = (
    r"^/(start_profile|stop_profile|v1/tokenize|v1/detokenize|update_weights_from_\w+|\w+_weights_update_group"
    r"|\w+_memory_occupation)$"
)
"""Left out of the quick run: slow, or other names of others."""
UNDO = {
    "/pause_generation": "/continue_generation",
    "/start_profile": "/stop_profile",
    "/release_memory_occupation": "/resume_memory_occupation",
}
"""What ends what these paths begin for everybody."""
SHORT = {"max_new_tokens": 3}
SOUND: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": SHORT},
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 3}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/tokenize": {"prompt": "hello"},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/parse_function_call": {"text": "hello", "tool_call_parser": "hermes"},
    "/separate_reasoning": {"text": "hello", "reasoning_parser": "qwen3"},
}
"""Bodies that are answered, for single fields to be put in: bodies all made up seldom get past the first check."""
KEPT = ("model", "rid", "priority", "bootstrap_room", "bootstrap_host", "bootstrap_port")
"""Fields of `SOUND` that stay: nearly any other value is the same refusal."""


@schemathesis.serializer(CONTENT_TYPE)
def snapshot_bytes(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """A body of /restore: bytes that are no snapshot."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Server]:
    flags = (
        "--enable-ollama-api",
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
    """All made up, but that profiles go where tests may write, and that the server keeps its role."""
    if case.operation.path == "/pd_role_switch" and isinstance(case.body, dict) and "new_role" in case.body:
        case.body["new_role"] = "null" if case.body["new_role"] in ("prefill", "decode") else case.body["new_role"]
    if isinstance(case.body, dict) and isinstance(case.body.get("output_dir"), str):
        case.body["output_dir"] = f"{tempfile.gettempdir()}/pdserve-fuzz/{case.body['output_dir'].replace('/', '_')}"


def some_fields(case: Any, data: Any) -> None:
    """A sound body with one or two fields that are made up."""
    made_up = case.body if isinstance(case.body, dict) else {}
    names = sorted(made_up.keys() - set(KEPT))
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)) if names else set()
    case.body = SOUND[case.operation.path] | {name: made_up[name] for name in chosen}


@pytest.mark.parametrize(
    ("count", "left_out"),
    [(1, LATER), pytest.param(100, None, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_no_request_breaks_the_server(server: Server, count: int, left_out: str | None) -> None:
    """Every operation with bodies after the document and against it; those that answer, with sound ones but for some
    fields.
    """
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    if left_out is not None:
        document = document.exclude(path_regex=left_out)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 25
    seen: Counter[int] = Counter()
    for operation in operations:
        few = count if operation.path not in UNDO else max(2, count // 5)
        play(operation, GenerationMode.POSITIVE, few, as_it_is)
        if len(operation.body) or operation.query:
            play(operation, GenerationMode.NEGATIVE, few, as_it_is)
        if operation.path in SOUND:
            good = play(operation, GenerationMode.POSITIVE, 3 * count, some_fields)
            bad = play(operation, GenerationMode.NEGATIVE, 3 * count, some_fields)
            assert count < 20 or (good[200] and bad[400]), (operation.label, good, bad)
            seen += good + bad
        if operation.path in UNDO:
            answer = httpx.post(server.url + UNDO[operation.path], timeout=60)
            assert answer.status_code in (200, 400), answer.text
    assert seen[200] and seen[400], seen
    assert_idle(server)
    assert httpx.get(server.url + "/health_generate", timeout=60).json() == {"status": "ok"}
