"""Families with experts, in native code: greedy fp32 tokens equal transformers' own, and what configs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.model.config import spec_from_config
from pdserve.model.layer_spec import MLPSpec, MoeSpec
from pdserve.model.loader import read_spec
from tests.driver import Driver, build
from tests.model_families import FAMILIES, PLAIN_SPARSE, SPARSE, prompts_of
from tests.share import rest_slow
from tests.unit.model.family_kit import NATIVE, NEW_TOKENS, check_chunks, check_pair

ALL = (*SPARSE, *PLAIN_SPARSE)


@pytest.mark.parametrize("name", rest_slow(ALL, keep=4))
def test_tokens_equal_transformers_alone_and_in_chunks(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_chunks(FAMILIES[name], family_checkpoint(name), alone=True)


@pytest.mark.parametrize("name", rest_slow(ALL))
def test_tokens_equal_transformers_with_a_prefix_hit_and_in_a_pair(
    name: str, family_checkpoint: Callable[[str], Path]
) -> None:
    offload = ALL.index(name) % 2 == 0
    check_pair(FAMILIES[name], family_checkpoint(name), at_once=slice(1, None), num_hits=256, offload=offload, **NATIVE)


@pytest.mark.parametrize("name", rest_slow(["glm4_moe", "gpt_oss"], keep=0))
def test_the_deterministic_mode_has_the_routers_too(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    check_chunks(FAMILIES[name], family_checkpoint(name), deterministic=True, cpu_kernels="torch")


def test_layers_without_experts_lie_between(family_checkpoint: Callable[[str], Path]) -> None:
    glm, qwen = (read_spec(family_checkpoint(name)) for name in ("glm4_moe", "qwen2_moe"))
    assert glm.moe_layers == (1,) and qwen.moe_layers == (0, 2)
    assert isinstance(glm.layers[0].operations[1], MLPSpec) and isinstance(qwen.layers[1].operations[1], MLPSpec)
    assert glm.moe is not None and (glm.moe.num_groups, glm.moe.top_groups, glm.moe.routed_scale) == (4, 2, 1.5)


def test_layers_behind_the_last_one_are_not_read(family_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Published checkpoints of GLM-4-MoE have one more layer, which drafts tokens."""
    family, prompts = FAMILIES["glm4_moe"], prompts_of((20,))
    family.write(tmp_path)
    expected = family.reference_tokens(tmp_path, prompts, NEW_TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {
        "model.layers.2.eh_proj.weight": torch.zeros(32, 64),
        "model.layers.2.shared_head.norm.weight": torch.ones(32),
    }
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    assert Driver(build(tmp_path, dtype="float32", model_impl="native")).generate(prompts, NEW_TOKENS) == expected
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.layers\.2\..* that this architecture does not use"):
        build(tmp_path, dtype="float32", model_impl="native")


def test_the_rotated_part_of_minimax_is_read_from_old_and_new_configs() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    specs = [spec_from_config(SMALL["minimax_m2"] | fields, {}, where="here") for fields in ({"rotary_dim": 4}, new)]
    assert specs[0] == specs[1]
    assert specs[0].attentions[0].rope is not None
    assert specs[0].attentions[0].rope.rotary_dim(8) == 4


_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_SIZES, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": {
        **_SIZES, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "minimax_m2": {
        **_SIZES, "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "olmoe": {**_SIZES, "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_SIZES, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_configs_are_read(name: str) -> None:
    spec = spec_from_config(SMALL[name], {}, where="here")
    assert isinstance(spec.moe, MoeSpec) and spec.moe.top_k == 2


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group 3 does not divide the 8 experts"),
        ("glm4_moe", {"n_group": 8, "topk_group": 1}, "topk_group 1 of 8 groups have fewer"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts is -1"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not supported"),
        ("gpt_oss", {"swiglu_limit": "x"}, "swiglu_limit is 'x'"),
        ("minimax_m2", {"rotary_dim": 3}, "rotary_dim 3 of heads of 8"),
        ("minimax_m2", {"rotary_dim": 16}, "rotary_dim 16 of heads of 8"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
        ("qwen2_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ],
)
def test_bad_fields_are_refused_by_name(name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config(SMALL[name] | fields, {}, where="here")


def test_a_checkpoint_may_have_gpt_oss_experts_apart(family_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """One tensor for each expert and projection, as converters write them, gives the same tokens."""
    path, prompts = family_checkpoint("gpt_oss"), prompts_of((20,))
    expected = Driver(build(path, dtype="float32", model_impl="native")).generate(prompts, NEW_TOKENS)
    apart = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stem, _, kind = name.partition(".experts.")
        if not kind:
            apart[name] = tensor
            continue
        end = "bias" if kind.endswith("bias") else "weight"
        for expert, own in enumerate(tensor):
            outputs = own if end == "bias" else own.t()
            parts = {"down_proj": outputs}
            if kind.startswith("gate_up"):
                parts = {"gate_proj": outputs[::2], "up_proj": outputs[1::2]}
            for part, value in parts.items():
                apart[f"{stem}.experts.{expert}.{part}.{end}"] = value.contiguous()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((path / file).read_bytes())
    save_file(apart, tmp_path / "model.safetensors", {"format": "pt"})
    assert Driver(build(tmp_path, dtype="float32", model_impl="native")).generate(prompts, NEW_TOKENS) == expected
