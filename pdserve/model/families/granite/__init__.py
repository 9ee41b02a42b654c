"""Granite, dense and with experts: Llama's layers with factors of embeddings, scores, logits and of what layers add."""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    Scales,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
)
from pdserve.model.families.mixture import read_local_experts
from pdserve.model.fields import read_number
from pdserve.model.layer_spec import DecoderLayerSpec, LayerNames, MLPSpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return _scaled(config, rope, where, read_mlp(config, where, bias=bool(config.get("mlp_bias", False))))


def _moe_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return _scaled(config, rope, where, read_local_experts(config, where, norm_top_k=True))


def _scaled(
    config: HFConfig, rope: RopeSpec, where: str, feed_forward: MLPSpec | MoeSpec
) -> tuple[DecoderLayerSpec, ...]:
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias)
    scale = read_number(config, "attention_multiplier", where, default=1.0)
    if scale != attention.head_dim**-0.5:
        attention = dataclasses.replace(attention, scale=scale)
    residual = read_number(config, "residual_multiplier", where, default=1.0)
    layer = pre_norm_layer(attention, feed_forward)
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
        gguf=GgufFormat(
            architecture="granite",
            keys={
                "attention_multiplier": "attention.scale",
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
            rotates_pairs=True,
        ),
    ),
    Family(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        max_positions=2048,
        read_layers=_moe_layers,
        names=WeightNames(
            layer=LayerNames(
                router="block_sparse_moe.router.layer",
                expert_gate="block_sparse_moe.experts.{expert}.gate_proj",
                expert_up="block_sparse_moe.experts.{expert}.up_proj",
                expert_down="block_sparse_moe.experts.{expert}.down_proj",
                experts_gate_up="block_sparse_moe.input_linear.weight",
                experts_down="block_sparse_moe.output_linear.weight",
            )
        ),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        read_scales=_scales,
    ),
)
