"""Drafters of quantized checkpoints in the CPU kernels: their weights stay packed, and drafts are nearly the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pdserve.config.groups import Quantization
from pdserve.config.speculative_group import SpeculativeAlgorithm, SpeculativeConfig
from pdserve.executor.drafter import Drafter
from tests.deepseek_mtp import write_with_next_layer
from tests.driver import Driver, build, random_prompt
from tests.mtp import MTPReference, write_with_mtp
from tests.quantized import SCHEMES, edit_config, make_groups, write_quantized
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.eagle_kit import make_eagle3
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
ROOMY = {
    "hidden_size": 64, "intermediate_size": 96, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2)


def drafting(path: Path, speculative: SpeculativeConfig = NEXTN, quantization: Quantization | None = None) -> Driver:
    return Driver(
        build(path, dtype="bfloat16", cpu_kernels="native", quantization=quantization, speculative=speculative)
    )


def drafter_of(driver: Driver) -> Drafter:
    drafter = driver.built.drafter
    assert drafter is not None
    return drafter


def first_drafts(driver: Driver, num_new: int) -> list[tuple[list[int], int]]:
    """The known tokens behind each step of a prompt, and the first draft there."""
    tokens, start, found = random_prompt(40, VOCAB_SIZE), 0, []
    row = driver.open(tokens, len(tokens) + num_new)
    for _ in range(num_new):
        result = driver.result((row, start, len(tokens), True))
        token = result.tokens[0]
        assert token is not None
        start, tokens = len(tokens), [*tokens, token.token_id]
        found.append((tokens, result.drafts[0][0]))
    return found


@pytest.mark.parametrize(
    ("name", "scheme"), [("qwen3_5_text", "awq"), ("qwen3_5_text", "W8A8"), ("qwen3_next", "gptq, zeros")]
)
def test_the_mtp_module_stays_packed(name: str, scheme: str, tmp_path: Path) -> None:
    experts = {} if name == "qwen3_5_text" else EXPERTS
    tiny = write_with_mtp(name, tmp_path / "tiny", **ROOMY, **experts)
    path = tmp_path / "quantized"
    plain = write_quantized(tiny, path, SCHEMES[scheme], ("mtp.fc.weight",))
    mine, wanted, rounded = drafting(path), drafting(plain), drafting(path, quantization="bf16")
    assert drafter_of(mine).weight_samples() == drafter_of(wanted).weight_samples(), "a peer may have either"
    assert drafter_of(mine).num_bytes < 0.75 * drafter_of(wanted).num_bytes
    assert drafter_of(rounded).num_bytes == drafter_of(wanted).num_bytes
    reference = MTPReference.load(plain, tmp_path / "reference")
    found = first_drafts(mine, 24)
    same = sum(draft == reference.drafts(tokens, 1)[0] for tokens, draft in found)
    assert same >= 0.5 * len(found), f"{same} of {len(found)}"


@pytest.mark.parametrize("scheme", ["gptq, desc_act", "fp8, block"])
def test_a_module_of_other_schemes_is_dequantized(scheme: str, tmp_path: Path) -> None:
    tiny = write_with_mtp("qwen3_5_text", tmp_path / "tiny", **ROOMY)
    path = tmp_path / "quantized"
    plain = write_quantized(tiny, path, SCHEMES[scheme], ("mtp.fc.weight",))
    mine, wanted = drafting(path), drafting(plain)
    assert drafter_of(mine).num_bytes == drafter_of(wanted).num_bytes
    assert first_drafts(mine, 8) == first_drafts(wanted, 8)


def test_a_module_that_is_not_quantized_is_as_it_is(tmp_path: Path) -> None:
    """Published checkpoints often leave the module out: `modules_to_not_convert` names it."""
    tiny = write_with_mtp("qwen3_5_text", tmp_path / "tiny", **ROOMY)
    own = [key for key in load_file(tiny / "model.safetensors") if key.startswith("mtp.")]
    path = tmp_path / "quantized"
    write_quantized(tiny, path, SCHEMES["awq"], skipped=own)
    config = {**SCHEMES["awq"].config, "modules_to_not_convert": ["mtp"]}
    edit_config(path, quantization_config=config)
    assert drafter_of(drafting(path)).num_bytes == drafter_of(drafting(tiny)).num_bytes


def test_the_layer_behind_the_last_one_stays_packed(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    write_with_next_layer("deepseek_v3", tiny)
    path = tmp_path / "quantized"
    plain = write_quantized(tiny, path, SCHEMES["W8A8"])
    mine, wanted = drafting(path), drafting(plain)
    assert drafter_of(mine).weight_samples() == drafter_of(wanted).weight_samples()
    assert drafter_of(mine).num_bytes < drafter_of(wanted).num_bytes


def drafting_with(algorithm: SpeculativeAlgorithm, target: Path, draft: Path) -> Driver:
    return drafting(
        target,
        SpeculativeConfig(
            speculative_algorithm=algorithm, speculative_draft_model_path=str(draft), speculative_num_steps=2
        ),
    )


def check_that_it_is_packed(algorithm: SpeculativeAlgorithm, target: Path, quantized: Path, plain: Path) -> None:
    """Compare drafts and sizes with those of the dequantized checkpoint `plain`."""
    mine, wanted = (drafting_with(algorithm, target, draft) for draft in (quantized, plain))
    assert drafter_of(mine).weight_samples() == drafter_of(wanted).weight_samples()
    assert drafter_of(mine).num_bytes < drafter_of(wanted).num_bytes
    pairs = list(zip(first_drafts(mine, 24), first_drafts(wanted, 24), strict=True))
    assert sum(one == two for one, two in pairs) >= 0.5 * len(pairs)


def test_a_quantized_draft_model_stays_packed(tmp_path: Path) -> None:
    target = make_tiny("qwen3", tmp_path / "target", dtype="bfloat16")
    path = tmp_path / "quantized"
    plain = write_quantized(make_groups("qwen3", tmp_path / "tiny", dtype="bfloat16"), path, SCHEMES["awq"])
    check_that_it_is_packed("STANDALONE", target, path, plain)


def test_a_quantized_eagle_head_stays_packed_but_for_its_first_projection(tmp_path: Path) -> None:
    """q/k/v reads an embedding and a hidden state by two products, so it is dequantized."""
    target = make_groups("qwen3", tmp_path / "target", num_hidden_layers=6)
    path = tmp_path / "quantized"
    plain = write_quantized(make_eagle3(tmp_path / "head", target), path, SCHEMES["awq"], ("fc.weight",))
    check_that_it_is_packed("EAGLE3", target, path, plain)
