"""What a pass of a draft model costs: the weights that it reads, beside those of a step of its target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pdserve.model.config import ModelSpec
from pdserve.model.drafting.cost import FIXED_WEIGHTS, pass_cost, weights_read
from pdserve.model.layer_spec import DecoderLayerSpec, MLPSpec, MoeSpec, SublayerSpec
from pdserve.model.loader import read_spec
from tests.model_families import FAMILIES, KIMI

NAMES = [
    "qwen3", "gemma3_text", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", KIMI,
]  # fmt: skip


def with_all_experts(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with each token routed to all experts."""

    def of_all(layer: DecoderLayerSpec) -> DecoderLayerSpec:
        changed = tuple(
            dataclasses.replace(each, op=dataclasses.replace(each.op, top_k=each.op.num_experts))
            if isinstance(each.op, MoeSpec)
            else each
            for each in layer.sublayers
        )
        return dataclasses.replace(layer, sublayers=changed)

    return dataclasses.replace(spec, layers=tuple(map(of_all, spec.layers)))


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_a_step_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Matrices of the language model, without embedding, with the head even where it is the embedding."""
    FAMILIES[name].write(tmp_path)
    spec = read_spec(tmp_path)
    count = 0
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        is_matrix = tensor.ndim == 2 or ".experts." in key
        is_other = "embed" in key or "visual" in key or "_bias" in key or "shared_expert_gate" in key
        if is_matrix and not is_other:
            count += tensor.numel()
    if spec.tied_embeddings:
        count += spec.vocab_size * spec.hidden_size
    assert weights_read(with_all_experts(spec)) == count


def test_a_token_reads_only_its_experts(tmp_path: Path) -> None:
    FAMILIES["qwen3_moe"].write(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.moe is not None
    skipped = spec.moe.num_experts - spec.moe.top_k
    of_expert = 3 * spec.hidden_size * spec.moe.intermediate_size
    assert weights_read(with_all_experts(spec)) - weights_read(spec) == len(spec.moe_layers) * skipped * of_expert > 0


def test_a_pass_costs_its_share_of_the_weights_and_its_fixed_work(tmp_path: Path) -> None:
    FAMILIES["qwen3"].write(tmp_path)
    small = read_spec(tmp_path)
    layer = DecoderLayerSpec((SublayerSpec("norm", MLPSpec(intermediate_size=200_000, bias=False)),))
    large = dataclasses.replace(small, hidden_size=10_000, vocab_size=0, layers=(layer,) * 10)
    assert weights_read(large) == 10 * 3 * 10_000 * 200_000
    for device, fixed in FIXED_WEIGHTS.items():
        assert pass_cost(weights_read(large), large, device) == pytest.approx(1.0, rel=0.01)
        assert pass_cost(0, large, device) == fixed / weights_read(large)
        assert pass_cost(0, large, device, 4) == 4 * fixed / weights_read(large), "each rank has it"
        assert pass_cost(0, small, device) > 1, "the fixed work of a pass is more than a tiny model"
