"""Steps launched ahead of results, and pages that leave layer by layer, change no token and leave nothing behind."""

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
    generate_while_some_leave,
    running,
    running_monolith,
    start_router,
    start_server,
)
from tests.tiny import VOCAB_SIZE, Family

OVERLAP = "--no-disable-overlap-schedule"
LAYERS = "--disaggregation-layerwise-transfer"
COMMON = ("--dtype", "float32", "--max-total-tokens", "16384")
CHUNKED = ("--chunked-prefill-size", "64")
WHOLE = ("--chunked-prefill-size", "-1")

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
    {"temperature": 1.2, "sampling_seed": 5, "top_k": 40, "max_new_tokens": 60, "ignore_eos": True},
    {"temperature": 1.0, "sampling_seed": 6, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "max_new_tokens": 30},
    {"temperature": 0, "presence_penalty": 1.5, "min_new_tokens": 4, "stop_token_ids": list(range(3, 20))},
    {"temperature": 1.5, "sampling_seed": 8, "top_p": 0.9, "max_new_tokens": 50},
    {"temperature": 0, "max_new_tokens": 1},
    {"temperature": 0, "max_new_tokens": 2},
]


def bodies_of_load() -> list[dict[str, Any]]:
    """28 prompts of 1 to 700 tokens, with samplings of all sorts."""
    rng = random.Random(13)
    lengths = [1, 15, 16, 17, 63, 64, 65, 700, *(rng.randrange(2, 400) for _ in range(20))]
    return [
        {
            "input_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(length)],
            "sampling_params": {"max_new_tokens": 30, **SAMPLINGS[i % len(SAMPLINGS)]},
            "return_logprob": i % 2 == 0,
        }
        for i, length in enumerate(lengths)
    ]


def leaving_bodies() -> list[dict[str, Any]]:
    rng = random.Random(14)
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    return [
        {"input_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(30 + 50 * i)], "sampling_params": sampling}
        for i in range(6)
    ]


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [row[0] for row in answer["meta_info"].get("output_token_logprobs", [])]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("qwen3"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[dict[str, Any]]:
    """What an aggregated server answers that takes each step's results before it launches the next."""
    with running_monolith(model, *COMMON, *CHUNKED, "--disable-overlap-schedule") as server:
        answers = generate_all(server.url, bodies_of_load())
        assert_idle(server)
    assert sum(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers) > 0
    return answers


def check(served: Server | Pair, expected: list[dict[str, Any]]) -> None:
    """The load alone, and again (now from cached prefixes) while other clients leave."""
    again = generate_while_some_leave
    for answers in (generate_all(served.url, bodies_of_load()), again(served.url, bodies_of_load(), leaving_bodies())):
        for i, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
            assert answer["output_ids"] == wanted["output_ids"], f"request {i}"
            assert answer["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"], f"request {i}"
            assert logprobs(answer) == pytest.approx(logprobs(wanted), abs=1e-3), f"request {i}"
    assert_idle(*served.workers)
    assert sum(worker.counter("requests_aborted") for worker in served.workers) > 0


def test_overlap_on_the_monolith(model: str, expected: list[dict[str, Any]]) -> None:
    with running_monolith(model, *COMMON, *CHUNKED, OVERLAP) as server:
        check(server, expected)


@pytest.fixture(scope="module", params=["overlap", pytest.param("one-by-one", marks=pytest.mark.slow)])
def decode(request: pytest.FixtureRequest, model: str) -> Iterator[Server]:
    flag = OVERLAP if request.param == "overlap" else "--disable-overlap-schedule"
    server = start_server(model, "decode", *COMMON, flag)
    with running(server):
        yield server


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((*CHUNKED, OVERLAP), id="overlap", marks=pytest.mark.slow),
        pytest.param((*WHOLE, LAYERS), id="layers-whole-prompts"),
        pytest.param((*CHUNKED, OVERLAP, LAYERS, "--tp-size", "2"), id="layers-overlap-tp2"),
        pytest.param((*CHUNKED, OVERLAP, LAYERS, "--disaggregation-layerwise-groups", "3"), id="layers-overlap",
                     marks=pytest.mark.slow),
        pytest.param((*CHUNKED, LAYERS, "--pp-size", "2"), id="layers-pp2", marks=pytest.mark.slow),
        pytest.param((*CHUNKED, LAYERS), id="layers", marks=pytest.mark.slow),
        pytest.param((*WHOLE, OVERLAP, LAYERS), id="layers-overlap-whole-prompts", marks=pytest.mark.slow),
        pytest.param((*CHUNKED, LAYERS, "--disaggregation-layerwise-groups", "1"), id="one", marks=pytest.mark.slow),
        pytest.param((*CHUNKED, OVERLAP, LAYERS, "--page-size", "16", "--disable-radix-cache"), id="layers-no-cache",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_pair(flags: tuple[str, ...], decode: Server, model: str, expected: list[dict[str, Any]]) -> None:
    prefill = start_server(model, "prefill", *COMMON, *flags)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(prefill))
        router = start_router([prefill], [decode])
        stack.enter_context(running(router))
        check(Pair(prefill, decode, router), expected)
