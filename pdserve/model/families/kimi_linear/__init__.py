"""Kimi Linear: Kimi Delta Attention (KDA) layers beside latent attention that rotates nothing.

Experts are DeepSeek-V3's. Configs and checkpoints have names of their own for them.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.family import Family, HFConfig, read_num_layers
from pdserve.model.families.hybrid import LAYER_TYPES, MAX_CONV_KERNEL, read_layer_types
from pdserve.model.families.mixture import SHARED_EXPERTS, read_grouped_moe
from pdserve.model.families.mla import latent_layers, read_mla
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, named_field, read_count, read_counts, read_mapping
from pdserve.model.layer_spec import DecoderLayerSpec, GatedDeltaSpec, MoeSpec, WeightNames
from pdserve.model.rope import RopeSpec

_LINEAR = "linear_attn_config"


def _layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    attention = dataclasses.replace(read_mla(config, rope, where), rope=None)
    delta, kinds = _read_delta(config, where), _read_kinds(config, where)
    ops = [attention if kind == "full_attention" else delta for kind in kinds]
    return latent_layers(config, where, ops, _read_moe(config, where))


def _read_kinds(config: HFConfig, where: str) -> tuple[str, ...]:
    """Read the kind of each layer: `layer_types`, or the lists of layers in `linear_attn_config`, numbered from 1.

    Raises:
        ModelError: the lists do not name each layer once.
        UnsupportedModelError: no layer has full attention.
    """
    num_layers, linear = read_num_layers(config, where), read_mapping(config, _LINEAR, where)
    if config.get("layer_types") or not {"full_attn_layers", "kda_layers"} <= linear.keys():
        usual = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
        return read_layer_types({"layer_types": config.get("layer_types") or usual}, where, num_layers)
    full, kda = (read_counts(linear, name, f"{where}: {_LINEAR}") for name in ("full_attn_layers", "kda_layers"))
    if sorted((*full, *kda)) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"{where}: full_attn_layers and kda_layers of {_LINEAR} do not name each of the {num_layers} layers once"
        )
    if not full:
        raise UnsupportedModelError(f"{where}: full_attn_layers of {_LINEAR} is empty; at least one layer is needed")
    return tuple("full_attention" if index + 1 in full else "linear_attention" for index in range(num_layers))


def _read_delta(config: HFConfig, where: str) -> GatedDeltaSpec:
    """Read the heads of the KDA layers, from `linear_attn_config` or from fields of the config."""
    linear = read_mapping(config, _LINEAR, where)

    def read(name: str, own: str, default: int, least: int, most: int) -> int:
        fields, at = (linear, f"{where}: {_LINEAR}") if linear.get(name) is not None else (config, where)
        return read_count(fields, name if fields is linear else own, at, default=default, least=least, most=most)

    num_heads = read("num_heads", "linear_num_heads", 32, 1, MAX_HEADS)
    head_dim = read("head_dim", "linear_head_dim", 128, 1, MAX_HEAD_DIM)
    return GatedDeltaSpec(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_kernel=read("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2, MAX_CONV_KERNEL),
        channel_decay=True,
    )


def _read_moe(config: HFConfig, where: str) -> MoeSpec:
    """Read the experts, whose fields the config may name as DeepSeek's configs do."""
    names = {field: named_field(config, *names) for field, names in _FIELDS.items()}
    return dataclasses.replace(read_grouped_moe(config, where, names), scoring="sigmoid", correction_bias=True)


_FIELDS = {
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "n_group": ("n_group", "num_expert_group"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"),
}
"""The names that configs have for fields of DeepSeek's; the last one is the family's own."""
FAMILIES = (
    Family(
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        max_positions=1048576,
        max_positions_fields=("model_max_length", "max_position_embeddings"),
        read_layers=_layers,
        names=WeightNames(
            layer=dataclasses.replace(
                SHARED_EXPERTS,
                expert_gate="mlp.experts.{expert}.w1",
                expert_up="mlp.experts.{expert}.w3",
                expert_down="mlp.experts.{expert}.w2",
                delta_b="self_attn.b_proj",
                delta_a_log="self_attn.A_log",
                delta_dt_bias="self_attn.dt_bias",
                delta_norm="self_attn.o_norm",
                delta_out="self_attn.o_proj",
            ),
            renamed=(("model.layers.{layer}.block_sparse_moe.", "model.layers.{layer}.mlp."),),
        ),
        layer_types=LAYER_TYPES,
        only={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
        defaults={
            "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "num_expert_group": 1,
            "topk_group": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1, "q_lora_rank": None, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0,
        },
        unread_layers="num_nextn_predict_layers",
    ),
)  # fmt: skip
