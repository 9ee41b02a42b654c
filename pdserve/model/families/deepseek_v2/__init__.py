"""DeepSeek-V2 and V2-Lite: latent attention, experts routed by softmax, and shared experts without a gate."""

from __future__ import annotations

import dataclasses

from pdserve.errors import UnsupportedModelError
from pdserve.model.families.family import Family, HFConfig
from pdserve.model.families.mla import LAYER_NAMES, deepseek_layers, read_deepseek_moe, read_mla, with_groups
from pdserve.model.layer_spec import DecoderLayerSpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec

_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return deepseek_layers(
        config, read_mla(config, rope, where, caches_pairs=True), _moe(config, where), where, first_dense=0
    )


def _moe(config: HFConfig, where: str) -> MoeSpec:
    """Read the experts. The reference implementation does not use `norm_topk_prob`, so it must be off."""
    method = config.get("topk_method") or _GREEDY
    if method not in (_GREEDY, _BY_GROUP):
        raise UnsupportedModelError(
            f"{where}: topk_method {method!r} is not supported; supported: {_GREEDY}, {_BY_GROUP}"
        )
    if config.get("norm_topk_prob"):
        raise UnsupportedModelError(f"{where}: norm_topk_prob is not supported for this architecture")
    if config.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModelError(f"{where}: scoring_func {config['scoring_func']!r} is not supported: softmax is")
    moe = dataclasses.replace(read_deepseek_moe(config, where, top_k=6), norm_top_k=False)
    return with_groups(moe, config, where) if method == _BY_GROUP else moe


FAMILIES = (
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        max_positions=2048,
        read_layers=_layers,
        names=WeightNames(layer=LAYER_NAMES),
    ),
)
