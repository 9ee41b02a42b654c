"""`ModelSpec`: the model's configuration, read from an HF `config.json`.

Code above the loader reads only `ModelSpec`. Called by the executor factory and by the gguf reader. The gguf reader
builds the same HF-named dictionary from the file's metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.base.parallel import ParallelShape, check_split, layers_of
from pdserve.errors import ConfigError, ModelError, UnsupportedModelError
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, Plane, Shard, attention_group
from pdserve.model.families import FAMILIES, Family
from pdserve.model.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    ModelFacts,
    option,
    read_count,
    read_mapping,
    read_number,
    read_texts,
    read_token_ids,
    unused_options,
)
from pdserve.model.layer_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    GatedDeltaSpec,
    IndexSpec,
    MLASpec,
    MLPSpec,
    MoeSpec,
    Operation,
    WeightNames,
)
from pdserve.model.quantization.config import read_quantization
from pdserve.model.rope import RopeSpec, read_rope

DTYPES = ("bfloat16", "float16", "float32")
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields beside `text_config` that concern the language model."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ModelSpec(ModelFacts):
    """Configuration of a decoder. Sizes are element counts.

    `layers` are all layers of the model, in order. `dtype` is the checkpoint's dtype; None when the config names none.
    `norm_offset` is added to the weights of RMS norms, those of gated norms excepted. Embeddings are multiplied by
    `embedding_scale`. Logits are multiplied by `logit_scale`; with `logit_softcap` a scaled logit l is then
    `logit_softcap * tanh(l / logit_softcap)`.
    """

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    layers: tuple[DecoderLayerSpec, ...]
    rms_norm_eps: float
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    names: WeightNames = WeightNames()
    norm_offset: float = 0.0
    config_digest: str = ""
    """Digest of all of `config.json`, for a model that runs through transformers; empty where `layers` say it all."""
    embedding_scale: float = option(1.0)
    logit_scale: float = option(1.0)
    logit_softcap: float | None = option(None)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @functools.cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of all layers, each once, in the order of the layers."""
        distinct = dict.fromkeys(self.layers)
        return tuple(dict.fromkeys(op for layer in distinct for op in layer.operations))

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The kinds of attention of the layers, each once, in the order of the layers."""
        return tuple(op for op in self.operations if isinstance(op, AttentionSpec))

    @functools.cached_property
    def rotations(self) -> tuple[tuple[RopeSpec, int], ...]:
        """The rotary embeddings of the layers, and the dimensions that each rotates, each pair once."""
        found: dict[tuple[RopeSpec, int], None] = {}
        for op in self.operations:
            if isinstance(op, AttentionSpec) and op.rope is not None:
                found[op.rope, op.head_dim] = None
            elif isinstance(op, MLASpec) and op.rope is not None:
                found[op.rope, op.rope_dim] = None
        return tuple(found)

    @property
    def reads_embeddings(self) -> bool:
        """Whether layers read the embeddings of the tokens beside the hidden states, which are given to the model."""
        return any(sublayer.embedding_norm is not None for layer in self.layers for sublayer in layer.sublayers)

    @property
    def moe(self) -> MoeSpec | None:
        """The experts of the layers `moe_layers`, the same in all of them; None for a model without experts."""
        return next((op for op in self.operations if isinstance(op, MoeSpec)), None)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if self.moe in layer.operations)

    def digest(self) -> str:
        """Return a short hash of the fields that two peers must share. The KV layout carries the dtype instead."""
        own = {"dtype", "architectures", "names", *(() if self.config_digest else ("config_digest",))}
        own |= unused_options(self)
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        facts |= {"eos_token_ids": sorted(self.eos_token_ids), "layers": repr(self.layers)}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_model_spec(directory: Path) -> ModelSpec:
    """Read the spec of the HF checkpoint in `directory`.

    Raises:
        ModelError: `config.json` is missing or damaged, or pdserve does not support the architecture or a feature.
    """
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return spec_from_config(config, read_json(generation) if generation.is_file() else {}, where=str(directory))


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises ModelError when the file is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model directory needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def spec_from_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    where: str,
    freq_divisors: tuple[float, ...] | None = None,
) -> ModelSpec:
    """Build a spec from HF-named `config` and `generation` dictionaries; errors name `where`.

    `freq_divisors` replaces the scaling of the rotary embedding; see `RopeSpec`.

    Raises:
        ModelError: a field is out of range, or pdserve does not support the architecture or a feature.
    """
    family, architectures = _architecture(config, where)
    if family.text_config:
        shared = {name: config[name] for name in _SHARED_FIELDS if name in config}
        config = {**read_mapping(config, "text_config", where), **shared}
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family, where)
    hidden_size = read_count(config, "hidden_size", where, most=MAX_WIDTH)
    max_positions = read_count(config, "max_position_embeddings", where, default=family.max_positions)
    rope = read_rope(config, max_positions, where, may_be_partial=family.may_be_partial)
    if freq_divisors is not None:
        rope = RopeSpec(theta=rope.theta, freq_divisors=freq_divisors)
    scales = family.read_scales(config, where)
    layers = family.read_layers(config, rope, where)
    return ModelSpec(
        model_type=family.model_type,
        architectures=architectures,
        vocab_size=read_count(config, "vocab_size", where),
        hidden_size=hidden_size,
        layers=layers,
        rms_norm_eps=read_number(config, "rms_norm_eps", where, default=1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=max_positions,
        eos_token_ids=read_token_ids((config.get("eos_token_id"), generation.get("eos_token_id")), where),
        dtype=read_dtype(config, where),
        names=_names(config, family, len(layers), where),
        norm_offset=family.norm_offset,
        embedding_scale=scales.embedding,
        logit_scale=scales.logits,
        logit_softcap=scales.logit_softcap,
    )


def resolve_context_length(asked: int | None, spec: ModelSpec) -> int:
    """Return the most tokens of a request, prompt and output together. Raises ConfigError."""
    if asked is None:
        return spec.max_positions
    if not 1 <= asked <= spec.max_positions:
        raise ConfigError(
            f"context_length must be in [1, {spec.max_positions}] for this model, got {asked}", field="context_length"
        )
    return asked


LayerKind = tuple[GroupKind, int | None, tuple[Plane, ...]]
"""What a layer caches: the kind of its group, its window, and its planes."""
_GROUP_ORDER = (GroupKind.FULL, GroupKind.MLA, GroupKind.INDEX, GroupKind.WINDOW, GroupKind.STATE)


def kv_layout(spec: ModelSpec, page_tokens: int, dtype: str, kv_dtype: str | None = None) -> KVLayout:
    """Return the KV layout of a model: layers that cache the same planes form a group.

    `dtype`: the model's. `kv_dtype`: that of keys and values; None: `dtype`.

    Attention layers with a window have groups of kind WINDOW, other attention layers groups of kind FULL, and layers
    with latents groups of kind MLA, with INDEX beside them where an index selects tokens. The attention layers of a
    model without any full attention keep all tokens, whatever their window is. Layers with a recurrent state have
    groups of kind STATE.

    Raises:
        UnsupportedModelError: the model has no attention.
    """
    keeps_all = all(op.window is not None for op in spec.attentions)
    layers: dict[LayerKind, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        for op in layer.operations:
            if isinstance(op, AttentionSpec):
                window = None if keeps_all else op.window
                kind = GroupKind.FULL if window is None else GroupKind.WINDOW
                planes = attention_group(
                    page_tokens=page_tokens, num_kv_heads=op.num_kv_heads, head_dim=op.head_dim,
                    dtype=kv_dtype or dtype, num_layers=spec.num_layers,
                ).planes  # fmt: skip
                layers.setdefault((kind, window, planes), []).append(index)
            elif isinstance(op, MLASpec):
                planes = attention_group(
                    kind=GroupKind.MLA, page_tokens=page_tokens, num_kv_heads=1, head_dim=op.latent_dim, dtype=dtype,
                    num_layers=spec.num_layers,
                ).planes  # fmt: skip
                layers.setdefault((GroupKind.MLA, None, planes), []).append(index)
                if op.index is not None and not op.index.shared:
                    key = index_plane(op.index, page_tokens, dtype)
                    layers.setdefault((GroupKind.INDEX, None, (key,)), []).append(index)
            elif isinstance(op, GatedDeltaSpec):
                layers.setdefault((GroupKind.STATE, None, state_planes(op, dtype)), []).append(index)
    layout = layout_of_layers(layers, spec.num_layers, page_tokens)
    if not layout.groups or layout.groups[0].kind not in (GroupKind.FULL, GroupKind.MLA):
        raise UnsupportedModelError("the model has recurrent layers only; at least one attention layer is needed")
    return layout


def layout_of_layers(layers: Mapping[LayerKind, Sequence[int]], num_layers: int, page_tokens: int) -> KVLayout:
    """Return the layout of a model of `num_layers` layers: a group for each kind of layer, token groups first.

    The first group of a kind has the kind's name, a second one the name with the number 2.
    """
    groups: list[KVGroup] = []
    for (kind, window, planes), numbers in sorted(layers.items(), key=lambda item: _GROUP_ORDER.index(item[0][0])):
        same = sum(group.kind is kind for group in groups)
        groups.append(
            KVGroup(
                name=kind.value if same == 0 else f"{kind.value}{same + 1}",
                kind=kind,
                layers=tuple(numbers),
                num_model_layers=num_layers,
                page_tokens=0 if kind is GroupKind.STATE else page_tokens,
                planes=planes,
                window=window,
            )
        )
    return KVLayout(tuple(groups))


def index_plane(op: IndexSpec, page_tokens: int, dtype: str) -> Plane:
    """Return the plane of a layer's index keys."""
    return Plane(
        name="index", num_heads=1, num_heads_total=1, rows=page_tokens, width=op.head_dim, dtype=dtype,
        shard=Shard.REPLICATED,
    )  # fmt: skip


