"""OLMoE: Llama's attention with norms of all query heads and of all key heads, and experts in all layers."""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import Family, HFConfig, pre_norm_layer, read_attention, read_num_layers
from pdserve.model.families.mixture import read_top_k
from pdserve.model.fields import MAX_HEADS, MAX_WIDTH, read_count
from pdserve.model.layer_spec import DecoderLayerSpec, MoeSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True)
    attention = dataclasses.replace(attention, whole_qk_norm=True)
    num_experts = read_count(config, "num_experts", where, most=MAX_HEADS)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=read_top_k(config, where, num_experts),
        intermediate_size=read_count(config, "intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=bool(config.get("norm_topk_prob", False)),
    )
    return (pre_norm_layer(attention, moe),) * read_num_layers(config, where)


FAMILIES = (
    Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        max_positions=4096,
        read_layers=_layers,
        only={"clip_qkv": None},
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
)
