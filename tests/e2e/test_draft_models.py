"""EAGLE-3 heads and draft models in real pairs: answers are those without speculation, token by token and bit by bit.

The drafters of both sides are equal, differ in their weights, or are on one side only. A request of three tokens shows
whether the first step of decode has drafts: it verifies one only if prefill has proposed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
from tests.e2e.test_speculation import (
    COMMON,
    LITTLE,
    bodies,
    check_stop_strings,
    compare,
    leaving_bodies,
)
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.eagle_kit import make_eagle3
from tests.unit.model.native_kit import needs_kernels

pytestmark = [needs_kernels, pytest.mark.slow, pytest.mark.timeout(300)]
Answers = list[dict[str, Any]]
TOKENS = (70, 71, 72, 75)
"""All drafts of the head: some requests draw few other tokens."""
ALGORITHMS = ["EAGLE3", "STANDALONE"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("target") / "model", num_hidden_layers=6)


@pytest.fixture(scope="module")
def flags_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[str, ...]]:
    """`flags_of(algorithm, seed)`: a drafter; those of other seeds have other weights. The draft model of seed 0 is the
    target, so that its greedy drafts are right.
    """

    def flags(algorithm: str, seed: int) -> tuple[str, ...]:
        path = tmp_path_factory.mktemp("drafter")
        if algorithm == "EAGLE3":
            return eagle3(path, model, seed)
        path = make_tiny("qwen3", path / "model", num_hidden_layers=6, seed=seed) if seed else model
        return asked_for(algorithm, path)

    return flags


def eagle3(path: Path, target: Path, seed: int) -> tuple[str, ...]:
    """Write a head whose drafts are `TOKENS`, and return the flags of a server with it."""
    make_eagle3(path, target, seed=seed, draft_vocab_size=len(TOKENS))
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"] = torch.tensor(TOKENS) - torch.arange(len(TOKENS))
    save_file(tensors, path / "model.safetensors")
    return asked_for("EAGLE3", path)


def asked_for(algorithm: str, path: Path) -> tuple[str, ...]:
    flags = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(path))
    return (*flags, "--speculative-num-steps", "3", "--no-speculative-adaptive")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Server]:
    """A monolith without speculation."""
    with running_monolith(str(model), *COMMON) as server:
        yield server
        assert_idle(server)


@pytest.fixture(scope="module")
def expected(plain: Server) -> Answers:
    """What it answers."""
    return generate_all(plain.url, bodies())


def check(pair: Pair, expected: Sequence[dict[str, Any]]) -> None:
    """All at once from an empty cache; then from cached prompts one by one, and while other clients leave."""
    compare(generate_batch(pair.url, bodies()), expected, "all at once")
    alone = [generate_all(pair.url, [body])[0] for body in bodies()]
    compare(alone, expected, "alone")
    assert any(answer["meta_info"]["cached_tokens"] for answer in alone)
    compare(generate_while_some_leave(pair.url, bodies(), leaving_bodies()), expected, "while clients leave")
    assert pair.decode.counter("requests_aborted") > 0
    assert pair.prefill.counter("spec_verify_steps") == 0
    assert_idle(*pair.workers)


def three_tokens(pair: Pair) -> tuple[int, int]:
    """Return the drafts of a request of three tokens, and the bytes that prefill has sent for it."""
    rng = random.Random(7)
    before = pair.prefill.counter("kv_transfer_bytes")
    answer = pair.generate(
        input_ids=[rng.randrange(3, VOCAB_SIZE) for _ in range(64)],
        sampling_params={"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
    )
    num_bytes = int(pair.prefill.counter("kv_transfer_bytes") - before)
    return answer["meta_info"].get("spec_draft_token_num", 0), num_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_drafters(
    algorithm: str, model: Path, plain: Server, expected: Answers, flags_of: Callable[[str, int], tuple[str, ...]]
) -> None:
    """Draft KV, the first drafts and the hidden state are sent. Stop strings as well."""
    with running_pair(str(model), *COMMON, *flags_of(algorithm, 0)) as pair:
        assert three_tokens(pair)[0] == 1, "the first step of decode verifies a draft"
        check(pair, expected)
        check_stop_strings(plain, pair)
        assert pair.decode.counter("spec_accepted_tokens") > 0


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (None, 0), (0, None)], ids=["other", "decode", "prefill"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_different_drafters_connect_and_send_no_draft_kv(
    algorithm: str,
    prefill: int | None,
    decode: int | None,
    model: Path,
    expected: Answers,
    flags_of: Callable[[str, int], tuple[str, ...]],
) -> None:
    sides = [() if seed is None else flags_of(algorithm, seed) for seed in (prefill, decode)]
    with running_pair(str(model), *COMMON) as pair:
        num_bytes = three_tokens(pair)[1]
    with running_pair(str(model), *COMMON, prefill_flags=sides[0], decode_flags=sides[1]) as pair:
        assert three_tokens(pair) == (0, num_bytes), "a plain step makes the first drafts"
        check(pair, expected)
        assert (pair.decode.counter("spec_verify_steps") > 0) == (decode is not None)


@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_a_head_for_llama(tp_size: str, tmp_path: Path) -> None:
    """Stop strings as well. Two ranks are compared with two: their sums have other bits than those of one."""
    model, head = make_tiny("llama", tmp_path / "llama", num_hidden_layers=6), tmp_path / "head"
    flags = (*COMMON, "--tp-size", tp_size)
    with running_monolith(str(model), *flags) as plain:
        expected = generate_all(plain.url, bodies())
        with running_pair(str(model), *flags, *eagle3(head, model, 0)) as pair:
            assert three_tokens(pair)[0] == 1
            check(pair, expected)
            check_stop_strings(plain, pair)
            assert pair.decode.counter("spec_accepted_tokens") > 0


def test_a_head_for_llama_on_two_ranks_short_of_memory(tmp_path: Path) -> None:
    model, head = make_tiny("llama", tmp_path / "llama", num_hidden_layers=6), tmp_path / "head"
    flags = (*COMMON, "--tp-size", "2")
    with running_pair(str(model), *flags) as pair:
        expected = generate_all(pair.url, bodies())
    with running_pair(str(model), *flags, *eagle3(head, model, 0), decode_flags=LITTLE) as pair:
        check(pair, expected)
        assert pair.decode.counter("requests_retracted") > 0
        assert pair.decode.counter("spec_accepted_tokens") > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pair_short_of_memory(
    algorithm: str, model: Path, expected: Answers, flags_of: Callable[[str, int], tuple[str, ...]]
) -> None:
    with running_pair(str(model), *COMMON, *flags_of(algorithm, 0), decode_flags=LITTLE) as pair:
        check(pair, expected)
        assert pair.decode.counter("requests_retracted") > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("prefill", "decode"), [("2", "2"), ("1", "2"), ("2", "1")])
def test_ranks(
    algorithm: str, prefill: str, decode: str, model: Path, flags_of: Callable[[str, int], tuple[str, ...]]
) -> None:
    """Sums of two ranks have other bits than those of one, so a pair with equal splits without speculation answers
    first. With drafts all ranks of a side verify the same ones.
    """
    sides = {"prefill_flags": ("--tp-size", prefill), "decode_flags": ("--tp-size", decode)}
    with running_pair(str(model), *COMMON, **sides) as pair:
        expected = generate_all(pair.url, bodies())
    with running_pair(str(model), *COMMON, *flags_of(algorithm, 0), **sides) as pair:
        assert three_tokens(pair)[0] == 1
        check(pair, expected)
