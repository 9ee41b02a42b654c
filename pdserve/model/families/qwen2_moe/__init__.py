"""Qwen2-MoE (Qwen1.5-MoE): Qwen2's attention; experts, and a shared expert with a gate, in some or all layers."""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    read_attention,
    read_mlp,
    read_moe,
    refuse_windows,
)
from pdserve.model.families.mixture import sparse_layers
from pdserve.model.fields import MAX_WIDTH, read_count
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where, everywhere=True)
    attention = read_attention(config, rope, where, qkv_bias=bool(config.get("qkv_bias", True)), o_bias=False)
    shared = read_count(config, "shared_expert_intermediate_size", where, most=MAX_WIDTH)
    moe = dataclasses.replace(read_moe(config, where), shared_intermediate_size=shared, shared_gate=True)
    return sparse_layers(config, where, attention, read_mlp(config, where), moe)


FAMILIES = (
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        max_positions=32768,
        read_layers=_layers,
        gguf=GgufFormat(
            architecture="qwen2moe",
            keys={"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
            config=lambda facts: {"norm_topk_prob": False},
        ),
        defaults={"shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4},
    ),
)
