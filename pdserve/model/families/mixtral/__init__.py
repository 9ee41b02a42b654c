"""Mixtral: Mistral's attention, and experts in place of the feed-forward, which have names of their own."""

from __future__ import annotations

from pdserve.errors import ModelError
from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_num_layers,
    read_window,
)
from pdserve.model.fields import MAX_HEADS, MAX_WIDTH, read_count
from pdserve.model.layer_spec import DecoderLayerSpec, LayerNames, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window = read_window(config, where)
    attention = read_attention(config, rope, where, qkv_bias=False, o_bias=False, num_kv_heads=8, window=window)
    num_experts = read_count(config, "num_local_experts", where, default=8, most=MAX_HEADS)
    top_k = read_count(config, "num_experts_per_tok", where, default=2)
    if top_k > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_count(config, "intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=True,
    )
    return (pre_norm_layer(attention, moe),) * read_num_layers(config, where)


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    max_positions=131072,
    read_layers=_layers,
    names=WeightNames(
        layer=LayerNames(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{expert}.w1",
            expert_up="block_sparse_moe.experts.{expert}.w3",
            expert_down="block_sparse_moe.experts.{expert}.w2",
        )
    ),
    gguf=GgufFormat(
        architecture="llama",
        matches=lambda facts, names: bool(facts.get("expert_count")),
        keys={"num_local_experts": "expert_count"},
        rotates_pairs=True,
    ),
)
FAMILIES = (MIXTRAL,)
