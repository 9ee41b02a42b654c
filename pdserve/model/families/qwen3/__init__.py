"""Qwen3: Llama's layers with norms of the heads of Q and K. Some of the layers may attend to a window of positions."""

from __future__ import annotations

from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    GgufFormat,
    HFConfig,
    layers_with_windows,
    read_attention,
)
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    bias = bool(config.get("attention_bias", False))

    def attention(window: int | None) -> AttentionSpec:
        return read_attention(
            config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128, window=window
        )

    return layers_with_windows(config, where, attention)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    max_positions=32768,
    read_layers=_layers,
    layer_types=WINDOW_LAYERS,
    gguf=GgufFormat(architecture="qwen3"),
)
FAMILIES = (QWEN3,)
