"""DeepSeek-V3 and R1: latent attention, experts routed by sigmoid scores with a correction bias, in groups."""

from __future__ import annotations

import dataclasses

from pdserve.errors import UnsupportedModelError
from pdserve.model.families.family import Family, HFConfig
from pdserve.model.families.mla import LAYER_NAMES, deepseek_layers, read_deepseek_moe, read_mla, with_groups
from pdserve.model.layer_spec import DecoderLayerSpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return deepseek_layers(config, read_mla(config, rope, where), _moe(config, where), where, first_dense=3)


def _moe(config: HFConfig, where: str) -> MoeSpec:
    for field, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(field) not in (None, only):
            raise UnsupportedModelError(f"{where}: {field} {config[field]!r} is not supported; supported: {only}")
    moe = dataclasses.replace(
        read_deepseek_moe(config, where, top_k=8),
        norm_top_k=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        correction_bias=True,
    )
    return with_groups(moe, config, where)


FAMILIES = (
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        max_positions=4096,
        read_layers=_layers,
        names=WeightNames(layer=LAYER_NAMES),
    ),
)
