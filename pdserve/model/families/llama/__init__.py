"""Llama: dense layers, optionally with biases. Many models of other names have this architecture, such as SmolLM2."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    refuse_windows,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias)
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    return (pre_norm_layer(attention, mlp),) * read_num_layers(config, where)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    max_positions=2048,
    read_layers=_layers,
    gguf=GgufFormat(
        architecture="llama", matches=lambda facts, names: not facts.get("expert_count"), rotates_pairs=True
    ),
)
FAMILIES = (LLAMA,)
