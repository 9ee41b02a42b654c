"""Triton products with quantized weights against torch's with the dequantized weights, and whole models of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pdserve.model.expert_math import ExpertWeights
from pdserve.model.gpu import packed_gemm
from pdserve.model.gpu.packed_gemm import PackedWeight
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize
from pdserve.model.layer_spec import ExpertActivation
from pdserve.model.layers.kernels import FastKernels
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES
from tests.quantized import SCHEMES, make_groups, write_mxfp4, write_quantized
from tests.tiny import VOCAB_SIZE
from tests.unit.model.triton_kit import DEVICE

FORMATS = [
    GroupFormat(4, 32),
    GroupFormat(4, 64, has_mins=True),
    GroupFormat(4, 128),
    GroupFormat(8, 32, has_mins=True),
    GroupFormat(8, 1024),
    GroupFormat(8, 128, is_float=True),
    GroupFormat(8, 1024, is_float=True),
    GroupFormat(4, 32, is_float=True),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


def weight_of(format: GroupFormat, num_out: int, num_in: int, seed: int = 0) -> QuantizedWeight:
    """Random values, all codes of floats but NaN."""
    torch.manual_seed(seed + num_in)
    values = torch.randint(0, 1 << format.bits, (num_out, num_in), dtype=torch.uint8)
    scale = torch.rand(num_out, -(-num_in // format.group)) + 0.1
    if format.is_float and format.bits == 8:
        values[(values & 127) == 127] = 0
        scale /= 448
    elif format.is_float:
        scale = torch.ldexp(torch.ones(scale.shape), torch.randint(-9, 1, scale.shape))
    mins = -torch.rand(scale.shape) * scale * (1 << format.bits) if format.has_mins else None
    return QuantizedWeight(values, scale, mins, torch.arange(num_in) // format.group, format.bits, format.is_float)


def packed_of(format: GroupFormat, *weights: QuantizedWeight) -> PackedWeight:
    """The weights on the device."""
    num_out, num_in = weights[0].values.shape
    made = PackedWeight.empty(format, len(weights), num_out, num_in, torch.device(DEVICE))
    for index, weight in enumerate(weights):
        made.put(index, weight)
    return made


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within the rounding of sums in another order."""
    limit = 2e-6 if got.dtype == torch.float32 else 3e-3
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < limit


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear(format: GroupFormat, dtype: torch.dtype) -> None:
    for num_out, num_in, rows in ((40, 200, 3), (33, 136, 70)):
        weight = weight_of(format, num_out, num_in)
        bias = torch.randn(num_out).to(DEVICE, dtype)
        wide = weight.dequantized().to(DEVICE, dtype)
        x = torch.randn(rows, num_in + 3)[:, :num_in].to(DEVICE, dtype)
        packed = packed_of(format, weight)
        added = bias if rows == 3 else None
        wanted = F.linear(x.float(), wide.float(), None if added is None else added.float())
        close(packed_gemm.linear(x, packed, added), wanted.to(dtype))
    assert packed_gemm.linear(x[:0], packed, None).shape == (0, num_out)


@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[1], FORMATS[-1]], ids=str)
@pytest.mark.parametrize("act", ["silu", "gpt_oss"])
def test_experts(format: GroupFormat, act: ExpertActivation) -> None:
    """With biases; with experts that no row has, and more rows than a tile."""
    num_experts, hidden, inner, top_k = 5, 64, 96, 2
    wide = [weight_of(format, 2 * inner, hidden, seed) for seed in range(num_experts)]
    deep = [weight_of(format, hidden, inner, seed) for seed in range(num_experts)]
    gate_up, down = packed_of(format, *wide), packed_of(format, *deep)
    biases = torch.randn(num_experts, 2 * inner, device=DEVICE), torch.randn(num_experts, hidden, device=DEVICE)
    plain = [torch.stack([each.dequantized() for each in every]).to(DEVICE) for every in (wide, deep)]
    limit = 1.5 if act == "gpt_oss" else None
    held = ExpertWeights(plain[0], plain[1], biases[0], biases[1], act, limit)
    for tokens in (1, 60):
        x, slots = torch.randn(tokens, hidden, device=DEVICE), torch.randint(0, 4, (tokens * top_k,), device=DEVICE)
        got = packed_gemm.expert_rows(x, slots, gate_up, down, *biases, act, limit)
        close(got, FastKernels().experts(x, slots, held))
    assert packed_gemm.expert_rows(x[:0], slots[:0], gate_up, down, *biases, act, limit).shape == (0, hidden)


def test_bytes_and_an_odd_number_of_inputs() -> None:
    form = GroupFormat(4, 32)
    weight = quantize(torch.randn(8, 33), form)
    packed = packed_of(form, weight)
    assert packed.num_bytes == 8 * (17 + 2 * 4)
    x = torch.randn(2, 33, device=DEVICE)
    close(packed_gemm.linear(x, packed, None), F.linear(x, weight.dequantized().to(DEVICE)))


PROMPT = random_prompt(12, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "awq"),
        ("qwen3_moe", "fp8, block of groups"),
        pytest.param("qwen3_moe", "gptq, zeros", marks=pytest.mark.slow),
        pytest.param("llama", "fp8, channel", marks=pytest.mark.slow),
    ],
)
def test_models_give_the_tokens_of_the_dequantized_weights(family: str, name: str, tmp_path: Path) -> None:
    """And take less memory; `--quantization bf16` dequantizes them."""
    tiny = make_groups("qwen3_moe" if family == "qwen3_moe" else "llama", tmp_path / "tiny")
    path = tmp_path / "quantized"
    plain = write_quantized(tiny, path, SCHEMES[name])
    built = [build(each, attention_backend="triton", dtype="float32") for each in (path, plain)]
    assert Driver(built[0]).generate([PROMPT], 3) == Driver(built[1]).generate([PROMPT], 3)
    mine, wanted = (each.executor for each in built)
    assert mine.weights_fingerprint == wanted.weights_fingerprint and mine.weight_bytes < wanted.weight_bytes
    wide = build(path, attention_backend="triton", dtype="float32", quantization="bf16")
    assert wide.executor.weight_bytes == wanted.weight_bytes


def test_mxfp4_experts_give_the_tokens_of_the_dequantized_weights(tmp_path: Path) -> None:
    family = FAMILIES["gpt_oss"]
    changes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
    dataclasses.replace(family, changes={**changes, **family.changes}).write(tmp_path / "tiny")
    path = tmp_path / "quantized"
    plain = write_mxfp4(tmp_path / "tiny", path)
    built = [build(each, attention_backend="triton", dtype="float32") for each in (path, plain)]
    assert Driver(built[0]).generate([PROMPT], 3) == Driver(built[1]).generate([PROMPT], 3)
    assert built[0].executor.weight_bytes < built[1].executor.weight_bytes