def state_planes(op: GatedDeltaSpec, dtype: str) -> tuple[Plane, ...]:
    """Return the planes of a layer's slot: the last inputs of the convolution, by head, and the recurrent state."""
    columns = op.conv_kernel - 1
    shapes = (
        ("conv_q", op.num_key_heads, op.key_dim, columns, dtype, Shard.KEY_HEAD),
        ("conv_k", op.num_key_heads, op.key_dim, columns, dtype, Shard.KEY_HEAD),
        ("conv_v", op.num_value_heads, op.value_dim, columns, dtype, Shard.VALUE_HEAD),
        ("state", op.num_value_heads, op.key_dim, op.value_dim, "float32", Shard.VALUE_HEAD),
    )
    return tuple(
        Plane(name=name, num_heads=heads, num_heads_total=heads, rows=rows, width=width, dtype=kind, shard=shard)
        for name, heads, rows, width, kind, shard in shapes
    )


def check_spec(spec: ModelSpec, shape: ParallelShape, ep_size: int, num_sharing: int = 1) -> None:
    """Raise ConfigError, which names `tp_size`, `pp_size` or `ep_size`, when the model cannot be split that way.

    `num_sharing` is the number of replicas that share the feed-forward layers (DP attention).
    """
    if ep_size > 1 and spec.moe is None:
        raise ConfigError(f"--ep-size {ep_size} is for models with experts, and this one has none", field="ep_size")
    wide, tp = shape.tp_size * num_sharing, shape.tp_size
    columns = []
    for op in spec.operations:
        if isinstance(op, MLPSpec) or (isinstance(op, MoeSpec) and ep_size == 1):
            columns.append(op.intermediate_size)
        if isinstance(op, MoeSpec) and op.shared_intermediate_size and ep_size == 1:
            columns.append(op.shared_intermediate_size)
        if isinstance(op, GatedDeltaSpec) and (
            op.num_value_heads % tp or (op.num_key_heads % tp and tp % op.num_key_heads)
        ):
            raise ConfigError(
                f"--tp-size {tp} does not divide the model's {op.num_value_heads} value heads and {op.num_key_heads} "
                "key heads",
                field="tp_size",
            )
    for stage in range(shape.pp_size if shape.pp_size <= spec.num_layers else 0):
        first = layers_of(spec.num_layers, shape.pp_size, stage).start
        if any(isinstance(op, MLASpec) and op.index and op.index.shared for op in spec.layers[first].operations):
            raise ConfigError(
                f"--pp-size {shape.pp_size} begins a stage with layer {first}, whose tokens an index in "
                "an earlier layer selects",
                field="pp_size",
            )
    kinds = [(op.num_heads, op.num_kv_heads) for op in spec.attentions]
    kinds += [(op.num_heads, op.num_heads) for op in spec.operations if isinstance(op, MLASpec)]
    for num_heads, num_kv_heads in kinds:
        for intermediate_size in columns or [wide]:
            check_split(
                shape,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                num_layers=spec.num_layers,
                intermediate_size=intermediate_size,
                num_sharing=num_sharing,
            )


