"""`Family`: what a file of this package gives for a model family, and what families read alike from an HF config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_count
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, MLPSpec, MoeSpec, SublayerSpec, WeightNames
from pdserve.model.rope import RopeSpec

HFConfig = Mapping[str, Any]
"""The JSON object in a checkpoint's `config.json`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one HF architecture.

    `read_layers(config, rope, where)` returns the layers of a model; its errors are ModelErrors that name the file
    `where` and the field. `max_positions` is the context length of a config that names none.
    """

    architecture: str
    model_type: str
    max_positions: int
    read_layers: Callable[[HFConfig, RopeSpec, str], tuple[DecoderLayerSpec, ...]]
    names: WeightNames = WeightNames()


def read_num_layers(config: HFConfig, where: str) -> int:
    """Read the number of layers."""
    return read_count(config, "num_hidden_layers", where, most=MAX_LAYERS)


def read_attention(
    config: HFConfig,
    rope: RopeSpec,
    where: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> AttentionSpec:
    """Read the heads. `head_dim` is the size of a head in a config that names none; None: hidden size / heads.

    Raises:
        ModelError: a number is out of range, or the query heads cannot share the KV heads equally.
    """
    num_heads = read_count(config, "num_attention_heads", where, most=MAX_HEADS)
    num_kv_heads = read_count(config, "num_key_value_heads", where, default=num_heads)
    if head_dim is None:
        head_dim = read_count(config, "hidden_size", where, most=MAX_WIDTH) // num_heads
    head_dim = read_count(config, "head_dim", where, default=head_dim, most=MAX_HEAD_DIM)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def read_mlp(config: HFConfig, where: str, *, bias: bool = False) -> MLPSpec:
    """Read a dense feed-forward."""
    return MLPSpec(intermediate_size=read_count(config, "intermediate_size", where, most=MAX_WIDTH), bias=bias)


def pre_norm_layer(attention: AttentionSpec, feed_forward: MLPSpec | MoeSpec) -> DecoderLayerSpec:
    """Return Llama's layer: attention, then the feed-forward, each behind a norm of its own."""
    return DecoderLayerSpec(
        (SublayerSpec("input_layernorm", attention), SublayerSpec("post_attention_layernorm", feed_forward))
    )


def refuse_windows(config: HFConfig, where: str, *, everywhere: bool = False) -> None:
    """Raise UnsupportedModelError for a config whose layers attend to a window of positions only.

    `use_sliding_window` concerns the layers from `max_window_layers` on, or with `everywhere` all layers.
    """
    some = config.get("layer_types") is None and read_num_layers(config, where) > read_count(
        config, "max_window_layers", where, default=28, least=0
    )
    is_on = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    if is_on and (everywhere or some):
        raise UnsupportedModelError(f"{where}: use_sliding_window is on; sliding-window attention is not supported")
