"""Qwen2: Llama's layers with biases in Q, K and V. Some of the layers may attend to a window of positions."""

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
    mlp, windows = read_mlp(config, where), read_windows(config, where)
    kinds = {
        window: pre_norm_layer(read_attention(config, rope, where, qkv_bias=True, o_bias=False, window=window), mlp)
        for window in set(windows)
    }
    return tuple(kinds[window] for window in windows)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    max_positions=32768,
    read_layers=_layers,
    layer_types=WINDOW_LAYERS,
    gguf="qwen2",
)
FAMILIES = (QWEN2,)