def _names(config: Mapping[str, Any], family: Family, num_layers: int, where: str) -> WeightNames:
    """Return the family's names, with the layers behind those of the model among the ignored ones."""
    if family.unread_layers is None:
        return family.names
    num_unread = read_count(config, family.unread_layers, where, default=1, least=0, most=MAX_LAYERS)
    behind = (family.names.layers.format(layer=num_layers + index) for index in range(num_unread))
    mtp = family.names.mtp.at(num_layers) if family.names.mtp is not None and num_unread else None
    return dataclasses.replace(family.names, ignored=(*family.names.ignored, *behind), mtp=mtp)


def _architecture(config: Mapping[str, Any], where: str) -> tuple[Family, tuple[str, ...]]:
    """Return `(family, architectures)`. The first architecture decides the family."""
    names = read_texts(config, "architectures", where)
    if not names:
        names = tuple(name for name, family in FAMILIES.items() if family.model_type == config.get("model_type"))
    if not names or names[0] not in FAMILIES:
        seen = names[0] if names else config.get("model_type")
        own_code = "auto_map" in config
        reason = "needs code of the checkpoint (auto_map), which pdserve never runs" if own_code else "is not supported"
        raise UnsupportedModelError(f"{where}: architecture {seen!r} {reason}; supported: {', '.join(FAMILIES)}")
    return FAMILIES[names[0]], names


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise ModelError for features that would silently change the generated tokens."""
    other = sorted(set(read_texts(config, "layer_types", where)) - family.layer_types)
    if other:
        known = ", ".join(sorted(family.layer_types))
        raise UnsupportedModelError(f"{where}: layer_types has {', '.join(other)}; supported: {known}")
    for name in ("hidden_act", "hidden_activation"):
        if config.get(name) is not None and config[name] not in tuple(family.activations):  # any JSON value may be here
            known = ", ".join(sorted(family.activations))
            raise UnsupportedModelError(f"{where}: {name} {config[name]!r} is not supported; supported: {known}")
    for name, only in family.only.items():
        if config.get(name) is not None and config[name] != only:
            raise UnsupportedModelError(f"{where}: {name} {config[name]!r} is not supported; supported: {only!r}")
    read_quantization(config, where)


def read_dtype(config: Mapping[str, Any], where: str) -> str | None:
    """Return the checkpoint's dtype from `dtype` (new name) or `torch_dtype` (old name); None when absent."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise ModelError(f"{where}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return short
