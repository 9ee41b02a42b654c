"""Models with quantized weights in the CPU kernels come near to their dequantized weights, on one rank or several."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import Quantization
from pdserve.model.parallel import SingleRank
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES, KIMI
from tests.quantized import SCHEMES, awq_scheme, edit_config, make_groups, write_mxfp4, write_quantized
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.executor.quantized_ranks import logprobs_of, refusal_of
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
PACKED = [name for name, scheme in SCHEMES.items() if scheme.stays_packed]
TP2 = ParallelShape(tp_size=2, pp_size=1)
CUT: dict[str, dict[str, int]] = {"llama": {"intermediate_size": 96}, "qwen3_moe": {"moe_intermediate_size": 96}}
"""Sizes of feed-forwards whose half is no multiple of 32."""


EMBEDDING = "model.embed_tokens.weight"
ROOMY = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def written_family(name: str, directory: Path, **changes: int) -> Path:
    """A bfloat16 checkpoint of a family whose weights are whole groups. `changes`: fields of its config."""
    family = FAMILIES[name]
    experts = {"moe_intermediate_size": 64} if "moe_intermediate_size" in family.changes else {}
    heads = {"linear_head_dim": 16} if name == KIMI else {}  # the kernels have no smaller ones
    dataclasses.replace(family, changes={**ROOMY, **family.changes, **experts, **heads, **changes}).write(
        directory / "tiny"
    )
    edit_config(directory / "tiny", dtype="bfloat16")
    return directory / "tiny"


def divergence(logprobs: torch.Tensor, wanted: torch.Tensor) -> float:
    """Kullback-Leibler divergence of `[n, vocab]`, the mean over rows."""
    return float((wanted.exp() * (wanted - logprobs)).sum(-1).mean())


def written(family: Family, directory: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint of a scheme, and its dequantized form."""
    tiny = make_groups(family, directory / "tiny", dtype="bfloat16")
    plain = write_quantized(tiny, directory / "quantized", SCHEMES[name])
    return directory / "quantized", plain


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_come_near_to_the_dequantized_ones(name: str, tmp_path: Path) -> None:
    path, plain = written("llama", tmp_path, name)
    mine, samples, num_bytes = logprobs_of(SingleRank(), path, None)
    wanted, wanted_samples, plain_bytes = logprobs_of(SingleRank(), plain, None)
    assert divergence(mine, wanted) < 0.02
    assert torch.equal(mine, wanted) or not SCHEMES[name].is_float
    assert num_bytes < plain_bytes and samples == wanted_samples, "a peer may have the dequantized weights"
    sixteen, _, sixteen_bytes = logprobs_of(SingleRank(), path, "bf16")
    assert torch.equal(sixteen, wanted) and sixteen_bytes == plain_bytes


@pytest.mark.parametrize(("family", "also"), [("gemma3_text", (EMBEDDING,)), ("glm4", ()), ("glm4_moe", ())])
def test_packed_weights_of_families_with_options(family: str, also: tuple[str, ...], tmp_path: Path) -> None:
    """Gemma scales its embeddings, which are its head too. GLM-4 rotates interleaved columns, half of each head.
    GLM-4-MoE has a shared expert without a gate.
    """
    path = tmp_path / "quantized"
    plain = write_quantized(written_family(family, tmp_path), path, SCHEMES["gptq, zeros"], also)
    mine, samples, num_bytes = logprobs_of(SingleRank(), path, None)
    wanted, wanted_samples, plain_bytes = logprobs_of(SingleRank(), plain, None)
    assert divergence(mine, wanted) < 0.02
    assert samples == wanted_samples and num_bytes < plain_bytes


@pytest.mark.parametrize(
    ("family", "also"),
    [
        (
            "deepseek_v32",
            ("model.layers.0.self_attn.indexer.wq_b.weight", "model.layers.0.self_attn.indexer.wk.weight"),
        ),
        (KIMI, ()),
    ],
)
def test_fp8_beside_weights_that_are_always_bfloat16(family: str, also: tuple[str, ...], tmp_path: Path) -> None:
    """The parts of `kv_b`, the weights of index heads, and the second halves of low-rank gates are dequantized."""
    path = tmp_path / "quantized"
    plain = write_quantized(written_family(family, tmp_path), path, SCHEMES["fp8, channel"], also)
    mine, samples, num_bytes = logprobs_of(SingleRank(), path, None)
    wanted, wanted_samples, plain_bytes = logprobs_of(SingleRank(), plain, None)
    assert torch.equal(mine, wanted) and samples == wanted_samples and num_bytes < plain_bytes


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_any_family_is_rounded_to_eight_bits(family: str, tmp_path: Path) -> None:
    """With experts that have biases, and with latents."""
    path = written_family(family, tmp_path)
    wanted, samples, plain_bytes = logprobs_of(SingleRank(), path, None)
    mine, own_samples, num_bytes = logprobs_of(SingleRank(), path, "int8")
    assert divergence(mine, wanted) < 0.05
    assert own_samples == samples and num_bytes < plain_bytes


@pytest.mark.parametrize("name", ["gptq, desc_act", "fp8, block"])
def test_other_weights_are_dequantized(name: str, tmp_path: Path) -> None:
    path, plain = written("llama", tmp_path, name)
    assert torch.equal(logprobs_of(SingleRank(), path, None)[0], logprobs_of(SingleRank(), plain, None)[0])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_any_model_is_rounded_to_four_bits(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, dtype="bfloat16")
    wanted, samples, plain_bytes = logprobs_of(SingleRank(), path, None)
    quantizations: tuple[Quantization, ...] = ("int4", "int8")
    four, eight = (logprobs_of(SingleRank(), path, quantization) for quantization in quantizations)
    assert divergence(four[0], wanted) < 1.0 and four[1] == samples
    assert divergence(eight[0], wanted) < divergence(four[0], wanted)
    assert four[2] < eight[2] < plain_bytes


