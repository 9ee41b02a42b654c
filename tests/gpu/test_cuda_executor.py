"""The executor on a CUDA device computes the tokens of the CPU. Skipped without a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import ahead_checks, serving_checks
from benchmarks.gpu import executor_checks as checks
from tests.tiny import FAMILIES, Family, make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(request.param)


def test_greedy_tokens_equal_the_cpu_s(checkpoint: Path) -> None:
    expected = checks.greedy_tokens(checkpoint, "cpu", page_size=16, chunk=None, dtype="float32")
    for page_size in checks.PAGE_SIZES:
        checks.check_greedy(checkpoint, "cuda", page_size, expected)


def test_log_probabilities_equal_the_cpu_s(checkpoint: Path) -> None:
    assert checks.check_logprobs(checkpoint, "cuda") <= checks.LOGPROB_TOLERANCE


def test_log_probabilities_of_a_prompt_equal_the_cpu_s(checkpoint: Path) -> None:
    assert checks.check_prompt_logprobs(checkpoint, "cuda") <= checks.LOGPROB_TOLERANCE


def test_seeded_sampling_draws_the_cpu_s_tokens(checkpoint: Path) -> None:
    checks.check_sampling(checkpoint, "cuda")


def test_bf16_results_are_finite_whatever_lies_in_unused_slots(checkpoint: Path) -> None:
    checks.check_finite_bf16(checkpoint, "cuda")


@pytest.mark.parametrize("page_size", checks.PAGE_SIZES)
def test_decode_goes_on_with_pages_of_another_pool(checkpoint: Path, page_size: int) -> None:
    checks.check_hand_over(checkpoint, "cuda", page_size)


def test_steps_launched_ahead_are_the_cpu_s_steps(checkpoint: Path) -> None:
    ahead_checks.check_ahead(checkpoint, "cuda")


def test_a_launch_never_waits_for_the_device(checkpoint: Path) -> None:
    ahead_checks.check_launch_never_waits(checkpoint, "cuda")


def test_the_kv_of_a_layer_is_there_when_it_is_marked(checkpoint: Path) -> None:
    ahead_checks.check_layer_events(checkpoint, "cuda")


@pytest.mark.parametrize("page_size", checks.PAGE_SIZES)
def test_pages_go_to_the_host_and_back(checkpoint: Path, page_size: int) -> None:
    ahead_checks.check_offload(checkpoint, "cuda", page_size)


@pytest.mark.parametrize("page_size", checks.PAGE_SIZES)
def test_pages_go_to_the_host_tier_and_back_beside_steps(checkpoint: Path, page_size: int) -> None:
    serving_checks.check_host_tier(checkpoint, "cuda", page_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_are_those_of_a_new_executor(family: Family, tmp_path: Path) -> None:
    first, other = (make_tiny(family, tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    serving_checks.check_other_weights(first, other, "cuda")
