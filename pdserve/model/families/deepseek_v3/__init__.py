"""DeepSeek-V3 and R1: latent attention, experts routed by sigmoid scores with a correction bias, in groups.

Checkpoints may have a module for multi-token prediction behind the last layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pdserve.model.families.family import Family, GgufFormat, HFConfig
from pdserve.model.families.mixture import MTP_NAMES, read_grouped_moe
from pdserve.model.families.mla import NAMES, deepseek_layers, gguf_config, has_sigmoid_scores, read_mla
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    moe = dataclasses.replace(read_grouped_moe(config, where), scoring="sigmoid", correction_bias=True)
    return deepseek_layers(config, read_mla(config, rope, where), moe, where)


DEFAULTS: Mapping[str, object] = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 2048,
}  # fmt: skip
"""Values of fields that a config does not name."""
ONLY: Mapping[str, object] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Fields for which this value alone is supported."""
FAMILIES = (
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        max_positions=4096,
        read_layers=_layers,
        names=dataclasses.replace(NAMES, mtp=MTP_NAMES),
        defaults=DEFAULTS,
        only=ONLY,
        unread_layers="num_nextn_predict_layers",
        gguf=GgufFormat(architecture="deepseek2", matches=has_sigmoid_scores, config=gguf_config),
    ),
)
