"""DeepSeek-V2 and V2-Lite: latent attention, experts routed by softmax, and shared experts without a gate."""

from __future__ import annotations

import dataclasses

from pdserve.errors import UnsupportedModelError
from pdserve.model.families.family import Family, GgufFormat, HFConfig
from pdserve.model.families.mixture import read_grouped_moe
from pdserve.model.families.mla import NAMES, deepseek_layers, gguf_config, has_sigmoid_scores, read_mla
from pdserve.model.layer_spec import DecoderLayerSpec, MoeSpec
from pdserve.model.rope import RopeSpec

_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    return deepseek_layers(config, read_mla(config, rope, where, caches_pairs=True), _moe(config, where), where)


def _moe(config: HFConfig, where: str) -> MoeSpec:
    method = config.get("topk_method") or _GREEDY
    if method not in (_GREEDY, _BY_GROUP):
        raise UnsupportedModelError(
            f"{where}: topk_method {method!r} is not supported; supported: {_GREEDY}, {_BY_GROUP}"
        )
    moe = dataclasses.replace(read_grouped_moe(config, where), norm_top_k=False)
    return moe if method == _BY_GROUP else dataclasses.replace(moe, num_groups=1, top_groups=1)


def _gguf_config(facts: HFConfig) -> HFConfig:
    config = gguf_config(facts)
    return {**config, "topk_method": _GREEDY if config["n_group"] == 1 else _BY_GROUP}


FAMILIES = (
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        max_positions=2048,
        read_layers=_layers,
        names=NAMES,
        only={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
        gguf=GgufFormat(
            architecture="deepseek2",
            matches=lambda facts, names: not has_sigmoid_scores(facts, names),
            config=_gguf_config,
        ),
        defaults={"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
)
