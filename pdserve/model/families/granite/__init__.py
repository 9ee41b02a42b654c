"""Granite: Llama's layers with factors of embeddings, scores, logits and what the layers add."""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    Family,
    HFConfig,
    Scales,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
)
from pdserve.model.fields import read_number
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias)
    scale = read_number(config, "attention_multiplier", where, default=1.0)
    if scale != attention.head_dim**-0.5:
        attention = dataclasses.replace(attention, scale=scale)
    residual = read_number(config, "residual_multiplier", where, default=1.0)
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    layer = pre_norm_layer(attention, mlp)
    scaled = tuple(dataclasses.replace(sublayer, residual_scale=residual) for sublayer in layer.sublayers)
    return (DecoderLayerSpec(scaled),) * read_num_layers(config, where)


def _scales(config: HFConfig, where: str) -> Scales:
    return Scales(
        embedding=read_number(config, "embedding_multiplier", where, default=1.0),
        logits=1.0 / read_number(config, "logits_scaling", where, default=1.0),
    )


FAMILIES = (
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        max_positions=2048,
        read_layers=_layers,
        read_scales=_scales,
    ),
)
