"""Pairs of servers with quantized checkpoints give the tokens of a monolith, with packed and dequantized weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pdserve.config.speculative_group import SpeculativeConfig
from tests.deepseek_mtp import write_with_next_layer
from tests.model_families import FAMILIES, prompts_of
from tests.model_pair import running_models
from tests.quantized import SCHEMES, edit_config, write_mxfp4, write_quantized
from tests.unit.model.native_kit import needs_kernels

ROOMY = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
NUM_NEW = 8
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2, speculative_adaptive=False)
LENGTHS = (1, 40, 63, 150)


def roomy(name: str, directory: Path) -> Path:
    """A checkpoint whose weights are whole groups of 32 inputs."""
    family = FAMILIES[name]
    experts = {"moe_intermediate_size": 64} if "moe_intermediate_size" in family.changes else {}
    dataclasses.replace(family, changes={**ROOMY, **family.changes, **experts}).write(directory)
    return directory


@needs_kernels
@pytest.mark.parametrize(("family", "scheme"), [("phi3", "awq"), ("qwen3_moe", "W4A16, zeros")])
def test_a_pair_with_packed_weights_gives_the_tokens_of_a_monolith(family: str, scheme: str, tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one quantized tensor, and gate and up in another one."""
    tiny, path = roomy(family, tmp_path / "tiny"), tmp_path / "quantized"
    edit_config(tiny, dtype="bfloat16")
    write_quantized(tiny, path, SCHEMES[scheme])
    prompts, found = prompts_of(LENGTHS), []
    for pair in (False, True):
        with running_models(
            path, pair=pair, prefill_impl="native", model_impl="native", dtype="bfloat16"
        ) as server:  # fmt: skip
            assert all(each.built.arithmetic.endswith(" quantized") for each in server.servers)
            found.append([server.generate([prompt], NUM_NEW)[0] for prompt in prompts])
            assert server.generate(prompts, NUM_NEW) == found[-1], "at once"
            server.assert_idle()
    assert found[0] == found[1]


def test_mxfp4_experts_in_a_pair_give_the_tokens_of_the_dequantized_checkpoint(tmp_path: Path) -> None:
    """The peer may have the dequantized weights."""
    changes = {**ROOMY, "intermediate_size": 64, **FAMILIES["gpt_oss"].changes}
    family = dataclasses.replace(FAMILIES["gpt_oss"], changes=changes)
    family.write(tmp_path / "tiny")
    path = tmp_path / "quantized"
    plain = write_mxfp4(tmp_path / "tiny", path)
    prompts = prompts_of(LENGTHS)
    expected = family.reference_tokens(plain, prompts, NUM_NEW)
    for prefill_path in (path, plain):
        with running_models(
            path, pair=True, prefill_path=prefill_path, prefill_impl="native", model_impl="native"
        ) as server:  # fmt: skip
            assert server.generate(prompts, NUM_NEW) == expected
            server.assert_idle()


def test_a_deepseek_in_blocks_of_fp8_with_its_mtp_module(tmp_path: Path) -> None:
    """The projection of latents to heads is in blocks that divide no head. The module is quantized, too.

    A peer with the dequantized checkpoint gets the same bytes, so its module counts as equal.
    """
    tiny, path = write_with_next_layer("deepseek_v3", tmp_path / "tiny"), tmp_path / "quantized"
    also = [name for name in load_file(tiny / "model.safetensors") if name.endswith("kv_a_proj_with_mqa.weight")]
    plain = write_quantized(tiny, path, SCHEMES["fp8, block"], also)
    prompts = prompts_of(LENGTHS)
    expected = FAMILIES["deepseek_v3"].reference_tokens(plain, prompts, NUM_NEW)
    num_bytes = []
    for prefill_path in (path, plain):
        with running_models(
            path, pair=True, prefill_path=prefill_path, prefill_impl="native", model_impl="native",
            prefill_speculative=NEXTN, speculative=NEXTN,
        ) as server:  # fmt: skip
            assert [server.generate([prompt], NUM_NEW)[0] for prompt in prompts] == expected
            server.assert_idle()
            assert server.prefill is not None
            num_bytes.append(server.prefill.state().counters["kv_transfer_bytes"])
    assert num_bytes[0] == num_bytes[1]
