"""`Family`: what a folder of this package gives for a model family, and what families read alike from an HF config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_count, read_texts
from pdserve.model.layer_spec import (
    Activation,
    AttentionSpec,
    DecoderLayerSpec,
    GatedDeltaSpec,
    MLASpec,
    MLPSpec,
    MoeSpec,
    SublayerSpec,
    WeightNames,
)
from pdserve.model.rope import RopeSpec

HFConfig = Mapping[str, Any]
"""The JSON object in a checkpoint's `config.json`."""


FULL_LAYERS = frozenset({"full_attention"})
WINDOW_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Values of `layer_types` in a config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors of embeddings and logits, and the soft cap of logits; see `ModelSpec`."""

    embedding: float = 1.0
    logits: float = 1.0
    logit_softcap: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFormat:
    """What gguf files of a family have that is not alike in all of them.

    `architecture`: its name there. Several families may have one name; the first whose `matches(facts, names)` is true
    reads the file. `facts` is the file's metadata, whose keys lack the architecture, and `names` are those of its
    tensors. `keys`: fields of the HF config, by key of the metadata, beside those that all families have.
    `config(facts)` returns further fields; `rope_parameters` there are added to those that all families have.

    `names`: HF names of tensors of a layer, by gguf name without `.weight` and `.bias`, beside those that follow from
    `Family.names`. With `rotates_pairs` llama.cpp's converter has reordered the rows of Q and K for a rotation of
    neighbouring dimensions. `Family.norm_offset` is part of the norms' weights.
    """

    architecture: str
    matches: Callable[[HFConfig, Collection[str]], bool] = lambda facts, names: True
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Callable[[HFConfig], HFConfig] = lambda facts: {}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rotates_pairs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one HF architecture.

    `read_layers(config, rope, where)` returns the layers of a model; its errors are ModelErrors that name the file
    `where` and the field. `max_positions` is the context length of a config that names none, and
    `max_positions_fields` are the names that the field may have. `layer_types`: values of
    the config's field of that name that `read_layers` knows. `activations`: values of `hidden_act` and
    `hidden_activation`. `only`: fields of the config for which this value alone is supported. `defaults` are values of
    fields that a config does not name. `norm_offset` is added to the weights of RMS norms. `read_scales(config, where)`
    returns the scales of embeddings and logits.
    `unread_layers`: the config's field with the number of layers that a checkpoint has behind those of the model, and
    which are not read; None: there are none. `may_be_partial`: a part of each head may be rotated. With `text_config`
    the fields are those of that object, as in vision-language models. `gguf`: what its gguf files have; None: such
    files are not read.
    """

    architecture: str
    model_type: str
    max_positions: int
    read_layers: Callable[[HFConfig, RopeSpec, str], tuple[DecoderLayerSpec, ...]]
    max_positions_fields: tuple[str, ...] = ("max_position_embeddings",)
    names: WeightNames = WeightNames()
    layer_types: frozenset[str] = FULL_LAYERS
    activations: frozenset[str] = frozenset({"silu"})
    only: Mapping[str, object] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    read_scales: Callable[[HFConfig, str], Scales] = lambda config, where: Scales()
    unread_layers: str | None = None
    may_be_partial: bool = False
    text_config: bool = False
    gguf: GgufFormat | None = None


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
    num_kv_heads: int | None = None,
    window: int | None = None,
) -> AttentionSpec:
    """Read the heads. `head_dim` is the size of a head in a config that names none; None: hidden size / heads.

    `num_kv_heads` are the KV heads in a config that names none; None: as many as query heads. `window`: see
    `AttentionSpec`.

    Raises:
        ModelError: a number is out of range, or the query heads cannot share the KV heads equally.
    """
    num_heads = read_count(config, "num_attention_heads", where, most=MAX_HEADS)
    num_kv_heads = read_count(config, "num_key_value_heads", where, default=num_kv_heads or num_heads)
    if head_dim is None:
        head_dim = read_count(config, "hidden_size", where, most=MAX_WIDTH) // num_heads
    head_dim = read_count(config, "head_dim", where, default=head_dim, most=MAX_HEAD_DIM)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    num_pairs = rope.rotary_dim(head_dim) // 2
    if rope.freq_divisors is not None and len(rope.freq_divisors) != num_pairs:
        raise ModelError(
            f"{where}: the rotary embedding has factors of {len(rope.freq_divisors)} pairs, and a head has {num_pairs}"
        )
    if rope.rotary_dim(head_dim) % 2:
        raise ModelError(
            f"{where}: partial_rotary_factor {rope.partial_rotary_factor} rotates {rope.rotary_dim(head_dim)} of "
            f"{head_dim} dimensions of a head, expected an even number"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        window=window,
    )


