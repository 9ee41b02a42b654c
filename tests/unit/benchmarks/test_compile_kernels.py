"""Kernels that are interpreted in all other tests go through Triton's compiler, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_and_fits(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--capability", capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for kernel in (
        "_decode",
        "_product",
        "_peaks",
        "_best",
        "_extend",
        "_place",
        "_rms_norm",
        "_gate",
        "_gate_up",
        "_down",
        "_weigh",
        "_search",
        "_route",
        "_order",
        "_angles",
        "_sigmoid_gate",
        "_conv_decode",
        "_conv_chunks",
        "_conv_verify",
        "_fold_inputs",
        "_delta_decode",
        "_delta_verify",
        "_fold_states",
        "_place_latents",
        "_attend_latents",
        "_index_scores",
        "_gated_norm",
        "_prepare",
        "pass_state",
        "_outputs",
        "_scores",
        "_updates",
        "_linear",
        "_expert_linear",
    ):
        assert f"| {kernel} " in done.stdout, f"{kernel} was not launched"
