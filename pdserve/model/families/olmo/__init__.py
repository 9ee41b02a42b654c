"""OLMo-2 and OLMo-3: norms behind the operations only, and norms over all heads of Q and of K together.

OLMo-3 has three layers with a window to one without.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    GgufFormat,
    HFConfig,
    read_attention,
    read_layer_kinds,
    read_mlp,
    read_num_layers,
    read_window,
    sandwich_layer,
)
from pdserve.model.fields import read_count
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec, has_ropes_by_kind, read_rope_of_kind

_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_MAX_POSITIONS = 2048
_THETA3 = 5e5


def _layer(config: HFConfig, rope: RopeSpec, where: str, window: int | None) -> DecoderLayerSpec:
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True, window=window)
    attention = dataclasses.replace(attention, whole_qk_norm=True)
    return sandwich_layer(attention, read_mlp(config, where), _NORMS)


def _olmo2_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return (_layer(config, rope, where, None),) * read_num_layers(config, where)


def _olmo3_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window, by_kind = read_window(config, where), has_ropes_by_kind(config, where)
    max_positions = read_count(config, "max_position_embeddings", where, default=_MAX_POSITIONS)
    ropes = {False: rope, True: RopeSpec(theta=rope.theta)}
    for has_window, kind in ((False, "full_attention"), (True, "sliding_attention")):
        if by_kind:
            ropes[has_window] = read_rope_of_kind(config, kind, max_positions, where, theta=_THETA3)
    kinds = {
        has_window: _layer(config, ropes[has_window], where, window if has_window else None)
        for has_window in (False, True)
    }
    return tuple(kinds[has_window] for has_window in read_layer_kinds(config, where, 4))


_GGUF_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def _gguf_config(facts: HFConfig) -> HFConfig:
    pattern = facts.get("attention.sliding_window_pattern")
    return {} if pattern is None else {"layer_types": ["sliding_attention" if x else "full_attention" for x in pattern]}


FAMILIES = (
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        max_positions=_MAX_POSITIONS,
        read_layers=_olmo2_layers,
        gguf=GgufFormat(
            architecture="olmo2",
            matches=lambda facts, names: not facts.get("attention.sliding_window"),
            names=_GGUF_NAMES,
        ),
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        max_positions=_MAX_POSITIONS,
        read_layers=_olmo3_layers,
        gguf=GgufFormat(
            architecture="olmo2",
            matches=lambda facts, names: bool(facts.get("attention.sliding_window")),
            keys={"sliding_window": "attention.sliding_window"},
            config=_gguf_config,
            names=_GGUF_NAMES,
        ),
        layer_types=WINDOW_LAYERS,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": _THETA3},
    ),
)
