"""Qwen2: Llama's layers with biases in Q, K and V. Some of the layers may attend to a window of positions."""

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
    def attention(window: int | None) -> AttentionSpec:
        return read_attention(config, rope, where, qkv_bias=True, o_bias=False, window=window)

    return layers_with_windows(config, where, attention)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    max_positions=32768,
    read_layers=_layers,
    layer_types=WINDOW_LAYERS,
    gguf=GgufFormat(architecture="qwen2"),
)
FAMILIES = (QWEN2,)
