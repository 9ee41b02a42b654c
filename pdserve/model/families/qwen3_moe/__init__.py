"""Qwen3-MoE: Qwen3's attention, and experts in place of the dense feed-forward of some or all layers."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_moe,
    read_num_layers,
    refuse_windows,
)
from pdserve.model.fields import read_count, read_counts
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where, everywhere=True)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True)
    dense, mixture = (pre_norm_layer(attention, op) for op in (read_mlp(config, where), read_moe(config, where)))
    step = read_count(config, "decoder_sparse_step", where, default=1)
    always_dense = read_counts(config, "mlp_only_layers", where)
    return tuple(
        dense if index in always_dense or (index + 1) % step else mixture
        for index in range(read_num_layers(config, where))
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    max_positions=32768,
    read_layers=_layers,
    gguf="qwen3moe",
)
FAMILIES = (QWEN3_MOE,)
