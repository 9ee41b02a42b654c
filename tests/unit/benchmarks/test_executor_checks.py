"""The checks of the GPU script, run on CPU: they pass here, and a wrong token or a NaN makes them fail."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import ahead_checks, check_cuda, model_timings, products, serving_checks, tilings, timings
from benchmarks.gpu import executor_checks as checks
from benchmarks.gpu.shapes import TINY_MODELS
from benchmarks.report import ROOT
from pdserve.executor.factory import LoadedEngine
from pdserve.model.gpu import small_batch_gemm
from pdserve.model.gpu.decode_attention import AttentionTiling as Attention
from tests import ahead
from tests.tiny import Family, make_tiny
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
    ahead_checks.check_layer_events(checkpoint, "cpu")
    ahead_checks.check_offload(checkpoint, "cpu", 16)
    serving_checks.check_host_tier(checkpoint, "cpu", 16)


def test_other_weights_are_checked(checkpoint: Path, tmp_path: Path) -> None:
    serving_checks.check_other_weights(checkpoint, make_tiny("qwen3", tmp_path, seed=1), "cpu")
    with pytest.raises(AssertionError, match="nothing is checked"):
        serving_checks.check_other_weights(checkpoint, checkpoint, "cpu")


def test_without_the_engine_rows_that_follow_grammars_are_left_out(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_cuda.left_out() == [] and len(ahead.requests()) == 8
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert check_cuda.left_out() == ["rows that follow a grammar, for llguidance is not installed"]
    assert len(ahead.requests(grammars=ahead_checks.has_grammars())) == 6
    ahead_checks.check_ahead(checkpoint, "cpu")


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


@pytest.mark.slow
def test_what_there_was_no_time_for_is_named() -> None:
    """By every process that checks, and by the one that was not asked to."""
    outcomes, missing = check_cuda.check_all(("llama",), time.monotonic() - 1.0)
    assert outcomes == []
    assert "triton attention, Qwen3-8B, decode" in missing and "llama: a launch never waits" in missing
    assert missing[-3:] == ["the family qwen2", "the family qwen3", "the family qwen3_moe"]


def test_the_floors_count_bytes_and_operations() -> None:
    limits = timings.Limits(copy_bytes_s=1e12, matmul_flop_s=1e14)
    assert timings.decode_floor_s(limits, weight_bytes=10**9, kv_bytes=10**9) == pytest.approx(2e-3)
    shape = timings.Shape(num_layers=2, num_heads=4, head_dim=8, layer_params=1000, head_params=50)
    # 2 per weight and token, the head for one token, and QK and PV over the causal half
    assert timings.prefill_flop(shape, 10) == 2 * 1000 * 10 + 2 * 50 + 2 * 2 * 2 * 4 * 8 * 10 * 11 // 2
    # states are read and written
    assert timings.decode_floor_s(limits, weight_bytes=10**9, kv_bytes=0, state_bytes=10**9) == pytest.approx(3e-3)


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
    assert timer.fits_prompt(40) and not timer.fits_prompt(10**8)
    found = [timer.decode(3, ahead=False), timer.decode(3, ahead=True), timer.prefill(40)]
    assert [one.tokens for one in found] == [3, 3, 40]
    assert all(0 < one.low_s <= one.median_s <= one.high_s and one.floor_s > 0 for one in found)
    assert built.table.num_free == built.table.num_rows
    shape = timer.shape
    assert shape.head_params == 320 * 32 and shape.expert_params == 4 * 3 * 16 * 32
    assert 0 < shape.layer_params < built.executor.weight_bytes // 4 - shape.expert_params


def test_steps_whose_kv_does_not_fit_the_pool_are_skipped_and_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten pages of four tokens are too few for nine rows, and for the longer prompt."""
    build = timings.build_dummy

    def small_pool(directory: Path, config: dict[str, Any], plan: timings.Plan) -> LoadedEngine:
        return dataclasses.replace(build(directory, config, plan), num_pages=10)

    monkeypatch.setattr(model_timings, "build_dummy", small_pool)
    plan = dataclasses.replace(check_cuda.TINY_PLAN, batches=(1, 9), prefills=(6, 60), attention_backend="torch")
    results = model_timings.Results(timings.Limits(copy_bytes_s=1e10, matmul_flop_s=1e11))
    model_timings.time_models({"tiny": TINY_MODELS["tiny"]}, plan, results, out=None, has_time=lambda: True)
    assert {one.timing.name for one in results.measured} == {"prefill 6", "decode 1"}
    assert [(one.model, one.step) for one in results.skipped] == [("tiny", "decode 9"), ("tiny", "prefill 60")]
    table = " ".join(model_timings.section(results).split())
    assert "decode 9 | | | KV does not fit the pool of 40 tokens | |" in table


