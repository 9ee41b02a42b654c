"""Seed-OSS: Llama's layers with biases of Q, K and V."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = read_attention(
        config,
        rope,
        where,
        qkv_bias=bool(config.get("attention_bias", True)),
        o_bias=bool(config.get("attention_out_bias", False)),
        head_dim=128,
        num_kv_heads=8,
    )
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    return (pre_norm_layer(attention, mlp),) * read_num_layers(config, where)


FAMILIES = (
    Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        max_positions=524288,
        read_layers=_layers,
        gguf=GgufFormat(architecture="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}),
    ),
)
