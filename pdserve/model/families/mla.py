"""What families with latent attention (MLA) read alike from an HF config, and their names in checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.family import HFConfig, pre_norm_layer, read_mlp, read_num_layers
from pdserve.model.families.mixture import SHARED_EXPERTS
from pdserve.model.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    read_count,
    read_mapping,
    read_number,
    read_texts,
)
from pdserve.model.layer_spec import DecoderLayerSpec, GatedDeltaSpec, IndexSpec, MLASpec, MoeSpec, WeightNames
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


def read_index(config: HFConfig, where: str, attention: MLASpec, *, num_heads: int) -> IndexSpec:
    """Read the index of sparse attention (DSA). `num_heads`: its heads in a config that names none.

    Raises:
        ModelError: a number is out of range, or more dimensions are rotated than an index key has.
        UnsupportedModelError: the queries have no lower rank, which an index reads.
    """
    if attention.q_lora_rank is None:
        raise UnsupportedModelError(f"{where}: q_lora_rank null is not supported for this architecture")
    index = IndexSpec(
        num_heads=read_count(config, "index_n_heads", where, default=num_heads, most=MAX_HEADS),
        head_dim=read_count(config, "index_head_dim", where, default=128, most=MAX_HEAD_DIM),
        top_k=read_count(config, "index_topk", where, default=2048),
    )
    if attention.rope_dim > index.head_dim:
        raise ModelError(f"{where}: qk_rope_head_dim {attention.rope_dim} is more than index_head_dim {index.head_dim}")
    return index


def read_sparse(config: HFConfig, where: str) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: by `mlp_layer_types`, else behind `first_k_dense_replace` layers.

    Raises:
        ModelError: the number of entries is wrong, or an entry is unknown.
    """
    num_layers = read_num_layers(config, where)
    kinds = read_texts(config, "mlp_layer_types", where)
    if not kinds:
        dense = read_count(config, "first_k_dense_replace", where, least=0, most=MAX_LAYERS)
        return tuple(index >= dense for index in range(num_layers))
    if len(kinds) != num_layers:
        raise ModelError(f"{where}: mlp_layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    other = sorted(set(kinds) - {"dense", "sparse"})
    if other:
        raise UnsupportedModelError(f"{where}: mlp_layer_types has {', '.join(other)}; supported: dense, sparse")
    return tuple(kind == "sparse" for kind in kinds)


def latent_layers(
    config: HFConfig, where: str, attentions: Sequence[MLASpec | GatedDeltaSpec], moe: MoeSpec
) -> tuple[DecoderLayerSpec, ...]:
    """Return the layers with these attentions, and experts in those of `read_sparse`."""
    dense = read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))
    pairs = [(op, moe if sparse else dense) for op, sparse in zip(attentions, read_sparse(config, where), strict=True)]
    kinds = {pair: pre_norm_layer(*pair) for pair in dict.fromkeys(pairs)}
    return tuple(kinds[pair] for pair in pairs)


_SIGMOID = 2
"""Value of `expert_gating_func` in gguf files."""
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def has_sigmoid_scores(facts: HFConfig, names: Collection[str]) -> bool:
    """Whether the router of a gguf file has sigmoid scores. Old files do not say it, but have a correction bias."""
    func = facts.get("expert_gating_func")
    return func == _SIGMOID if func else any(name.endswith(".exp_probs_b.bias") for name in names)


def gguf_config(facts: HFConfig) -> HFConfig:
    """Return fields of the HF config of a gguf file with the architecture `deepseek2`.

    Newer files have the sizes of heads in keys that end with `_mla`, and the size of a latent in the others. Without
    the number of groups of experts there are none, as in llama.cpp.
    """
    num_groups, rotated = facts.get("expert_group_count", 1), facts["rope.dimension_count"]
    num_drafting = facts.get("nextn_predict_layers", 0)
    config = {
        "num_hidden_layers": facts["block_count"] - num_drafting,
        "num_nextn_predict_layers": num_drafting,
        "num_key_value_heads": facts["attention.head_count"],
        "head_dim": rotated,
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": facts.get("attention.key_length_mla", facts["attention.key_length"]) - rotated,
        "v_head_dim": facts.get("attention.value_length_mla", facts["attention.value_length"]),
        "n_routed_experts": facts["expert_count"],
        "n_shared_experts": facts.get("expert_shared_count", 0),
        "first_k_dense_replace": facts.get("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": num_groups,
        "topk_group": facts.get("expert_group_used_count", num_groups),
    }
    if facts.get(_LOG_MULTIPLIER):  # llama.cpp's code takes DeepSeek's mscale to be equal to mscale_all_dim
        mscale = facts[_LOG_MULTIPLIER] / 0.1
        config["rope_parameters"] = {"mscale": mscale, "mscale_all_dim": mscale, "attention_factor": None}
    return config


def deepseek_layers(config: HFConfig, attention: MLASpec, moe: MoeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    """Return layers that all have the same attention."""
    return latent_layers(config, where, [attention] * read_num_layers(config, where), moe)
