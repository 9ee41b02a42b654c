"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3's attention and routing; `mlp_layer_types` names the layers with experts.

Checkpoints may have a module for multi-token prediction behind the last layer.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.deepseek_v3 import ONLY
from pdserve.model.families.family import Family, HFConfig
from pdserve.model.families.mixture import MTP_NAMES, read_grouped_moe
from pdserve.model.families.mla import NAMES, deepseek_layers, read_mla
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    return deepseek_layers(config, read_mla(config, rope, where), moe, where)


FAMILIES = (
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        max_positions=202752,
        read_layers=_layers,
        names=dataclasses.replace(NAMES, mtp=MTP_NAMES),
        defaults={
            "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        },
        only=ONLY,
        unread_layers="num_nextn_predict_layers",
    ),
)  # fmt: skip
