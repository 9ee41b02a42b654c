"""What families with experts read alike from an HF config: dense layers between, experts in groups, shared experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pdserve.errors import ModelError
from pdserve.model.families.family import HFConfig, pre_norm_layer, read_num_layers
from pdserve.model.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_count, read_counts, read_number
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, LayerNames, MLPSpec, MoeSpec, MTPNames

SHARED_EXPERTS = LayerNames(
    shared_gate="mlp.shared_experts.gate_proj",
    shared_up="mlp.shared_experts.up_proj",
    shared_down="mlp.shared_experts.down_proj",
)
"""Checkpoint names of a layer with DeepSeek's names of the shared experts."""
BLOCK_SPARSE = LayerNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
)
"""Checkpoint names of a layer with Mixtral's names of the experts."""
MTP_NAMES = MTPNames(
    prefix="model.layers.{layer}.",
    project="model.layers.{layer}.eh_proj",
    embedding_norm="model.layers.{layer}.enorm",
    hidden_norm="model.layers.{layer}.hnorm",
    norm="model.layers.{layer}.shared_head.norm",
    layers="model.layers.{layer}.",
    ignored=("model.layers.{layer}.embed_tokens.", "model.layers.{layer}.shared_head.head."),
)
"""Names of the MTP module, which is the layer behind the last one. Its embedding and head repeat the model's."""


def read_local_experts(config: HFConfig, where: str, *, norm_top_k: bool) -> MoeSpec:
    """Read the experts of configs that have `num_local_experts`, each as wide as `intermediate_size`.

    Raises:
        ModelError: a number is out of range, or there are fewer experts than a token is routed to.
    """
    num_experts = read_count(config, "num_local_experts", where, most=MAX_HEADS)
    return MoeSpec(
        num_experts=num_experts,
        top_k=read_top_k(config, where, num_experts),
        intermediate_size=read_count(config, "intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=norm_top_k,
    )


def read_top_k(config: HFConfig, where: str, num_experts: int, field: str = "num_experts_per_tok") -> int:
    """Read the experts of a token, at most `num_experts`. Raises ModelError."""
    top_k = read_count(config, field, where)
    if top_k > num_experts:
        raise ModelError(f"{where}: {field} is {top_k}, but there are {num_experts} experts")
    return top_k


_FIELDS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "n_group")
"""Fields of `read_grouped_moe` that configs name differently."""


def read_grouped_moe(config: HFConfig, where: str, names: Mapping[str, str] | None = None) -> MoeSpec:
    """Read the experts of DeepSeek's configs: routed and shared ones, the former in groups.

    Shared experts run as one that is as wide as all together. `names`: the config's names of fields that it does not
    name as DeepSeek's configs do.

    Raises:
        ModelError: a number is out of range, there are fewer experts than a token is routed to, or the groups are not
            of equal size.
    """
    fields = {name: (names or {}).get(name, name) for name in _FIELDS}
    num_experts = read_count(config, fields["n_routed_experts"], where, most=MAX_HEADS)
    inner = read_count(config, "moe_intermediate_size", where, most=MAX_WIDTH)
    num_shared = read_count(config, fields["n_shared_experts"], where, default=0, least=0, most=MAX_HEADS)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=read_top_k(config, where, num_experts, fields["num_experts_per_tok"]),
        intermediate_size=inner,
        norm_top_k=bool(config.get(fields["norm_topk_prob"], True)),
        shared_intermediate_size=num_shared * inner,
        routed_scale=read_number(config, "routed_scaling_factor", where, default=1.0),
    )
    num_groups = read_count(config, fields["n_group"], where, default=1, most=num_experts)
    top_groups = read_count(config, "topk_group", where, default=num_groups, most=num_groups)
    if num_experts % num_groups:
        raise ModelError(f"{where}: {fields['n_group']} {num_groups} does not divide the {num_experts} experts")
    if top_groups * (num_experts // num_groups) < moe.top_k:
        raise ModelError(
            f"{where}: topk_group {top_groups} of {num_groups} groups have fewer than "
            f"{fields['num_experts_per_tok']} {moe.top_k} experts"
        )
    if top_groups == num_groups:  # no choice among groups
        return moe
    return dataclasses.replace(moe, num_groups=num_groups, top_groups=top_groups)


def first_dense_layers(
    config: HFConfig, where: str, attention: AttentionSpec, dense: MLPSpec, moe: MoeSpec
) -> tuple[DecoderLayerSpec, ...]:
    """Return Llama's layers. The first `first_k_dense_replace` layers have no experts."""
    num_layers = read_num_layers(config, where)
    num_dense = min(read_count(config, "first_k_dense_replace", where, least=0, most=MAX_LAYERS), num_layers)
    plain, mixture = (pre_norm_layer(attention, op) for op in (dense, moe))
    return (plain,) * num_dense + (mixture,) * (num_layers - num_dense)


def sparse_layers(
    config: HFConfig, where: str, attention: AttentionSpec, dense: MLPSpec, moe: MoeSpec
) -> tuple[DecoderLayerSpec, ...]:
    """Return Llama's layers; each `decoder_sparse_step`-th has experts, except for those of `mlp_only_layers`."""
    step = read_count(config, "decoder_sparse_step", where, default=1)
    always_dense = read_counts(config, "mlp_only_layers", where)
    plain, mixture = (pre_norm_layer(attention, op) for op in (dense, moe))
    return tuple(
        plain if index in always_dense or (index + 1) % step else mixture
        for index in range(read_num_layers(config, where))
    )
