"""MTP modules of hybrids in real pairs: answers are those without speculation, token by token and bit by bit.

The CPU kernels compute a verify step with the bits of decode steps, recurrent layers included. Requests are those of
`test_speculation`: greedy and drawn, with penalties, biases, grammars, stops and log probabilities. Prompts are cut, at
multiples of 64 positions, and continue from cached states.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server, assert_idle, generate_all, generate_batch, running_monolith, running_pair
from tests.e2e.test_draft_models import check, three_tokens
from tests.e2e.test_speculation import LITTLE, bodies, check_stop_strings, compare
from tests.mtp import write_with_mtp
from tests.tiny import EOS_ID
from tests.unit.model.native_kit import needs_kernels

pytestmark = [needs_kernels, pytest.mark.slow, pytest.mark.timeout(300)]
Answers = list[dict[str, Any]]
NAMES = ("qwen3_5_text", "qwen3_next")
NEXTN = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--no-speculative-adaptive")
COMMON = ("--dtype", "bfloat16", "--max-total-tokens", "16384", "--chunked-prefill-size", "128")
"""The smallest chunks that end only where all chunkings have the same bits."""
AGREES = 0.05
"""Share of the layers' outputs: so small that some of the drafts of greedy requests are right."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose recurrent layers the CPU kernels compute."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "eos_token_id": EOS_ID}
    return write_with_mtp(request.param, tmp_path_factory.mktemp("mtp") / "model", agrees=AGREES, **sizes)


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


def test_without_drafts(plain: Server, expected: Answers) -> None:
    """Answers do not depend on what else a step computes."""
    for _ in range(3):
        compare(generate_batch(plain.url, bodies()), expected, "all at once")


def test_a_pair(model: Path, plain: Server, expected: Answers) -> None:
    """Draft KV, the first drafts and the hidden state are sent."""
    with running_pair(str(model), *COMMON, *NEXTN) as pair:
        assert three_tokens(pair)[0] == 1, "the first step of decode verifies a draft"
        check(pair, expected)
        check_stop_strings(plain, pair)
        counters = pair.decode.state()["counters"]
        assert 0 < counters["spec_accepted_tokens"] < counters["spec_draft_tokens"], "right and wrong drafts"


def test_a_pair_short_of_memory(model: Path, expected: Answers) -> None:
    with running_pair(str(model), *COMMON, *NEXTN, decode_flags=LITTLE) as pair:
        check(pair, expected)
        assert pair.decode.counter("requests_retracted") > 0


def test_two_ranks(model: Path) -> None:
    """Sums of two ranks have other bits than those of one, so a pair without speculation answers first."""
    with running_pair(str(model), *COMMON, "--tp-size", "2") as pair:
        expected = generate_all(pair.url, bodies())
    with running_pair(str(model), *COMMON, *NEXTN, "--tp-size", "2") as pair:
        check(pair, expected)
        assert pair.decode.counter("spec_accepted_tokens") > 0
