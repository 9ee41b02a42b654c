"""`ModelSpec` reads configs by old and new names, and refuses by name what would give other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError
from pdserve.model.config import ModelSpec, read_model_spec, spec_from_config
from pdserve.model.layer_spec import MLPSpec, MoeSpec
from tests.tiny import make_tiny

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def spec(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return spec_from_config(BASE | changes, generation or {}, where="test")


def test_old_and_new_names_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert old == new
    rope = old.attentions[0].rope
    assert (rope.type, rope.theta, rope.original_max_positions) == ("llama3", 5e5, 64)
    assert old.dtype == "bfloat16"


def test_the_oldest_scaling_name_is_read() -> None:
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).attentions[0].rope.type == "linear"


def test_families_differ_in_their_options() -> None:
    qwen2 = spec(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    qwen3 = spec(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    two, three = qwen2.attentions[0], qwen3.attentions[0]
    assert (two.qkv_bias, two.o_bias, two.qk_norm, two.head_dim) == (True, False, False, 16)
    assert (three.qkv_bias, three.qk_norm, three.head_dim) == (False, True, 128)
    assert spec().attentions[0].num_kv_heads == 4


def test_every_family_may_say_its_head_size() -> None:
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    for kind, name in names.items():
        assert spec(architectures=[name], model_type=kind, head_dim=24).attentions[0].head_dim == 24


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 10**12),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 10**6),
        ("head_dim", 1 << 30),
        ("intermediate_size", 1 << 31),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", -1.0),
        ("rope_theta", 10**40),
        ("rope_scaling", 5),
        ("rope_parameters", [1]),
        ("architectures", 7),
        ("architectures", [["LlamaForCausalLM"]]),
        ("layer_types", [3]),
        ("eos_token_id", "x"),
        ("eos_token_id", [1.5]),
        ("quantization_config", [1]),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=field):
        spec(**{field: value})


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 7,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


def test_experts_are_read_by_both_names_of_their_number() -> None:
    old = spec(**MOE)
    new = spec(**{name: value for name, value in MOE.items() if name != "num_experts"}, num_local_experts=8)
    assert old.moe == new.moe == MoeSpec(num_experts=8, top_k=3, intermediate_size=24, norm_top_k=False)
    assert (old.moe_layers, old.attentions[0].qk_norm, old.attentions[0].head_dim) == (tuple(range(7)), True, 16)
    assert old.digest() != spec(**MOE, norm_topk_prob=True).digest()


def test_layers_without_experts_are_dense() -> None:
    some = spec(**MOE, decoder_sparse_step=2, mlp_only_layers=[3])
    assert some.moe is not None and some.moe_layers == (1, 5)
    assert [type(layer.operations[1]) for layer in some.layers].count(MLPSpec) == 5
    assert spec(**MOE, mlp_only_layers=list(range(7))).moe is None


def test_eos_ids_come_from_both_files() -> None:
    assert spec({"eos_token_id": [7, 2]}, eos_token_id=2).eos_token_ids == (2, 7)
    assert spec().eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MOE | {"num_experts": None}, "num_experts"),
        (MOE | {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": {"name": "gelu"}}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"num_attention_heads": 128}, "head_dim"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": float("inf")}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": -1}}, "original_max_position"),
        ({"rope_scaling": 5}, "expected an object"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -5]}, "eos_token_id"),
        ({"quantization_config": "awq"}, "expected an object"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec(**changes)


def test_a_window_that_no_layer_uses_is_accepted() -> None:
    assert spec(use_sliding_window=True, sliding_window=8, max_window_layers=2).num_layers == 2
    assert spec(use_sliding_window=False, sliding_window=8).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ({}, "d33bd9e085b203e7"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, "e51c9be489b08c64"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16},
            "20f8b307df045aad",
        ),
    ],
)  # fmt: skip
def test_options_that_a_model_does_not_use_change_no_digest(changes: dict[str, Any], digest: str) -> None:
    """Peers of versions without the options have these digests."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512,
    }  # fmt: skip
    assert spec_from_config(config | changes, {}, where="here").digest() == digest


def test_digest_is_of_the_model_and_not_of_the_number_format() -> None:
    assert spec(dtype="float32").digest() == spec(dtype="bfloat16").digest()
    assert spec().digest() != spec(rope_theta=2e4).digest()
    assert spec().digest() != spec(num_key_value_heads=2).digest()


def test_damaged_and_missing_configs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_model_spec(tmp_path)


def test_a_saved_checkpoint_reads_the_generation_config(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_model_spec(tmp_path).eos_token_ids == (1, 5)
