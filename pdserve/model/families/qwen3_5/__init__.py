"""Qwen3.5, dense and with experts: the layers of Qwen3-Next, with separate projections in the GatedDeltaNet layers.

Of a vision-language checkpoint the text model is loaded. Its rotary embedding of text is the usual one, as the three
positions of a text token are equal.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.model.families.family import Family, HFConfig, read_mlp, read_num_layers
from pdserve.model.families.hybrid import LAYER_TYPES, MTP_NAMES, hybrid_layers, read_shared_moe
from pdserve.model.layer_spec import DecoderLayerSpec, WeightNames
from pdserve.model.rope import RopeSpec

_NAMES = WeightNames(
    ignored=("mtp.", "model.visual."),
    renamed=(("model.language_model.", "model."),),
    mtp=MTP_NAMES,
)
_Layers = Callable[[HFConfig, RopeSpec, str], tuple[DecoderLayerSpec, ...]]


def _dense_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    layers = [read_mlp(config, where)] * read_num_layers(config, where)
    return hybrid_layers(config, rope, where, layers, num_kv_heads=4)


def _moe_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    layers = [read_shared_moe(config, where, norm_top_k=True)] * read_num_layers(config, where)
    return hybrid_layers(config, rope, where, layers, num_kv_heads=2)


def _family(architecture: str, model_type: str, read_layers: _Layers, *, text_config: bool = False) -> Family:
    return Family(
        architecture=architecture,
        model_type=model_type,
        max_positions=32768,
        read_layers=read_layers,
        names=_NAMES,
        layer_types=LAYER_TYPES,
        norm_offset=1.0,
        may_be_partial=True,
        text_config=text_config,
    )


FAMILIES = (
    _family("Qwen3_5ForCausalLM", "qwen3_5_text", _dense_layers),
    _family("Qwen3_5ForConditionalGeneration", "qwen3_5", _dense_layers, text_config=True),
    _family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _moe_layers),
    _family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _moe_layers, text_config=True),
)
