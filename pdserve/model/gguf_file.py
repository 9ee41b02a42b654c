"""Reads GGUF files (llama.cpp's format) as HF-named configs and tensors. The `gguf` package decodes their blocks.

Called by `loader` to run such a file, and by `hf_export` to write it as an HF directory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.config import ModelSpec, spec_from_config
from pdserve.model.families import FAMILIES, Family
from pdserve.model.fields import read_number
from pdserve.model.file_headers import ARCHITECTURES, unsupported
from pdserve.model.gguf_reader import GgufArray, GgufReader, GgufTensor
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize
from pdserve.model.quantization.gguf_blocks import FORMATS, ROUNDED, decode
from pdserve.model.rope import yarn_attention_factor

_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
LAYER_FIELDS = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "o",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm",
    "attn_q_a": "q_a", "attn_q_a_norm": "q_a_norm", "attn_q_b": "q_b",
    "attn_kv_a_mqa": "kv_a", "attn_kv_a_norm": "kv_a_norm", "attn_kv_b": "kv_b",
    "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "ffn_gate_inp": "router",
    "ffn_gate_exps": "expert_gate", "ffn_up_exps": "expert_up", "ffn_down_exps": "expert_down",
    "ffn_gate_shexp": "shared_gate", "ffn_up_shexp": "shared_up", "ffn_down_shexp": "shared_down",
    "ffn_gate_inp_shexp": "shared_router",
}  # fmt: skip
"""Fields of `LayerNames`, by gguf name. Tensors whose HF name has `{expert}` hold those of all experts of a layer."""
WHOLE_FIELDS = {"attn_sinks.weight": "sinks", "exp_probs_b.bias": "correction"}
"""Fields of `LayerNames` that are complete names, by complete gguf name."""
NORM_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
"""HF names of norms, by gguf name, where a family gives no others."""
TOP_FIELDS = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}
"""Fields of `WeightNames`, by gguf name."""
_ONLY = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0, "attn_logit_softcapping": 0.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.dimension_sections": None,
}  # fmt: skip
"""Fields that would change the computation, and the one value that is supported."""
_TOKEN_LISTS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_.]+)\.(weight|bias)")
ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Tensors that are fields of `rope_parameters`."""
_KV_B, _KV_B_HALVES = "attn_kv_b", ("attn_k_b", "attn_v_b")
"""The expansion of latents to keys and values, and the two tensors that newer files have in place of it."""
_NOT_WEIGHTS = frozenset({ROPE_DIVISORS, *_LONGROPE.values()})


