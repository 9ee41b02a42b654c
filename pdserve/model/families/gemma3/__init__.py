"""Gemma-3: five layers with a window to one without, each kind with rotary angles of its own, and norms of Q and K.

Of a vision-language checkpoint the text model is loaded.
"""

from __future__ import annotations

from pdserve.model.families import gemma
from pdserve.model.families.family import WINDOW_LAYERS, Family, GgufFormat, HFConfig, read_layer_kinds, read_window
from pdserve.model.fields import read_count
from pdserve.model.layer_spec import DecoderLayerSpec, WeightNames
from pdserve.model.rope import RopeSpec, has_ropes_by_kind, read_rope_of_kind

_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_MAX_POSITIONS = 131072


def _ropes(config: HFConfig, rope: RopeSpec, where: str) -> dict[bool, RopeSpec]:
    """Return the angles of layers with a window (True) and without.

    Older configs name the base of windows `rope_local_base_freq`; their other fields are those of full attention.
    """
    max_positions = read_count(config, "max_position_embeddings", where, default=_MAX_POSITIONS)
    if not has_ropes_by_kind(config, where):
        local = {"rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA}
        fields = {"rope_parameters": {"sliding_attention": local}}
        return {False: rope, True: read_rope_of_kind(fields, "sliding_attention", max_positions, where, theta=1e4)}
    kinds = {False: ("full_attention", _GLOBAL_THETA), True: ("sliding_attention", _LOCAL_THETA)}
    return {
        has_window: read_rope_of_kind(config, kind, max_positions, where, theta=theta)
        for has_window, (kind, theta) in kinds.items()
    }


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    ropes, window = _ropes(config, rope, where), read_window(config, where)
    kinds = {
        has_window: gemma.gemma_layer(
            config, ropes[has_window], where, qk_norm=True, window=window if has_window else None
        )
        for has_window in (False, True)
    }
    every = read_count(config, "sliding_window_pattern", where, default=6)
    return tuple(kinds[has_window] for has_window in read_layer_kinds(config, where, every))


_27B_LAYERS = 62
"""Layers of the one size whose scores have another scale than the size of a head gives: gguf files do not name it."""


def _gguf_config(facts: HFConfig) -> HFConfig:
    """Return what gguf files of Gemma-3 say beside the usual fields, or leave to llama.cpp's code."""
    hidden, heads = facts["embedding_length"], facts["attention.head_count"]
    has_own_scale = facts["block_count"] == _27B_LAYERS
    return {
        "sliding_window": facts.get("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads
        if has_own_scale
        else facts.get("attention.key_length", hidden // heads),
    }


_GGUF = GgufFormat(
    architecture="gemma3",
    keys={"final_logit_softcapping": "final_logit_softcapping"},
    config=_gguf_config,
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)


def _family(architecture: str, model_type: str, *, text_config: bool = False, gguf: GgufFormat | None = None) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        max_positions=_MAX_POSITIONS,
        read_layers=_layers,
        names=WeightNames(
            ignored=(
                "model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.",
            ),
            renamed=(
                ("model.language_model.", "model."), ("language_model.model.", "model."),
                ("language_model.lm_head.", "lm_head."),
            ),
        ),
        layer_types=WINDOW_LAYERS,
        activations=gemma.ACTIVATIONS,
        only=gemma.ONLY,
        defaults={
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": _GLOBAL_THETA,
        },
        norm_offset=1.0,
        read_scales=gemma.read_scales,
        text_config=text_config,
        gguf=gguf,
    )  # fmt: skip


FAMILIES = (
    _family("Gemma3ForCausalLM", "gemma3_text", gguf=_GGUF),
    _family("Gemma3ForConditionalGeneration", "gemma3", text_config=True),
)
