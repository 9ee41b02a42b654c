"""Helium (Kyutai) as a native model family: Llama's layers, with a rotation of neighbouring dimensions.

docs/tutorials/new-model-family.md explains it.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def read_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    """Read the layers from a checkpoint's `config.json`, which `where` names in errors."""
    rope = dataclasses.replace(rope, interleaved=True)
    attention = read_attention(config, rope, where, qkv_bias=bool(config.get("attention_bias")), o_bias=False)
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias")))
    return (pre_norm_layer(attention, mlp),) * read_num_layers(config, where)


FAMILIES = (
    Family(
        architecture="HeliumForCausalLM",
        model_type="helium",
        max_positions=4096,
        read_layers=read_layers,
        defaults={"vocab_size": 48000, "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128},
    ),
)