def open_gguf(path: Path) -> GgufReader:
    """Map the file and read its header. Raises ModelError when the file is missing or is not a gguf file."""
    try:
        return GgufReader(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable gguf file: {error}") from error


def metadata(reader: GgufReader) -> dict[str, Any]:
    """Return all fields except long lists, such as the tokenizer's."""
    return {
        key: value
        for key, value in reader.fields.items()
        if key not in _TOKEN_LISTS and not isinstance(value, GgufArray)
    }


def hf_config(reader: GgufReader, path: Path) -> dict[str, Any]:
    """Return the metadata under HF `config.json` names.

    Raises:
        ModelError: the architecture is not supported, or a field is missing or has the wrong type.
    """
    facts = metadata(reader)
    arch = facts.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise unsupported(path, arch)
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if f"{arch}.{key}" not in facts:
            raise ModelError(f"{path} has no field {arch}.{key}")
    own = {key.removeprefix(f"{arch}."): value for key, value in facts.items()}
    for key, only in _ONLY.items():
        if own.get(key, only) != only:
            raise ModelError(f"{path}: {arch}.{key} {own[key]} is not supported; supported: {only}")
    try:
        family = _family(arch, own, shapes)
        assert family.gguf is not None
        special = dict(family.gguf.config(own))
    except KeyError as error:
        raise ModelError(f"{path} has no field {arch}.{error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path}: a field of its metadata has a wrong type or value: {error}") from error
    if own.get("nextn_predict_layers") and family.unread_layers is None:
        raise ModelError(f"{path}: {arch}.nextn_predict_layers is not supported for this architecture")
    keys = {**_CONFIG_KEYS, **family.gguf.keys}
    config = {name: own[key] for name, key in keys.items() if key in own}
    if "num_experts" in config:
        config["norm_topk_prob"] = bool(own.get("expert_weights_norm", True))
    rope = _rope_parameters(reader, facts, arch, str(path)) | special.pop("rope_parameters", {})
    if own.get("rope.scaling.yarn_log_multiplier") and "mscale_all_dim" not in rope:
        raise ModelError(f"{path}: {arch}.rope.scaling.yarn_log_multiplier is not supported for this architecture")
    config |= {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "dtype": _dtype(reader),
        "rope_parameters": rope,
        **special,
    }
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in facts:
            config[f"{name}_token_id"] = facts[f"tokenizer.ggml.{name}_token_id"]
    return config


def _family(arch: str, facts: Mapping[str, Any], shapes: Mapping[str, object]) -> Family:
    """Return the first family that reads a file with this architecture."""
    found = [family for family in FAMILIES.values() if family.gguf is not None and family.gguf.architecture == arch]
    for family in found:
        if family.gguf is not None and family.gguf.matches(facts, shapes.keys()):
            return family
    raise ValueError(f"no model of architecture {arch} has such fields")


def read_spec(path: Path, reader: GgufReader | None = None) -> ModelSpec:
    """Read the spec of a gguf file. `reader` is the open file, or None to open it. Raises ModelError."""
    reader = reader or open_gguf(path)
    config = hf_config(reader, path)
    facts = metadata(reader)
    eot = {"eos_token_id": facts.get("tokenizer.ggml.eot_token_id")}
    spec = spec_from_config(config, eot, where=str(path), freq_divisors=_freq_divisors(reader))
    asked = facts.get(f"{facts['general.architecture']}.rope.dimension_count")
    for rope, dim in spec.rotations:
        if asked not in (None, rope.rotary_dim(dim)):
            raise ModelError(
                f"{path}: rope.dimension_count {asked} is not supported; this architecture rotates "
                f"{rope.rotary_dim(dim)} dimensions of a head"
            )
    return spec


def _freq_divisors(reader: GgufReader) -> tuple[float, ...] | None:
    """Return the divisors of the rotary frequencies; None when the file has none."""
    found = _values(reader, ROPE_DIVISORS)
    return None if found is None else tuple(found)


def _values(reader: GgufReader, name: str) -> list[float] | None:
    """Return the values of a small tensor; None when the file lacks it."""
    for tensor in reader.tensors:
        if tensor.name == name:
            return [float(value) for value in np.asarray(tensor.data, dtype=np.float32).reshape(-1)]
    return None


@dataclasses.dataclass(frozen=True)
class GgufSource:
    """One tensor of a gguf file by its HF name, dequantised on read. Implements `params.TensorSource`.

    `num_heads` is the head count used to undo llama.cpp's row reordering; None when the tensor is not reordered.
    `offset` is subtracted from the values. `expert` is the index of this expert in a tensor of all experts; None for
    other tensors.
    """

    path: Path
    name: str
    tensor: GgufTensor
    num_heads: int | None
    offset: float = 0.0
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.n_bytes // (1 if self.expert is None else self.tensor.shape[0])

    @property
    def data(self) -> npt.NDArray[Any]:
        """The values in the file."""
        return self.tensor.data if self.expert is None else self.tensor.data[self.expert]

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        """See `TensorSource.read`. Dequantises the whole tensor to float32. Raises ModelError for unknown types."""
        values = _dequantized(self.path, self.tensor, self.data)
        if self.num_heads is not None:
            values = _unpermute(values, self.num_heads)
        whole = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        if self.offset:
            whole = whole - self.offset
        return whole if part is None else whole[part]


@dataclasses.dataclass(frozen=True)
class _LatentSource:
    """The expansion of latents from its two tensors. Implements `params.TensorSource`.

    `keys` is `[heads, latent, key dimensions]`, and `values` is `[heads, value dimensions, latent]`. The tensor has the
    rows of a head's keys, then those of its values.
    """

    path: Path
    name: str
    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, key_dim = self.keys.shape
        return heads * (key_dim + self.values.shape[1]), latent

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.keys.n_bytes + self.values.n_bytes

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        keys, values = (_dequantized(self.path, each, each.data) for each in (self.keys, self.values))
        whole = torch.from_numpy(np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(self.shape))
        return whole if part is None else whole[part]


@dataclasses.dataclass(frozen=True)
class QuantizedGgufSource(GgufSource):
    """A matrix of a type in `gguf_blocks.FORMATS`. Implements `params.QuantizedSource` too."""

    @property
    def format(self) -> GroupFormat:
        """See `QuantizedSource.format`."""
        return FORMATS[self.tensor.tensor_type.name]

    @property
    def is_exact(self) -> bool:
        """See `QuantizedSource.is_exact`."""
        return self.tensor.tensor_type.name not in ROUNDED

    def read_quantized(self, part: tuple[slice, ...] | None) -> QuantizedWeight:
        """See `QuantizedSource.read_quantized`. Weights of the types `gguf_blocks.ROUNDED` are rounded."""
        rows, columns = part or tuple(slice(0, size) for size in self.shape)
        kind, index = self.tensor.tensor_type.name, torch.arange(rows.start, rows.stop)
        if kind in ROUNDED:
            return quantize(self.read((rows, columns)), self.format)
        if self.num_heads is not None:
            index = torch.from_numpy(_unpermute(np.arange(self.shape[0]), self.num_heads))[index]
        read = decode(self.data[index.numpy()], kind, self.tensor.name)
        groups = slice(columns.start // self.format.group, -(-columns.stop // self.format.group))
        mins = None if read.mins is None else read.mins[:, groups]
        group_of = read.group_of[columns] - groups.start
        return QuantizedWeight(read.values[:, columns], read.scale[:, groups], mins, group_of, read.bits, read.is_float)


def sources(path: Path, spec: ModelSpec, reader: GgufReader | None = None) -> Iterator[GgufSource | _LatentSource]:
    """Yield every parameter unread. `reader` as in `read_spec`. Raises ModelError for unknown tensors."""
    family = FAMILIES[spec.architectures[0]]
    names, found = layer_names(family), (reader or open_gguf(path)).tensors
    halves: dict[str, dict[str, GgufTensor]] = {}
    for listed in found:
        tensor = listed
        if tensor.name in _NOT_WEIGHTS:
            continue
        layer = _LAYER.fullmatch(tensor.name)
        if layer is not None and family.unread_layers is not None and int(layer[1]) >= spec.num_layers:
            continue
        if layer is not None and layer[2] in _KV_B_HALVES:
            halves.setdefault(layer[1], {})[layer[2]] = tensor
            continue
        name = hf_name(tensor.name, path, family, names)
        if len(tensor.shape) == 1 and name.endswith(f"{family.names.layer.shared_router}.weight"):
            tensor = dataclasses.replace(tensor, shape=(1, *tensor.shape))  # older files have its one row as a vector
        experts = range(tensor.shape[0]) if "{expert}" in name else (None,)
        num_heads = None
        if family.gguf is not None and family.gguf.rotates_pairs and ("q_proj" in name or "k_proj" in name):
            heads = spec.attentions[0]
            num_heads = heads.num_heads if "q_proj" in name else heads.num_kv_heads
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        is_kept = len(tensor.shape) > 1 and tensor.tensor_type.name in FORMATS
        for expert in experts:
            own = name if expert is None else name.format(expert=expert)
            yield (QuantizedGgufSource if is_kept else GgufSource)(path, own, tensor, num_heads, offset, expert)
    whole = {layer[1] for tensor in found if (layer := _LAYER.fullmatch(tensor.name)) and layer[2] == _KV_B}
    for index in sorted(halves.keys() - whole):
        yield _latent_source(
            path, spec, halves[index], f"{spec.names.layers.format(layer=index)}{spec.names.layer.kv_b}"
        )


def _latent_source(path: Path, spec: ModelSpec, halves: Mapping[str, GgufTensor], name: str) -> _LatentSource:
    missing = [kind for kind in _KV_B_HALVES if kind not in halves]
    if missing:
        raise ModelError(f"{path} has no tensor {missing[0]} for {name}.weight")
    keys, values = (halves[kind] for kind in _KV_B_HALVES)
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise ModelError(f"{path}: {keys.name} is {list(keys.shape)} and {values.name} is {list(values.shape)}")
    return _LatentSource(path, f"{name}.weight", keys, values)


def tensors(path: Path, spec: ModelSpec, reader: GgufReader | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield `(HF name, float32 tensor)` of every parameter, dequantised one at a time. `reader` as in `read_spec`.

    Raises ModelError for unknown tensors.
    """
    for source in sources(path, spec, reader):
        yield source.name, source.read(None)


def layer_names(family: Family) -> dict[str, str]:
    """Return the HF names of tensors of a layer, by gguf name; complete ones, or without `.weight` and `.bias`."""
    fields = vars(family.names.layer)
    own = family.gguf.names if family.gguf is not None else {}
    return NORM_NAMES | {name: fields[field] for name, field in (LAYER_FIELDS | WHOLE_FIELDS).items()} | dict(own)


def hf_name(name: str, path: Path, family: Family, names: Mapping[str, str]) -> str:
    """Return the HF name of a gguf tensor, with `{expert}` where it has all experts. `names`: see `layer_names`.

    Raises:
        ModelError: the tensor is unknown.
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        prefix, complete = family.names.layers.format(layer=layer[1]), f"{layer[2]}.{layer[3]}"
        if complete in names:
            return prefix + names[complete]
        if layer[2] in names:
            return f"{prefix}{names[layer[2]]}.{layer[3]}"
    if name not in TOP_FIELDS:
        raise ModelError(f"{path} has a tensor {name} that pdserve does not use")
    return f"{vars(family.names)[TOP_FIELDS[name]]}.weight"


def _dequantized(path: Path, tensor: GgufTensor, data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return values of a tensor in float32. Raises ModelError for unknown types."""
    from gguf import dequantize

    try:
        return dequantize(data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ModelError(f"{path}: {tensor.name} has type {tensor.tensor_type.name}: {error}") from error


def _unpermute(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's row reordering, which turns HF's half-split rotation into a pairwise one."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _dtype(reader: GgufReader) -> str:
    """Choose the export dtype: float32 or float16 when all matrices have that type, else bfloat16."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope_parameters(reader: GgufReader, facts: dict[str, Any], arch: str, where: str) -> dict[str, Any]:
    """Build HF's `rope_parameters`."""
    prefix = f"{arch}.rope.scaling"

    def number(key: str, default: float) -> float:
        return read_number(facts, f"{arch}.rope.{key}", where, default=default)

    params: dict[str, Any] = {"rope_theta": number("freq_base", 10000.0), "rope_type": "default"}
    kind = facts.get(f"{prefix}.type", "none")
    divisors = {name: _values(reader, tensor) for name, tensor in _LONGROPE.items()}
    if any(divisors.values()):
        params |= {"rope_type": "longrope", **divisors}
        if f"{prefix}.attn_factor" in facts:
            params["attention_factor"] = number("scaling.attn_factor", 1.0)
    elif kind == "none":
        return params
    else:
        params |= {"rope_type": kind, "factor": number("scaling.factor", 1.0)}
    if kind == "yarn":
        scale = number("scaling.attn_factor", 1.0) * yarn_attention_factor(params["factor"], {}, where)
        params |= {
            "beta_fast": number("scaling.yarn_beta_fast", 32.0),
            "beta_slow": number("scaling.yarn_beta_slow", 1.0),
        }
        params["attention_factor"] = scale
    if params["rope_type"] in ("longrope", "yarn"):
        params["original_max_position_embeddings"] = facts.get(f"{prefix}.original_context_length")
    return {name: value for name, value in params.items() if value is not None}
