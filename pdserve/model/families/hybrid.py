"""What Qwen3-Next and Qwen3.5 read alike from an HF config: GatedDeltaNet layers beside gated full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.families.family import HFConfig, pre_norm_layer, read_attention, read_moe
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, read_count, read_mapping, read_texts
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, GatedDeltaSpec, MLPSpec, MoeSpec, MTPNames
from pdserve.model.rope import RopeSpec

_FULL, _LINEAR = "full_attention", "linear_attention"
LAYER_TYPES = frozenset({_FULL, _LINEAR})
MTP_NAMES = MTPNames()
"""Names of the MTP module: one layer of full attention, with the feed-forward of the model's layers."""
_PARTIAL = "partial_rotary_factor"
_DEFAULT_PARTIAL = 0.25
MAX_CONV_KERNEL = 64


def hybrid_layers(
    config: HFConfig,
    rope: RopeSpec,
    where: str,
    feed_forwards: Sequence[MLPSpec | MoeSpec],
    *,
    num_kv_heads: int,
    interleaved: bool = False,
) -> tuple[DecoderLayerSpec, ...]:
    """Return the layers of a model: `feed_forwards` of each, behind the kind of attention that the config names.

    `num_kv_heads` are those of a config that names none. `interleaved`: see `GatedDeltaSpec`.

    Raises:
        ModelError: a field is out of range, or does not fit the others.
    """
    attention = _read_gated_attention(config, rope, where, num_kv_heads)
    delta = read_gated_delta(config, where, interleaved=interleaved)
    ops = [attention if kind == _FULL else delta for kind in read_layer_types(config, where, len(feed_forwards))]
    made = {pair: pre_norm_layer(*pair) for pair in dict.fromkeys(zip(ops, feed_forwards, strict=True))}
    return tuple(made[pair] for pair in zip(ops, feed_forwards, strict=True))


def read_layer_types(config: HFConfig, where: str, num_layers: int) -> tuple[str, ...]:
    """Read `layer_types`; without it, every `full_attention_interval`-th layer has full attention.

    Raises:
        ModelError: the number of entries is wrong.
        UnsupportedModelError: no layer has full attention.
    """
    kinds = read_texts(config, "layer_types", where)
    if not kinds:
        interval = read_count(config, "full_attention_interval", where, default=4)
        kinds = tuple(_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers))
    if len(kinds) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    if _FULL not in kinds:
        raise UnsupportedModelError(f"{where}: layer_types has {_LINEAR} only; at least one {_FULL} layer is needed")
    return kinds


def read_gated_delta(config: HFConfig, where: str, *, interleaved: bool) -> GatedDeltaSpec:
    """Read the heads of the GatedDeltaNet layers.

    Raises:
        ModelError: a number is out of range, or the value heads cannot share the key heads equally.
    """
    num_key_heads = read_count(config, "linear_num_key_heads", where, default=16, most=MAX_HEADS)
    num_value_heads = read_count(config, "linear_num_value_heads", where, default=32, most=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise ModelError(
            f"{where}: linear_num_value_heads {num_value_heads} is not a multiple of "
            f"linear_num_key_heads {num_key_heads}"
        )
    return GatedDeltaSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=read_count(config, "linear_key_head_dim", where, default=128, most=MAX_HEAD_DIM),
        value_dim=read_count(config, "linear_value_head_dim", where, default=128, most=MAX_HEAD_DIM),
        conv_kernel=read_count(config, "linear_conv_kernel_dim", where, default=4, least=2, most=MAX_CONV_KERNEL),
        interleaved=interleaved,
    )


def read_shared_moe(config: HFConfig, where: str, *, norm_top_k: bool) -> MoeSpec:
    """Read the experts, and the shared expert with a gate. `norm_top_k`: see `MoeSpec`."""
    shared = read_count(config, "shared_expert_intermediate_size", where, default=512, most=MAX_WIDTH)
    return dataclasses.replace(
        read_moe(config, where), norm_top_k=norm_top_k, shared_intermediate_size=shared, shared_gate=True
    )


def _read_gated_attention(config: HFConfig, rope: RopeSpec, where: str, num_kv_heads: int) -> AttentionSpec:
    """Read the full attention: query norms, output gates, and a rotation of a part of each head."""
    if config.get(_PARTIAL) is None and read_mapping(config, "rope_parameters", where).get(_PARTIAL) is None:
        rope = dataclasses.replace(rope, partial_rotary_factor=_DEFAULT_PARTIAL)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(
        config, rope, where, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=256, num_kv_heads=num_kv_heads
    )
    rotary_dim = rope.rotary_dim(attention.head_dim)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{where}: {_PARTIAL} {rope.partial_rotary_factor} rotates {rotary_dim} of {attention.head_dim} dimensions "
            "of a head, expected an even number"
        )
    return dataclasses.replace(attention, output_gate=True)
