"""Mixtral: Mistral's attention, and experts in place of the feed-forward, which have names of their own."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_num_layers,
    read_window,
)
from pdserve.model.families.mixture import BLOCK_SPARSE, read_local_experts
from pdserve.model.layer_spec import DecoderLayerSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window = read_window(config, where)
    attention = read_attention(config, rope, where, qkv_bias=False, o_bias=False, num_kv_heads=8, window=window)
    moe = read_local_experts(config, where, norm_top_k=True)
    return (pre_norm_layer(attention, moe),) * read_num_layers(config, where)


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    max_positions=131072,
    read_layers=_layers,
    names=WeightNames(layer=BLOCK_SPARSE),
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    gguf=GgufFormat(
        architecture="llama",
        matches=lambda facts, names: bool(facts.get("expert_count")),
        keys={"num_local_experts": "expert_count"},
        rotates_pairs=True,
    ),
)
FAMILIES = (MIXTRAL,)
