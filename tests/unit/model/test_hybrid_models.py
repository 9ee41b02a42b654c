"""Qwen3-Next and Qwen3.5 in native code: greedy fp32 tokens of monolith and pair equal transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdserve.errors import HandshakeError, ModelError, UnsupportedModelError
from pdserve.memory.layout import GroupKind
from pdserve.model.config import kv_layout, spec_from_config
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, MLPSpec, MoeSpec
from pdserve.model.loader import read_spec
from pdserve.transfer.peers import check_facts
from tests.driver import Driver, build
from tests.model_families import HYBRIDS, KIMI, LENGTHS, deep_hybrid, prompts_of
from tests.model_pair import running_models
from tests.share import rest_slow
from tests.unit.model.family_kit import NATIVE, check_pair

NEW_TOKENS = 12


@pytest.mark.parametrize("name", rest_slow(HYBRIDS))
def test_a_native_pair_gives_transformers_tokens_with_retractions_and_an_abort(
    name: str, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    flags = {**NATIVE, "offload": HYBRIDS.index(name) % 2 == 0, "layerwise": HYBRIDS.index(name) % 3 != 0}
    check_pair(deep_hybrid(name), hybrid_checkpoint(name), num_new=NEW_TOKENS, num_long=100, **flags)


@pytest.mark.parametrize(
    ("name", "chunk"),
    rest_slow(
        [("qwen3_5", -1), ("qwen3_5_moe", 50), *((name, chunk) for name in HYBRIDS for chunk in (50, -1))], keep=2
    ),
)
def test_a_native_monolith_gives_transformers_tokens(
    name: str, chunk: int, hybrid_checkpoint: Callable[[str], Path]
) -> None:
    path = hybrid_checkpoint(name)
    prompts = prompts_of((*LENGTHS, 64, 1500, 5))
    expected = deep_hybrid(name).reference_tokens(path, prompts, NEW_TOKENS)
    with running_models(path, pair=False, model_impl="native", chunk=chunk) as server:
        assert server.generate(prompts[4:5], NEW_TOKENS) == expected[4:5]
        assert server.generate(prompts, NEW_TOKENS) == expected, "eight at once"
        server.assert_idle()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_next", ("state.conv_q.num_heads", "state.conv0.num_heads")),
        (KIMI, ("state.conv_q.num_heads", "state.conv0.num_heads")),
    ],
)
def test_a_native_and_a_transformers_server_refuse_each_other_by_the_planes_field(
    name: str, fields: tuple[str, str], hybrid_checkpoint: Callable[[str], Path]
) -> None:
    """transformers keeps one convolution state for q, k and v."""
    facts = []
    for impl in ("native", "transformers"):
        built = build(hybrid_checkpoint(name), dtype="float32", model_impl=impl)
        facts.append(built.layout.fields())
        built.executor.close()
    for ours, theirs in (facts, facts[::-1]):
        with pytest.raises(HandshakeError) as error:
            check_facts(ours, theirs)
        assert error.value.field in fields


def test_layers_and_groups_follow_the_config(hybrid_checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(hybrid_checkpoint("qwen3_next"))
    assert [tuple(map(type, layer.operations)) for layer in spec.layers] == [
        *[(GatedDeltaSpec, MoeSpec)] * 3, (AttentionSpec, MoeSpec),
    ]  # fmt: skip
    attention, delta = spec.attentions[0], spec.operations[0]
    assert isinstance(delta, GatedDeltaSpec)
    assert (attention.output_gate, attention.rope.partial_rotary_factor, attention.qk_norm) == (True, 0.25, True)
    assert (delta.interleaved, spec.norm_offset) == (True, 1.0)
    assert spec.moe is not None and (spec.moe.shared_intermediate_size, spec.moe.shared_gate) == (16, True)
    full, state = kv_layout(spec, 16, "bfloat16").groups
    assert (full.kind, full.layers, state.kind, state.layers) == (GroupKind.FULL, (3,), GroupKind.STATE, (0, 1, 2))
    assert [(plane.name, plane.num_heads, plane.rows, plane.width, plane.dtype) for plane in state.planes] == [
        ("conv_q", 2, 8, 3, "bfloat16"), ("conv_k", 2, 8, 3, "bfloat16"), ("conv_v", 4, 8, 3, "bfloat16"),
        ("state", 4, 8, 8, "float32"),
    ]  # fmt: skip


def config_of(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, **fields,
    }  # fmt: skip


def test_the_usual_values_are_those_of_transformers() -> None:
    """Of a config that names as little as may be."""
    spec = spec_from_config(config_of(), {}, where="here")
    theirs = transformers.Qwen3NextConfig(**config_of())
    attention, delta = spec.attentions[0], spec.operations[0]
    assert isinstance(delta, GatedDeltaSpec) and spec.moe is not None
    kinds = [
        "full_attention" if isinstance(layer.operations[0], AttentionSpec) else "linear_attention"
        for layer in spec.layers
    ]
    assert kinds == theirs.layer_types
    assert (attention.head_dim, attention.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert attention.rope.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]
    assert (delta.num_key_heads, delta.num_value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (delta.key_dim, delta.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert delta.conv_kernel == theirs.linear_conv_kernel_dim
    assert spec.moe.norm_top_k == theirs.norm_topk_prob
    assert spec.moe.shared_intermediate_size == theirs.shared_expert_intermediate_size
    assert spec.max_positions == theirs.max_position_embeddings


def test_dense_layers_are_those_that_the_config_names() -> None:
    spec = spec_from_config(config_of(mlp_only_layers=[0], decoder_sparse_step=2), {}, where="here")
    kinds = [type(layer.operations[1]) for layer in spec.layers]
    assert kinds == [MLPSpec, MoeSpec, MLPSpec, MoeSpec]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads 3 is not a multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["linear_attention"] * 3 + ["chunked_attention"]}, "layer_types has chunked_attention"),
        ({"partial_rotary_factor": 0.25, "head_dim": 4}, "rotates 1 of 4 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size is -1"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config(config_of(**fields), {}, where="here")


def test_a_model_of_recurrent_layers_only_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types has linear_attention only"):
        spec_from_config(config_of(layer_types=["linear_attention"] * 4), {}, where="here")


def test_other_forms_of_the_same_checkpoint_are_loaded(
    hybrid_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """All experts of a layer in one tensor, names of a vision-language model, and layers that predict tokens ahead."""
    path = hybrid_checkpoint("qwen3_5_moe_text")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    fused: dict[str, torch.Tensor] = {"mtp.fc.weight": torch.zeros(2, 2)}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        fused[f"{prefix}.gate_up_proj"], fused[f"{prefix}.down_proj"] = torch.cat((gates, ups), 1), downs
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in (tensors | fused).items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = []
    for directory in (path, tmp_path):
        built = build(directory, dtype="float32", cpu_kernels="torch")
        driver = Driver(built)
        found.append((driver.generate(prompts_of([40]), 6), built.executor.weights_fingerprint))
        built.executor.close()
    assert found[0] == found[1]


def test_the_text_config_of_a_vision_language_model_counts(
    hybrid_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    config = json.loads((hybrid_checkpoint("qwen3_5") / "config.json").read_text())
    config["text_config"]["linear_conv_kernel_dim"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="linear_conv_kernel_dim is 0"):
        read_spec(tmp_path)
