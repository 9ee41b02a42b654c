"""GLM-4: neighbouring dimensions of the first half of each head are rotated as pairs; one layer for gate and up.

GLM-4-0414 (`Glm4ForCausalLM`) has norms before and behind each operation, GLM-4-9B (`GlmForCausalLM`) only before.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    sandwich_layer,
)
from pdserve.model.fields import read_mapping
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec
from pdserve.model.rope import RopeSpec

_PARTIAL, _DEFAULT_PARTIAL = "partial_rotary_factor", 0.5
_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_DEFAULTS = {
    "vocab_size": 151552, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "rms_norm_eps": 1.5625e-07, "attention_bias": True,
}  # fmt: skip


def _attention(config: HFConfig, rope: RopeSpec, where: str) -> AttentionSpec:
    if config.get(_PARTIAL) is None and read_mapping(config, "rope_parameters", where).get(_PARTIAL) is None:
        rope = dataclasses.replace(rope, partial_rotary_factor=_DEFAULT_PARTIAL)
    rope = dataclasses.replace(rope, interleaved=True)
    return read_attention(config, rope, where, qkv_bias=bool(config.get("attention_bias")), o_bias=False)


def _glm_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return (pre_norm_layer(_attention(config, rope, where), read_mlp(config, where)),) * read_num_layers(config, where)


def _glm4_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    layer = sandwich_layer(_attention(config, rope, where), read_mlp(config, where), _NORMS)
    return (layer,) * read_num_layers(config, where)


def _gguf_config(facts: HFConfig) -> HFConfig:
    rotated, head_dim = facts.get("rope.dimension_count"), facts["attention.key_length"]
    return {} if rotated is None else {_PARTIAL: rotated / head_dim}


_GGUF = GgufFormat(
    architecture="glm4",
    config=_gguf_config,
    names={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
FAMILIES = tuple(
    Family(
        architecture=architecture,
        model_type=model_type,
        max_positions=131072,
        read_layers=read_layers,
        defaults=_DEFAULTS,
        may_be_partial=True,
        gguf=gguf,
    )
    for architecture, model_type, read_layers, gguf in (
        ("GlmForCausalLM", "glm", _glm_layers, None),
        ("Glm4ForCausalLM", "glm4", _glm4_layers, _GGUF),
    )
)