def test_experts_in_mxfp4_have_the_bits_of_the_dequantized_ones(gang: Gang, tmp_path: Path) -> None:
    """On one rank; each of two ranks has a part of the columns of all experts, or half of the experts."""
    path = tmp_path / "quantized"
    plain = write_mxfp4(written_family("gpt_oss", tmp_path, intermediate_size=128), path)
    mine, samples, num_bytes = logprobs_of(SingleRank(), path, None)
    wanted, wanted_samples, plain_bytes = logprobs_of(SingleRank(), plain, None)
    assert torch.equal(mine, wanted) and samples == wanted_samples and num_bytes < plain_bytes
    for ep_size in (1, 2):
        own = gang.run(TP2, logprobs_of, path, None, ep_size)
        dequantized = gang.run(TP2, logprobs_of, plain, None, ep_size)
        for (logprobs, _, held), (wanted, _, plain_held) in zip(own, dequantized, strict=True):
            assert torch.equal(logprobs, wanted) and held < plain_held


def test_four_bits_replace_fp8(tmp_path: Path) -> None:
    path, plain = written("llama", tmp_path, "fp8, channel")
    four, eight = (logprobs_of(SingleRank(), path, quantization) for quantization in ("int4", None))
    assert torch.equal(four[0], logprobs_of(SingleRank(), plain, "int4")[0]) and four[2] < eight[2]


@pytest.mark.parametrize(
    ("name", "family", "ep_size"),
    [
        ("gptq", "llama", 1),
        ("awq", "qwen3_moe", 1),
        ("W8A8", "qwen3_moe", 2),
        ("fp8, block of groups", "qwen3_moe", 1),
        ("fp8, tensor", "llama", 1),
    ],
)
def test_ranks_have_their_part_of_the_scales(
    name: str, family: Family, ep_size: int, gang: Gang, tmp_path: Path
) -> None:
    tiny = make_groups(family, tmp_path / "tiny", dtype="bfloat16", intermediate_size=128)
    write_quantized(tiny, tmp_path / "quantized", SCHEMES[name])
    compare_ranks(gang, tmp_path / "quantized", ep_size=ep_size)


def test_ranks_divide_the_groups_that_they_cut(gang: Gang, tmp_path: Path) -> None:
    """The second rank has the inputs from 96 on of a feed-forward whose groups have 64 inputs."""
    tiny = make_tiny("llama", tmp_path / "tiny", dtype="bfloat16", intermediate_size=192)
    write_quantized(tiny, tmp_path / "quantized", awq_scheme(64))
    compare_ranks(gang, tmp_path / "quantized")


def compare_ranks(gang: Gang, path: Path, ep_size: int = 1) -> None:
    """Assert that two ranks have the weights and, nearly, the log probabilities of one, with packed weights only."""
    whole, samples, _ = logprobs_of(SingleRank(), path, None)
    plain = gang.run(TP2, logprobs_of, path, "bf16", ep_size)
    for (logprobs, held, num_bytes), (_, _, plain_bytes) in zip(
        gang.run(TP2, logprobs_of, path, None, ep_size), plain, strict=True
    ):
        assert divergence(logprobs, whole) < 0.02
        assert all(held[key].items() <= samples[key].items() for key in held)
        assert num_bytes < plain_bytes


@pytest.mark.parametrize(
    ("family", "scheme", "flag"), [("llama", "awq", "another --tp-size"), ("qwen3_moe", "gptq", "--ep-size 2")]
)
def test_ranks_that_cut_a_group_too_small_to_divide_are_refused(
    family: Family, scheme: str, flag: str, gang: Gang, tmp_path: Path
) -> None:
    """Half of 96 inputs begins within a group of 32. All ranks say so; dequantized it is allowed."""
    tiny = make_tiny(family, tmp_path / "tiny", dtype="bfloat16", **CUT[family])
    write_quantized(tiny, tmp_path / "quantized", SCHEMES[scheme])
    for field, message in gang.run(TP2, refusal_of, tmp_path / "quantized", None):
        assert field == "tp_size" and "down_proj.weight has a scale for each 32 inputs" in message
        assert "would begin at 48" in message and flag in message
    assert gang.run(TP2, refusal_of, tmp_path / "quantized", "bf16") == [None, None]
    assert refusal_of(SingleRank(), tmp_path / "quantized", None) is None


def test_ranks_round_weights_whose_groups_they_cut(gang: Gang, tmp_path: Path) -> None:
    """Half of the 96 inputs of a feed-forward begins within a group of 32: `int4` rounds these layers anew."""
    path, plain = written("llama", tmp_path, "gptq, zeros")
    wanted, samples, _ = logprobs_of(SingleRank(), plain, None)
    for logprobs, held, _ in gang.run(TP2, logprobs_of, path, "int4"):
        assert divergence(logprobs, wanted) < 0.5
        assert all(held[key].items() <= samples[key].items() for key in held)


def test_a_quantized_checkpoint_in_float16_runs_in_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    path, _ = written("llama", tmp_path, "awq")
    edit_config(path, dtype="float16")
    built = build(path)
    assert built.dtype == "bfloat16" and len(Driver(built).generate([random_prompt(5, VOCAB_SIZE)], 2)[0]) == 2
    assert build(path, dtype="float16").dtype == "float16"
