"""Ministral: Mistral's layers; `layer_types` names those with a window, and without it all have one."""

from __future__ import annotations

from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_layer_kinds,
    read_mlp,
    read_num_layers,
    read_window,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window, mlp = read_window(config, where), read_mlp(config, where)
    kinds = {
        each: pre_norm_layer(
            read_attention(config, rope, where, qkv_bias=False, o_bias=False, num_kv_heads=8, window=each), mlp
        )
        for each in {window, None}
    }
    has_windows = (
        read_layer_kinds(config, where, 1) if config.get("layer_types") else (True,) * read_num_layers(config, where)
    )
    return tuple(kinds[window if has_window else None] for has_window in has_windows)


FAMILIES = (
    Family(
        architecture="MinistralForCausalLM",
        model_type="ministral",
        max_positions=131072,
        read_layers=_layers,
        layer_types=WINDOW_LAYERS,
        defaults={"sliding_window": 4096},
    ),
)
