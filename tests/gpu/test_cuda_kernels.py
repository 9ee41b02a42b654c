"""Kernels for CUDA at the shapes of real models, and decode steps as graphs. Skipped without a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import check_cuda, kernel_checks
from benchmarks.gpu import executor_checks as checks
from tests.driver import build
from tests.tiny import FAMILIES, Family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(request.param)


NAMED = dict(kernel_checks.checks(torch.device("cuda"), check_cuda.backends()))
NAMED |= kernel_checks.hybrid_checks(torch.device("cuda"))


@pytest.mark.parametrize("name", NAMED)
def test_kernels_are_torch_s_operations(name: str) -> None:
    NAMED[name]()


@pytest.mark.parametrize("name", check_cuda.VARIANTS)
def test_tokens_are_the_cpu_s_however_steps_are_launched(checkpoint: Path, name: str) -> None:
    expected = checks.greedy_tokens(checkpoint, "cpu", page_size=16, chunk=None, dtype="float32")
    checks.check_greedy(checkpoint, "cuda", 16, expected, **check_cuda.VARIANTS[name])


def test_graphs_are_captured_at_start_and_said(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.executor.graphs")
    built = build(checkpoint, device="cuda", dtype="bfloat16", attention_backend="triton", max_rows=8)
    assert built.executor.graphs is not None and built.executor.graphs.sizes == (1, 2, 4, 8)
    assert any("captured decode steps at 4 batch sizes up to 8" in message for message in caplog.messages)


def test_graphs_can_be_done_without(checkpoint: Path) -> None:
    built = build(checkpoint, device="cuda", attention_backend="triton", disable_cuda_graph=True)
    assert built.executor.graphs is None and built.executor.can_capture
