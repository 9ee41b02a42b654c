"""gpt-oss: attention with sinks, with and without a window in turn, biases everywhere, and experts behind it."""

from __future__ import annotations

import dataclasses

from pdserve.model.families.family import (
    WINDOW_LAYERS,
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_layer_kinds,
    read_moe,
    read_window,
)
from pdserve.model.fields import read_number
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, LayerNames, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _attention(config: HFConfig, rope: RopeSpec, where: str, window: int | None) -> AttentionSpec:
    bias = bool(config.get("attention_bias", True))
    attention = read_attention(config, rope, where, qkv_bias=bias, o_bias=bias, window=window)
    return dataclasses.replace(attention, sinks=True)


def _experts(config: HFConfig, where: str) -> MoeSpec:
    """Read the experts. The weights of a token's experts are a softmax over these only, so they add up to 1."""
    fields = {**config, "moe_intermediate_size": config.get("intermediate_size")}
    return dataclasses.replace(
        read_moe(fields, where),
        norm_top_k=True,
        act="gpt_oss",
        act_limit=read_number(config, "swiglu_limit", where, default=7.0),
        router_bias=True,
        expert_bias=True,
        interleaved=True,
    )


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window, experts = read_window(config, where), _experts(config, where)
    kinds = {
        has_window: pre_norm_layer(_attention(config, rope, where, window if has_window else None), experts)
        for has_window in (False, True)
    }
    return tuple(kinds[has_window] for has_window in read_layer_kinds(config, where, 2))


FAMILIES = (
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        max_positions=131072,
        read_layers=_layers,
        names=WeightNames(layer=LayerNames(router="mlp.router")),
        layer_types=WINDOW_LAYERS,
        only={"swiglu_alpha": 1.702},
        defaults={
            "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "rope_parameters": _YARN,
        },
        gguf=GgufFormat(
            architecture="gpt-oss",
            keys={"sliding_window": "attention.sliding_window", "intermediate_size": "expert_feed_forward_length"},
            config=lambda facts: {"rope_parameters": {"truncate": False}},
            names={"post_attention_norm": "post_attention_layernorm"},
        ),
    ),
)  # fmt: skip
