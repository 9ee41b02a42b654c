"""GLM-4-MoE (GLM-4.5, GLM-4.6, GLM-4.7): half of each head is rotated; after dense layers experts with sigmoid scores.

The router's correction bias decides the choice of experts, and a shared expert without a gate computes all tokens.
Checkpoints have a module for multi-token prediction behind the last layer.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import Family, HFConfig, read_attention, read_mlp
from pdserve.model.families.mixture import MTP_NAMES, SHARED_EXPERTS, first_dense_layers, read_grouped_moe
from pdserve.model.layer_spec import DecoderLayerSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = read_attention(
        config, rope, where, qkv_bias=bool(config.get("attention_bias", False)), o_bias=False,
        qk_norm=bool(config.get("use_qk_norm", False)),
    )  # fmt: skip
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    return first_dense_layers(config, where, attention, read_mlp(config, where), moe)


FAMILIES = (
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        max_positions=131072,
        read_layers=_layers,
        names=WeightNames(layer=SHARED_EXPERTS, mtp=MTP_NAMES),
        defaults={
            "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_experts_per_tok": 8,
        },
        may_be_partial=True,
        unread_layers="num_nextn_predict_layers",
    ),
)  # fmt: skip
