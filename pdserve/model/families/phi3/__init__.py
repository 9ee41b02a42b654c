"""Phi-3 and Phi-4: one linear layer for Q, K and V, and one for gate and up; LongRoPE in long-context checkpoints."""

from __future__ import annotations

from pdserve.model.families.family import (
    Family,
    GgufFormat,
    HFConfig,
    pre_norm_layer,
    read_attention,
    read_mlp,
    read_num_layers,
    read_window,
)
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window = read_window(config, where)
    attention = read_attention(config, rope, where, qkv_bias=False, o_bias=False, window=window)
    return (pre_norm_layer(attention, read_mlp(config, where)),) * read_num_layers(config, where)


def _gguf_config(facts: HFConfig) -> HFConfig:
    """Return the share of a head that is rotated, and the window, which is 0 in files of models without windows."""
    head_dim = facts["embedding_length"] // facts["attention.head_count"]
    return {
        "partial_rotary_factor": facts.get("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": facts.get("attention.sliding_window") or None,
    }


FAMILIES = (
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        max_positions=4096,
        read_layers=_layers,
        defaults={"rms_norm_eps": 1e-5},
        may_be_partial=True,
        gguf=GgufFormat(architecture="phi3", config=_gguf_config, names={"ffn_up": "mlp.gate_up_proj"}),
    ),
)
