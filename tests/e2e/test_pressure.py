"""Loads that need three times the KV memory there is: every request ends well, with the tokens that enough memory
gives, and nothing stays. With steps launched ahead and one by one, and with clients that go away in between.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    Pair,
    Server,
    assert_idle,
    generate_all,
    generate_batch,
    generate_while_some_leave,
    running_monolith,
    running_pair,
)
from tests.tiny import VOCAB_SIZE, Family

POOL, NUM_REQUESTS, NEW_TOKENS = 992, 18, 128
OVERLAP = "--no-disable-overlap-schedule"
OFFLOAD = "--disaggregation-decode-retraction-backup=cpu_tensor"
HOST_POOL = (
    "--disaggregation-decode-retraction-backup=host_pool", "--enable-hierarchical-cache", "--hicache-ratio", "4"
)  # fmt: skip
"""The same memory as that of cached prefixes."""
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "64")
SHORT = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
Served = Server | Pair


def requests_of_load() -> list[dict[str, Any]]:
    """Prompts of 20 to 60 tokens, every third with a beginning that others have too, and long outputs."""
    rng = random.Random(9)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(32)]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    prompts = [
        (shared if i % 3 == 0 else []) + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(20, 60))]
        for i in range(NUM_REQUESTS)
    ]
    assert sum(map(len, prompts)) + NUM_REQUESTS * (NEW_TOKENS - 1) > 3 * POOL
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[[Family], Path]) -> list[list[int]]:
    """What a server with enough memory and without overlap answers."""
    with running_monolith(
        str(tiny_checkpoint("llama")), *COMMON, "--disable-radix-cache", "--max-total-tokens", "16384"
    ) as server:
        answers = generate_all(server.url, requests_of_load())
        assert server.counter("requests_retracted") == 0
        assert_idle(server)
    return [answer["output_ids"] for answer in answers]


@contextlib.contextmanager
def started(kind: str, model: str, *flags: str) -> Iterator[Served]:
    """A monolith or a pair with too little memory where text is generated; `flags` go there."""
    if kind == "monolith":
        with running_monolith(model, *COMMON, *SHORT, *flags) as server:
            yield server
        return
    ahead = tuple(flag for flag in flags if flag == OVERLAP)
    with running_pair(
        model, *COMMON, prefill_flags=("--max-total-tokens", "16384", *ahead), decode_flags=(*SHORT, *flags)
    ) as pair:
        yield pair


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("monolith", OVERLAP), id="monolith-overlap", marks=pytest.mark.slow),
        pytest.param(("pair",), id="pair"),
        pytest.param(("pair", OFFLOAD, OVERLAP, "--tp-size", "2"), id="pair-offload-overlap-tp2"),
        pytest.param(("monolith", OFFLOAD), id="monolith-offload", marks=pytest.mark.slow),
        pytest.param(("pair", OFFLOAD, OVERLAP), id="pair-offload-overlap", marks=pytest.mark.slow),
        pytest.param(("monolith", OFFLOAD, "--pp-size", "2"), id="monolith-offload-pp2", marks=pytest.mark.slow),
        pytest.param(("monolith",), id="monolith", marks=pytest.mark.slow),
        pytest.param(("monolith", OFFLOAD, OVERLAP), id="monolith-offload-overlap", marks=pytest.mark.slow),
        pytest.param(("pair", OVERLAP), id="pair-overlap", marks=pytest.mark.slow),
        pytest.param(("pair", OFFLOAD), id="pair-offload", marks=pytest.mark.slow),
        pytest.param(("monolith", *HOST_POOL, OVERLAP), id="monolith-host-pool", marks=pytest.mark.slow),
        pytest.param(
            ("pair", *HOST_POOL, "--disaggregation-decode-enable-radix-cache", OVERLAP),
            id="pair-host-pool",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("pair", "--disaggregation-decode-enable-radix-cache", OVERLAP),
            id="pair-decode-radix-overlap",
            marks=pytest.mark.slow,
        ),
    ],
)
def served(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[tuple[Served, bool]]:
    """A short-of-memory deployment, and whether it offloads."""
    kind, *flags = request.param
    with started(kind, str(tiny_checkpoint("llama")), *flags) as running:
        yield running, OFFLOAD in flags or HOST_POOL[0] in flags


def test_three_times_too_much_is_answered_in_full(served: tuple[Served, bool], expected: list[list[int]]) -> None:
    deployment, offloads = served
    generates = deployment.workers[-1]
    answers = generate_batch(deployment.url, requests_of_load())
    assert [answer["output_ids"] for answer in answers] == expected
    for answer in answers:
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": NEW_TOKENS}
        assert answer["meta_info"]["completion_tokens"] == NEW_TOKENS
    counters = generates.state()["counters"]
    assert counters["requests_retracted"] > 0, "else this load shows nothing"
    assert generates.metrics()["sglang:num_retracted_requests_total"] == counters["requests_retracted"]
    assert counters["requests_retracted"] <= 3 * NUM_REQUESTS, "retraction is bounded"
    if offloads:
        assert counters["offloaded_pages"] == counters["restored_pages"] > 0
        assert counters.get("recomputed_tokens", 0) == 0
    else:
        assert counters["recomputed_tokens"] > 0
    assert_idle(*deployment.workers)


def test_clients_that_leave_while_memory_is_short(served: tuple[Served, bool], expected: list[list[int]]) -> None:
    """Every third request is aborted or hung up on midway: the others' tokens stay the same, and nothing leaks."""
    deployment, _ = served
    generates = deployment.workers[-1]
    bodies = requests_of_load()
    leavers = range(1, NUM_REQUESTS, 3)
    staying = [i for i in range(NUM_REQUESTS) if i not in leavers]
    answers = generate_while_some_leave(deployment.url, [bodies[i] for i in staying], [bodies[i] for i in leavers])
    assert [answer["output_ids"] for answer in answers] == [expected[i] for i in staying]
    assert_idle(*deployment.workers)
    assert generates.counter("requests_aborted") > 0
