"""What families with latent attention (MLA) read alike from an HF config, and their names in checkpoints."""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError
from pdserve.model.families.family import HFConfig, read_mlp
from pdserve.model.families.mixture import SHARED_EXPERTS, first_dense_layers
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, read_count, read_mapping, read_number
from pdserve.model.layer_spec import DecoderLayerSpec, MLASpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec, yarn_mscale

NAMES = WeightNames(layer=SHARED_EXPERTS)
"""Checkpoint names of a model without an MTP module."""


def read_mla(config: HFConfig, rope: RopeSpec, where: str, *, caches_pairs: bool = False) -> MLASpec:
    """Read the attention. `q_lora_rank` null: one q projection. `caches_pairs`: see `MLASpec`.

    With YaRN and `mscale_all_dim` the scores are multiplied by the square of YaRN's factor for that scale.

    Raises:
        ModelError: a number is out of range, or the rotated dimensions are odd.
    """
    q_lora_rank = None
    if config.get("q_lora_rank", 0) is not None:
        q_lora_rank = read_count(config, "q_lora_rank", where, default=1536, most=MAX_WIDTH)
    rope_dim = read_count(config, "qk_rope_head_dim", where, default=64, most=MAX_HEAD_DIM)
    if rope_dim % 2:
        raise ModelError(f"{where}: qk_rope_head_dim is {rope_dim}, expected an even number")
    nope_dim = read_count(config, "qk_nope_head_dim", where, default=128, most=MAX_HEAD_DIM)
    scale = (nope_dim + rope_dim) ** -0.5
    params = {**read_mapping(config, "rope_parameters", where), **read_mapping(config, "rope_scaling", where)}
    if rope.type != "default" and params.get("mscale_all_dim"):
        scale *= yarn_mscale(rope.factor, read_number(params, "mscale_all_dim", where, default=1.0)) ** 2
    return MLASpec(
        num_heads=read_count(config, "num_attention_heads", where, most=MAX_HEADS),
        q_lora_rank=q_lora_rank,
        kv_lora_rank=read_count(config, "kv_lora_rank", where, default=512, most=MAX_HEAD_DIM),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=read_count(config, "v_head_dim", where, default=128, most=MAX_HEAD_DIM),
        rope=dataclasses.replace(rope, interleaved=bool(config.get("rope_interleave", True))),
        scale=scale,
        bias=bool(config.get("attention_bias", False)),
        caches_pairs=caches_pairs,
    )


def deepseek_layers(config: HFConfig, attention: MLASpec, moe: MoeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    """Return the layers, the first `first_k_dense_replace` of which have no experts."""
    dense = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    return first_dense_layers(config, where, attention, dense, moe)
