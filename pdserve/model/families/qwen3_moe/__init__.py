"""Qwen3-MoE: Qwen3's attention, and experts in place of the dense feed-forward of some or all layers."""

from __future__ import annotations

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
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    refuse_windows(config, where, everywhere=True)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return sparse_layers(config, where, attention, read_mlp(config, where), read_moe(config, where))


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    max_positions=32768,
    read_layers=_layers,
    gguf=GgufFormat(architecture="qwen3moe"),
)
FAMILIES = (QWEN3_MOE,)
