"""Qwen2, Qwen3 and Qwen3-MoE. Qwen2 has biases in Q, K and V; Qwen3 normalises the heads of Q and K instead."""

from __future__ import annotations

from pdserve.errors import ModelError
from pdserve.model.families.family import (
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    refuse_windows,
)
from pdserve.model.fields import MAX_HEADS, MAX_WIDTH, read_count, read_counts
from pdserve.model.layer_spec import DecoderLayerSpec, MoeSpec
from pdserve.model.rope import RopeSpec

_MAX_POSITIONS = 32768


def _qwen2_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where)
    attention = read_attention(config, rope, where, qkv_bias=True, o_bias=False)
    return (pre_norm_layer(attention, read_mlp(config, where)),) * read_num_layers(config, where)


def _qwen3_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128)
    return (pre_norm_layer(attention, read_mlp(config, where)),) * read_num_layers(config, where)


def _qwen3_moe_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where, everywhere=True)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True)
    dense, mixture = (pre_norm_layer(attention, op) for op in (read_mlp(config, where), _moe(config, where)))
    step = read_count(config, "decoder_sparse_step", where, default=1)
    always_dense = read_counts(config, "mlp_only_layers", where)
    return tuple(
        dense if index in always_dense or (index + 1) % step else mixture
        for index in range(read_num_layers(config, where))
    )


def _moe(config: HFConfig, where: str) -> MoeSpec:
    """Read the expert configuration. Newer configs use `num_local_experts`."""
    name = "num_local_experts" if "num_experts" not in config else "num_experts"
    num_experts = read_count(config, name, where, most=MAX_HEADS)
    top_k = read_count(config, "num_experts_per_tok", where, default=8)
    if top_k > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_count(config, "moe_intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=bool(config.get("norm_topk_prob", False)),
    )


QWEN2 = Family(
    architecture="Qwen2ForCausalLM", model_type="qwen2", max_positions=_MAX_POSITIONS, read_layers=_qwen2_layers
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM", model_type="qwen3", max_positions=_MAX_POSITIONS, read_layers=_qwen3_layers
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    max_positions=_MAX_POSITIONS,
    read_layers=_qwen3_moe_layers,
)
