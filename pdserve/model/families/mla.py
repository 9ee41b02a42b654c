"""What the DeepSeek families read alike from an HF config: latent attention, dense first layers, experts in others."""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.family import HFConfig, read_mlp, read_num_layers
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_count, read_mapping, read_number
from pdserve.model.layer_spec import DecoderLayerSpec, LayerNames, MLASpec, MLPSpec, MoeSpec, SublayerSpec
from pdserve.model.rope import RopeSpec, yarn_mscale

LAYER_NAMES = LayerNames(
    shared_gate="mlp.shared_experts.gate_proj",
    shared_up="mlp.shared_experts.up_proj",
    shared_down="mlp.shared_experts.down_proj",
)
"""Checkpoint names of a layer's tensors."""


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


def read_deepseek_moe(config: HFConfig, where: str, *, top_k: int) -> MoeSpec:
    """Read the experts and the shared ones, which run as one. `top_k`: experts of a token where the config names none.

    Raises:
        ModelError: a number is out of range, or there are fewer experts than a token is routed to.
    """
    num_experts = read_count(config, "n_routed_experts", where, most=MAX_HEADS)
    top_k = read_count(config, "num_experts_per_tok", where, default=top_k)
    if top_k > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    inner = read_count(config, "moe_intermediate_size", where, most=MAX_WIDTH)
    num_shared = read_count(config, "n_shared_experts", where, default=1, least=0, most=MAX_HEADS)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        norm_top_k=bool(config.get("norm_topk_prob", False)),
        shared_intermediate_size=num_shared * inner,
        routed_scale=read_number(config, "routed_scaling_factor", where, default=1.0),
    )


def with_groups(moe: MoeSpec, config: HFConfig, where: str) -> MoeSpec:
    """Add the groups of experts to which a token's choice is limited.

    Raises:
        ModelError: the groups are not of equal size, too many are chosen, or those chosen have too few experts.
    """
    num_groups = read_count(config, "n_group", where, default=1, most=moe.num_experts)
    top_groups = read_count(config, "topk_group", where, default=num_groups, most=num_groups)
    if moe.num_experts % num_groups:
        raise ModelError(f"{where}: n_group {num_groups} does not divide the {moe.num_experts} experts")
    if top_groups * (moe.num_experts // num_groups) < moe.top_k:
        raise ModelError(
            f"{where}: topk_group {top_groups} of {num_groups} groups have fewer than num_experts_per_tok "
            f"{moe.top_k} experts"
        )
    return dataclasses.replace(moe, num_groups=num_groups, top_groups=top_groups)


def deepseek_layers(
    config: HFConfig, attention: MLASpec, moe: MoeSpec, where: str, *, first_dense: int
) -> tuple[DecoderLayerSpec, ...]:
    """Return the layers: dense feed-forwards in the first ones, experts in the others.

    `first_dense`: number of dense layers where `first_k_dense_replace` names none.

    Raises:
        UnsupportedModelError: `moe_layer_freq` has layers without experts among the others.
    """
    num_layers = read_num_layers(config, where)
    if config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            f"{where}: moe_layer_freq {config['moe_layer_freq']} is not supported; supported: 1"
        )
    dense = read_count(config, "first_k_dense_replace", where, default=first_dense, least=0, most=MAX_LAYERS)
    mlp = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    kinds = {op: _layer(attention, op) for op in (mlp, moe)}
    return tuple(kinds[mlp if index < dense else moe] for index in range(num_layers))


def _layer(attention: MLASpec, feed_forward: MLPSpec | MoeSpec) -> DecoderLayerSpec:
    """Return a layer: attention, then the feed-forward, each behind a norm of its own."""
    return DecoderLayerSpec(
        (SublayerSpec("input_layernorm", attention), SublayerSpec("post_attention_layernorm", feed_forward))
    )
