"""Qwen3: Llama's layers with norms of the heads of Q and K. Some of the layers may attend to a window of positions."""

from __future__ import annotations

from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_windows,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    bias = bool(config.get("attention_bias", False))
    mlp, windows = read_mlp(config, where), read_windows(config, where)
    kinds = {
        window: pre_norm_layer(
            read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128, window=window),
            mlp,
        )
        for window in set(windows)
    }
    return tuple(kinds[window] for window in windows)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    max_positions=32768,
    read_layers=_layers,
    layer_types=WINDOW_LAYERS,
    gguf="qwen3",
)
FAMILIES = (QWEN3,)
