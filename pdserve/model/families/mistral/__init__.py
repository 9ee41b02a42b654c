"""Mistral: Llama's layers. All layers have a sliding window if the config has `sliding_window`."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    read_window,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window = read_window(config, where)
    attention = read_attention(config, rope, where, qkv_bias=False, o_bias=False, num_kv_heads=8, window=window)
    return (pre_norm_layer(attention, read_mlp(config, where)),) * read_num_layers(config, where)


MISTRAL = Family(architecture="MistralForCausalLM", model_type="mistral", max_positions=131072, read_layers=_layers)
FAMILIES = (MISTRAL,)
