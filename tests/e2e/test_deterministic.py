"""`--enable-deterministic-inference`, and the CPU kernels without it: what a request is told is the same bit for bit.

Tokens and log-probabilities, alone or among others, whatever chunks, pages, cached prefixes and retractions, in one
server or in two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Pair, Server, assert_idle, generate_all, generate_batch, running_monolith, running_pair
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.model.native_kit import needs_kernels

MODE = "--enable-deterministic-inference"
OVERLAP = "--no-disable-overlap-schedule"
OFFLOAD = "--disaggregation-decode-retraction-backup=cpu_tensor"
ENOUGH = ("--max-total-tokens", "16384")
SHORT = ("--max-total-tokens", "1024", "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
NEW_TOKENS, MANY, FEW = 48, 16, 4
LENGTHS = (1, 17, 300, 64, 128, 33, 5, 90)
Served = Server | Pair
Answer = tuple[list[int], list[Any], list[Any]]

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "sampling_seed": 5},
    {"temperature": 1.3, "sampling_seed": 6, "top_k": 50, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5},
)


def bodies_of(vocab_size: int, new_tokens: int) -> list[dict[str, Any]]:
    """16 requests, greedy and seeded, that all want log-probabilities; some prompts begin alike."""
    rng = random.Random(21)
    shared = [rng.randrange(3, vocab_size) for _ in range(300)]
    bodies = []
    for i in range(MANY):
        length = LENGTHS[i % len(LENGTHS)]
        own = [rng.randrange(3, vocab_size) for _ in range(length)]
        prompt = shared[: length // 2] + own[length // 2 :] if i % 2 else own
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, **SAMPLINGS[i % 5 % len(SAMPLINGS)]}
        bodies.append({"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3})
    return bodies


def exact(answer: dict[str, Any]) -> Answer:
    """Everything that must be the same; floats as the JSON had them, which is every bit."""
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]


def play_alone(served: Served, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [generate_all(served.url, [body])[0] for body in bodies]


def check(served: Served, bodies: list[dict[str, Any]], expected: list[Answer], *, retracts: bool = False) -> None:
    """All at once from an empty cache; then, with what is cached by then, some alone and all at once."""
    many = generate_batch(served.url, bodies)
    assert [exact(answer) for answer in many] == expected, "16 at once"
    assert (served.workers[-1].counter("requests_retracted") > 0) == retracts
    alone = play_alone(served, bodies[:FEW])
    assert [exact(answer) for answer in alone] == expected[:FEW], "alone, from cached prefixes"
    twice = play_alone(served, [bodies[2]] * 2)
    assert [exact(answer) for answer in twice] == [expected[2]] * 2
    assert twice[1]["meta_info"]["cached_tokens"] >= 256, "of 300"
    assert [exact(answer) for answer in generate_all(served.url, bodies[::-1])] == expected[::-1], "in another order"
    assert_idle(*served.workers)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("qwen3"))


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return bodies_of(VOCAB_SIZE, NEW_TOKENS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((MODE, "--dtype", "float32"), id="torch"),
        pytest.param((MODE, "--dtype", "bfloat16"), id="kernels", marks=[needs_kernels, pytest.mark.slow]),
        pytest.param(("--dtype", "bfloat16"), id="kernels-by-default", marks=needs_kernels),
    ],
)
def mode(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The mode, computed by torch or by the CPU kernels; these keep all that is tried here without it, too."""
    flags: tuple[str, ...] = request.param
    return flags


@pytest.fixture(scope="module")
def expected(model: str, mode: tuple[str, ...], bodies: list[dict[str, Any]]) -> list[Answer]:
    """Each alone on an aggregated server, prompts in one piece, nothing cached; there, too, company changes nothing."""
    with running_monolith(model, *mode, *ENOUGH, "--chunked-prefill-size", "-1", "--disable-radix-cache") as server:
        answers = [exact(answer) for answer in play_alone(server, bodies)]
        assert len({tuple(tokens) for tokens, _, _ in answers}) == MANY
        assert [exact(answer) for answer in generate_all(server.url, bodies)] == answers
        assert_idle(server)
    return answers


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--page-size", "1", "--chunked-prefill-size", "16", OVERLAP), id="page-1-chunk-16-recompute"),
        pytest.param(
            ("--page-size", "64", "--chunked-prefill-size", "512", OFFLOAD, "--max-total-tokens", "576"),
            id="page-64-chunk-512-offload",
            marks=pytest.mark.slow,
        ),
        pytest.param(("--page-size", "16", "--chunked-prefill-size", "-1"), id="page-16-whole", marks=pytest.mark.slow),
        pytest.param(("--page-size", "1", OFFLOAD, OVERLAP), id="page-1-offload", marks=pytest.mark.slow),
    ],
)
def test_monoliths_short_of_memory(
    flags: tuple[str, ...], model: str, mode: tuple[str, ...], bodies: list[dict[str, Any]], expected: list[Answer]
) -> None:
    with running_monolith(model, *mode, *SHORT, *flags) as server:
        check(server, bodies, expected, retracts=True)


@pytest.mark.parametrize(
    ("page_size", "prefill_flags", "decode_flags"),
    [
        pytest.param("16", ("--chunked-prefill-size", "48", OVERLAP), SHORT, id="page-16-recompute"),
        pytest.param("64", ("--chunked-prefill-size", "-1"), (*SHORT, OFFLOAD, OVERLAP), id="page-64-offload",
                     marks=pytest.mark.slow),
        pytest.param("1", ("--chunked-prefill-size", "16", "--disaggregation-layerwise-transfer"), ENOUGH,
                     id="page-1-layers", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_pairs(
    page_size: str,
    prefill_flags: tuple[str, ...],
    decode_flags: tuple[str, ...],
    model: str,
    mode: tuple[str, ...],
    bodies: list[dict[str, Any]],
    expected: list[Answer],
) -> None:
    with running_pair(
        model,
        *(*mode, "--page-size", page_size),
        prefill_flags=(*ENOUGH, *prefill_flags),
        decode_flags=decode_flags,
    ) as pair:
        check(pair, bodies, expected, retracts=decode_flags != ENOUGH)
        for server in pair.workers:
            assert requests.post(f"{server.url}/flush_cache", timeout=30).status_code == 200
        alone = play_alone(pair, bodies[-FEW:])
        assert [exact(answer) for answer in alone] == expected[-FEW:], "alone, from an empty cache"


@needs_kernels
@pytest.mark.parametrize(
    "flags",
    [("--cpu-kernels", "torch"), pytest.param(("--quantization", "int8"), marks=pytest.mark.slow)],
    ids=["torch", "int8"],
)
def test_peers_with_other_kernels_are_refused(flags: tuple[str, ...], model: str) -> None:
    with running_pair(model, MODE, "--dtype", "bfloat16", decode_flags=flags) as pair:
        answer = requests.post(f"{pair.url}/generate", json={"input_ids": [5, 6]}, timeout=30)
        assert answer.status_code == 500 and "deterministic_arithmetic" in answer.text, answer.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model(dtype: str, smollm2_directory: Path) -> None:
    bodies = bodies_of(49152, 12)
    common = (MODE, "--dtype", dtype)
    with running_monolith(str(smollm2_directory), *common, *ENOUGH, "--chunked-prefill-size", "-1") as server:
        expected = [exact(answer) for answer in play_alone(server, bodies)]
    with running_pair(str(smollm2_directory), *common, *ENOUGH, "--page-size", "64", OVERLAP,
                      prefill_flags=("--chunked-prefill-size", "80",)) as pair:  # fmt: skip
        check(pair, bodies, expected)