def test_a_profile_says_how_long_the_device_was_idle() -> None:
    kernels = [("a", 0.0, 1.0), ("b", 0.5, 2.0), ("a", 3.0, 4.0)]
    profile = model_timings.summary("m", 1, kernels)
    assert (profile.span_s, profile.busy_s) == (4.0, 3.0)
    assert profile.kernels == (("a", 2.0, 2), ("b", 1.5, 1))
    assert model_timings.summary("m", 1, []).kernels == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_the_whole_program_runs_on_a_cpu_with_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels in Triton's interpreter, graphs that are run again on the host; the report has every row."""
    assert DEVICE == "cpu"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check_cuda.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert "Checks: 3 of 3 passed" in printed
    assert all(f"\n{kernel}" in printed for kernel in ("triton attention, decode", "linear", "experts", "top-p 2"))
    (written,) = tmp_path.glob("*.md")
    rows = [line for line in written.read_text().splitlines() if line.startswith("| tiny")]
    assert len(rows) == 2 * (1 + 2 * 2), "a prefill; a batch with and without graphs and overlap"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_the_program_for_hybrid_models_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert check_cuda.main(["--tiny", "--hybrid"]) == 0
    printed = capsys.readouterr().out
    assert "Checks: 12 of 12 passed" in printed and "| GatedDeltaNet, prefill 70 |" in printed
    assert sum(line.startswith("| tiny-hybrid") for line in printed.splitlines()) == 1 + 2 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_other_tilings_are_timed_and_the_kernels_own_are_back_behind_them(capsys: pytest.CaptureFixture[str]) -> None:
    own = Attention.of(1, 16, torch.float32, torch.device("cpu"))
    tilings.try_out()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(tilings.alternatives())
    assert all("1: " in line and "| 2: " in line for line in lines)
    assert Attention.of(1, 16, torch.float32, torch.device("cpu")) == own


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_other_choices_of_recurrent_layers_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["decode: 8 columns of a state for few rows", "prefill: 16 columns of a state"]
    tilings.try_out(hybrid=True, only=names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == names
    assert all("| 6: " in line for line in lines), "a prefill of six tokens"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_products_are_timed_by_every_tiling_beside_torch_s(capsys: pytest.CaptureFixture[str]) -> None:
    products.try_out()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and sum("(its own)" in line for line in lines) == 2
    errors = [float(line.split("error ")[1].split()[0]) for line in lines if "error" in line]
    assert len(errors) == 8 and max(errors) < 2e-3
    assert small_batch_gemm.SmallBatchTiling.of(2, 48, torch.device("cpu"), is_gate=False).outs == 64


def test_products_have_tilings_that_fit_the_device() -> None:
    """For the devices at hand: the shared memory of a multiprocessor holds a program, the programs fill them."""
    for product in products.PRODUCTS.values():
        for rows in (1, 64):
            for shared in (99 << 10, 227 << 10):
                found = list(products.candidates(product, rows, 132, shared))
                assert found and len(set(found)) == len(found)


@pytest.mark.slow
def test_tiny_shapes_need_no_variable_and_no_engine_of_grammars(tmp_path: Path) -> None:
    """In a process of its own: what it must do before triton is imported."""
    program = (
        "import runpy, sys; sys.modules['llguidance'] = None; "
        "sys.argv = ['check_cuda', '--tiny', '--skip-timings']; "
        "runpy.run_module('benchmarks.gpu.check_cuda', run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment | {"OUT": str(tmp_path)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Checks: 3 of 3 passed" in ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_cuda.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().out
