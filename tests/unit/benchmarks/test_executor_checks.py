"""The checks of the GPU script, run on CPU: they pass here, and a wrong token or a NaN makes them fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import ahead_checks, check_cuda, model_timings, timings
from benchmarks.gpu import executor_checks as checks
from benchmarks.gpu.shapes import TINY_MODELS
from tests.tiny import Family
from tests.unit.model.triton_kit import DEVICE


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


def test_floors_of_experts_count_those_that_are_chosen() -> None:
    shape = timings.Shape(1, 1, 1, layer_params=100, head_params=10, expert_params=800, num_experts=8, top_k=2)
    assert shape.read_params(1) == pytest.approx(110 + 200)
    assert shape.read_params(1000) == pytest.approx(910)
    assert timings.prefill_flop(shape, 1) == 2 * (100 + 200) + 2 * 10 + 2 * 2


def test_steps_of_a_dummy_model_are_timed_and_everything_is_given_back(tmp_path: Path) -> None:
    """A small model of the same family: each step in turn and ahead, and the rows are free afterwards."""
    plan = timings.Plan(device="cpu", batches=(3,), context=20, prefills=(40,), num_warm=1, num_timed=3)
    built = timings.build_dummy(tmp_path, TINY_MODELS["tiny-moe"], plan)
    timer = timings.Timer(built, timings.Limits(copy_bytes_s=1e10, matmul_flop_s=1e11), plan)
    assert timer.fits(3) and not timer.fits(10**6)
    found = [timer.decode(3, ahead=False), timer.decode(3, ahead=True), timer.prefill(40)]
    assert [one.tokens for one in found] == [3, 3, 40]
    assert all(0 < one.low_s <= one.median_s <= one.high_s and one.floor_s > 0 for one in found)
    assert built.table.num_free == built.table.num_rows
    shape = timer.shape
    assert shape.head_params == 320 * 32 and shape.expert_params == 4 * 3 * 16 * 32
    assert 0 < shape.layer_params < built.executor.weight_bytes // 4 - shape.expert_params


def test_a_profile_says_how_long_the_device_was_idle() -> None:
    kernels = [("a", 0.0, 1.0), ("b", 0.5, 2.0), ("a", 3.0, 4.0)]
    profile = model_timings.summary("m", 1, kernels)
    assert (profile.span_s, profile.busy_s) == (4.0, 3.0)
    assert profile.kernels == (("a", 2.0, 2), ("b", 1.5, 1))
    assert model_timings.summary("m", 1, []).kernels == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_whole_program_runs_on_a_cpu_with_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels in Triton's interpreter, graphs that are run again on the host; the report has every row."""
    assert DEVICE == "cpu"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check_cuda.main(["--tiny", "--attention-backend", "triton"]) == 0
    printed = capsys.readouterr().out
    assert "Checks: 3 of 3 passed" in printed
    assert all(f"\n{kernel}" in printed for kernel in ("triton attention, decode", "linear", "experts", "top-p 2"))
    (written,) = tmp_path.glob("*.md")
    rows = [line for line in written.read_text().splitlines() if line.startswith("| tiny")]
    assert len(rows) == 2 * (1 + 2 * 2), "a prefill; a batch with and without graphs and overlap"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cuda.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().out
