"""The checks of the GPU script, run on CPU: they pass here, and a wrong token or a NaN makes them fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import ahead_checks, check_cuda, timings
from benchmarks.gpu import executor_checks as checks
from tests.tiny import Family


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("qwen3")


def test_all_checks_pass_on_cpu(checkpoint: Path) -> None:
    checks.check_logprobs(checkpoint, "cpu")
    checks.check_prompt_logprobs(checkpoint, "cpu")
    checks.check_sampling(checkpoint, "cpu")
    checks.check_finite_bf16(checkpoint, "cpu")
    checks.check_hand_over(checkpoint, "cpu", 16)
    ahead_checks.check_ahead(checkpoint, "cpu")
    ahead_checks.check_launch_never_waits(checkpoint, "cpu")
    ahead_checks.check_layer_marks(checkpoint, "cpu")
    ahead_checks.check_offload(checkpoint, "cpu", 16)


def test_a_wrong_token_is_found(checkpoint: Path) -> None:
    expected = checks.greedy_tokens(checkpoint, "cpu", page_size=16, chunk=None, dtype="float32")
    checks.check_greedy(checkpoint, "cpu", 64, expected)
    expected[3][5] += 1
    with pytest.raises(AssertionError, match="prompt of 17"):
        checks.check_greedy(checkpoint, "cpu", 64, expected)


def test_a_failed_check_is_reported_and_the_rest_goes_on() -> None:
    def fail() -> None:
        raise AssertionError("tokens differ")

    outcomes = check_cuda.run_checks([("bad", fail), ("good", lambda: None)])
    assert [(outcome.name, outcome.error) for outcome in outcomes] == [
        ("bad", "AssertionError: tokens differ"),
        ("good", None),
    ]


def test_the_floors_count_bytes_and_operations() -> None:
    limits = timings.Limits(copy_bytes_s=1e12, matmul_flop_s=1e14)
    assert timings.decode_floor_s(limits, weight_bytes=10**9, kv_bytes=10**9) == pytest.approx(2e-3)
    shape = timings.Shape(num_layers=2, num_heads=4, head_dim=8, layer_params=1000, head_params=50)
    # 2 per weight and token, the head for one token, and QK and PV over the causal half
    assert timings.prefill_flop(shape, 10) == 2 * 1000 * 10 + 2 * 50 + 2 * 2 * 2 * 4 * 8 * 10 * 11 // 2


def test_steps_of_a_dummy_model_are_timed_and_everything_is_given_back(tmp_path: Path) -> None:
    """A small model of the same family: the report names each step, and the rows are free afterwards."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16}
    built = timings.build_dummy(tmp_path, timings.QWEN3_06B | small, "cpu")
    limits = timings.Limits(copy_bytes_s=1e10, matmul_flop_s=1e11)
    timer = timings.Timer(built, limits)
    found = [timer.decode(3, context=20), timer.prefill(40)]
    assert [one.tokens for one in found] == [3, 40]
    assert all(0 < one.low_s <= one.median_s <= one.high_s and one.floor_s > 0 for one in found)
    assert built.table.num_free == built.table.num_rows
    shape = timings.shape_of(built)
    assert shape.head_params == 320 * 32 and 0 < shape.layer_params < built.executor.weight_bytes
    section = check_cuda.timings_section(limits, found)
    assert "decode, batch 3, 20 tokens of context" in section and "prefill, 40 tokens" in section


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cuda.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().out