def read_mlp(config: HFConfig, where: str, *, bias: bool = False, act: Activation = "silu") -> MLPSpec:
    """Read a dense feed-forward."""
    width = read_count(config, "intermediate_size", where, most=MAX_WIDTH)
    return MLPSpec(intermediate_size=width, bias=bias, act=act)


def read_moe(config: HFConfig, where: str) -> MoeSpec:
    """Read the experts of Qwen's configs. Newer configs use `num_local_experts`."""
    name = "num_local_experts" if "num_experts" not in config else "num_experts"
    num_experts = read_count(config, name, where, most=MAX_HEADS)
    top_k = read_count(config, "num_experts_per_tok", where, default=8)
    if top_k > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_count(config, "moe_intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=bool(config.get("norm_topk_prob", False)),
    )


def pre_norm_layer(
    attention: AttentionSpec | MLASpec | GatedDeltaSpec, feed_forward: MLPSpec | MoeSpec
) -> DecoderLayerSpec:
    """Return Llama's layer: attention of any kind, then the feed-forward, each behind a norm of its own."""
    return DecoderLayerSpec(
        (SublayerSpec("input_layernorm", attention), SublayerSpec("post_attention_layernorm", feed_forward))
    )


def sandwich_layer(
    attention: AttentionSpec, feed_forward: MLPSpec, names: tuple[str | None, str, str | None, str]
) -> DecoderLayerSpec:
    """Return a layer whose operations have norms behind them.

    `names`: the norms before and behind attention, and before and behind the feed-forward; None: there is none.
    """
    return DecoderLayerSpec(
        (
            SublayerSpec(names[0], attention, post_norm=names[1]),
            SublayerSpec(names[2], feed_forward, post_norm=names[3]),
        )
    )


def read_layer_kinds(config: HFConfig, where: str, every: int) -> tuple[bool, ...]:
    """Read which layers have a window: those that `layer_types` says, or without it all but each `every`-th.

    Raises:
        ModelError: the number of entries is wrong.
    """
    num_layers = read_num_layers(config, where)
    kinds = read_texts(config, "layer_types", where)
    if not kinds:
        return tuple(bool((index + 1) % every) for index in range(num_layers))
    if len(kinds) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def read_window(config: HFConfig, where: str) -> int | None:
    """Read the window of layers that have one, `sliding_window`; None: the config sets none."""
    return None if config.get("sliding_window") is None else read_count(config, "sliding_window", where)


def read_windows(config: HFConfig, where: str) -> tuple[int | None, ...]:
    """Read the window of each layer, None for full attention.

    `use_sliding_window` turns windows on. The layers with a window are named by `layer_types`, and without it they are
    those from `max_window_layers` on.
    """
    num_layers = read_num_layers(config, where)
    window = read_window(config, where) if config.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    if read_texts(config, "layer_types", where):
        return tuple(window if has_window else None for has_window in read_layer_kinds(config, where, 1))
    first = read_count(config, "max_window_layers", where, default=28, least=0)
    return tuple(window if index >= first else None for index in range(num_layers))


def layers_with_windows(
    config: HFConfig, where: str, read: Callable[[int | None], AttentionSpec]
) -> tuple[DecoderLayerSpec, ...]:
    """Return Llama's layers with dense feed-forwards. `read(window)` returns the attention with that window."""
    mlp, windows = read_mlp(config, where), read_windows(config, where)
    kinds = {window: pre_norm_layer(read(window), mlp) for window in set(windows)}
    return tuple(kinds[window] for window in windows)


def refuse_windows(config: HFConfig, where: str, *, everywhere: bool = False) -> None:
    """Raise UnsupportedModelError for a config whose layers attend to a window of positions only.

    `use_sliding_window` concerns the layers from `max_window_layers` on, or with `everywhere` all layers.
    """
    some = config.get("layer_types") is None and read_num_layers(config, where) > read_count(
        config, "max_window_layers", where, default=28, least=0
    )
    is_on = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    if is_on and (everywhere or some):
        raise UnsupportedModelError(f"{where}: use_sliding_window is on; this architecture has no windows")
