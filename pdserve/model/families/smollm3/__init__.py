"""SmolLM3: Llama's layers; every fourth one rotates nothing (NoPE)."""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError
from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    read_windows,
)
from pdserve.model.fields import read_count, read_counts
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _rotates(config: HFConfig, where: str) -> tuple[bool, ...]:
    """Read which layers rotate. `no_rope_layers` has 1 for those that do."""
    num_layers, listed = read_num_layers(config, where), read_counts(config, "no_rope_layers", where)
    if not listed:
        every = read_count(config, "no_rope_layer_interval", where, default=4)
        return tuple(bool((index + 1) % every) for index in range(num_layers))
    if len(listed) != num_layers:
        raise ModelError(f"{where}: no_rope_layers has {len(listed)} entries, num_hidden_layers is {num_layers}")
    return tuple(map(bool, listed))


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    bias, rotates = bool(config.get("attention_bias", False)), _rotates(config, where)
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    windows = read_windows(config, where) if config.get("layer_types") else _windows(config, where, rotates)
    kinds = {}
    for window, rotated in set(zip(windows, rotates, strict=True)):
        attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, window=window)
        kinds[window, rotated] = pre_norm_layer(
            attention if rotated else dataclasses.replace(attention, rope=None), mlp
        )
    return tuple(kinds[pair] for pair in zip(windows, rotates, strict=True))


def _windows(config: HFConfig, where: str, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the windows of a config without `layer_types`: layers that rotate nothing have one, if windows are on."""
    everywhere = read_windows({**config, "max_window_layers": 0}, where)
    return tuple(None if rotated else window for window, rotated in zip(everywhere, rotates, strict=True))


FAMILIES = (
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        max_positions=32768,
        read_layers=_layers,
        layer_types=WINDOW_LAYERS,
        gguf=GgufFormat(architecture="smollm3", rotates_pairs=True),
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
)
