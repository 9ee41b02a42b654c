"""Gemma-2: layers with and without a window in turn, soft caps of scores and logits."""

from __future__ import annotations

from pdserve.model.families import gemma
from pdserve.model.families.family import WINDOW_LAYERS, Family, HFConfig, read_layer_kinds, read_window
from pdserve.model.layer_spec import DecoderLayerSpec
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    window = read_window(config, where)
    kinds = {
        has_window: gemma.gemma_layer(config, rope, where, qk_norm=False, window=window if has_window else None)
        for has_window in (False, True)
    }
    return tuple(kinds[has_window] for has_window in read_layer_kinds(config, where, 2))


FAMILIES = (
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        max_positions=8192,
        read_layers=_layers,
        layer_types=WINDOW_LAYERS,
        activations=gemma.ACTIVATIONS,
        only=gemma.ONLY,
        defaults={
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        norm_offset=1.0,
        read_scales=gemma.read_scales,
    ),
)  # fmt: skip
