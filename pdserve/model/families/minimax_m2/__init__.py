"""MiniMax-M2: norms of all query heads and of all key heads, a partial rotation, and experts with sigmoid scores.

A correction bias decides the choice of experts.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import UnsupportedModelError
from pdserve.model.families.family import Family, HFConfig, pre_norm_layer, read_attention, read_num_layers
from pdserve.model.families.mixture import BLOCK_SPARSE, read_local_experts
from pdserve.model.fields import MAX_HEAD_DIM, read_count, read_mapping
from pdserve.model.layer_spec import DecoderLayerSpec, WeightNames
from pdserve.model.rope import RopeSpec

_PARTIAL = "partial_rotary_factor"


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = read_attention(config, rope, where, qkv_bias=False, o_bias=False, qk_norm=True)
    rotary_dim = read_count(config, "rotary_dim", where, default=attention.head_dim, most=MAX_HEAD_DIM)
    if read_mapping(config, "rope_parameters", where).get(_PARTIAL) is None and config.get(_PARTIAL) is None:
        rope = dataclasses.replace(rope, partial_rotary_factor=rotary_dim / attention.head_dim)
    if rotary_dim > attention.head_dim or rope.rotary_dim(attention.head_dim) % 2:
        raise UnsupportedModelError(
            f"{where}: rotary_dim {rotary_dim} of heads of {attention.head_dim} is not supported; an even number of "
            "dimensions is rotated"
        )
    attention = dataclasses.replace(attention, rope=rope, whole_qk_norm=True)
    moe = dataclasses.replace(
        read_local_experts(config, where, norm_top_k=True), scoring="sigmoid", correction_bias=True
    )
    return (pre_norm_layer(attention, moe),) * read_num_layers(config, where)


FAMILIES = (
    Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        max_positions=196608,
        read_layers=_layers,
        names=WeightNames(
            layer=dataclasses.replace(BLOCK_SPARSE, correction="block_sparse_moe.e_score_correction_bias")
        ),
        only={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5000000.0},
        may_be_partial=True,
    ),
)  # fmt: skip
