"""Reads GGUF files (llama.cpp's format) as HF-named configs and tensors, through the `gguf` package.

Called by `loader` to run such a file, and by `hf_export` to write it as an HF directory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.config import ModelSpec, spec_from_config
from pdserve.model.families import FAMILIES
from pdserve.model.fields import read_number
from pdserve.model.file_headers import ARCHITECTURES, unsupported
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize
from pdserve.model.quantization.gguf_blocks import FORMATS, ROUNDED, decode
from pdserve.model.rope import yarn_attention_factor

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

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
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""HF names of a layer's tensors, by gguf name."""
EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
"""HF names of tensors that hold the matrices of all experts of a layer, by gguf name."""
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""HF names of the other tensors, by gguf name."""
_TOKEN_LISTS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
ROPE_DIVISORS = "rope_freqs.weight"


def open_gguf(path: Path) -> GGUFReader:
    """Map the file and read its metadata, which takes seconds for a large vocabulary.

    Raises ModelError when the file is missing or is not a gguf file.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata(reader)  # decodes the strings, which raises for damaged ones
        return reader
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable gguf file: {error}") from error


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Return all key-value pairs except the tokenizer's long lists."""
    return {key: field.contents() for key, field in reader.fields.items() if key not in _TOKEN_LISTS}


def text_field(reader: GGUFReader, key: str) -> str | None:
    """Return a metadata string; None when the file lacks it."""
    field = reader.fields.get(key)
    return None if field is None else str(field.contents())


def hf_config(reader: GGUFReader, path: Path) -> dict[str, Any]:
    """Return the metadata under HF `config.json` names. Raises ModelError for an unsupported architecture."""
    facts = metadata(reader)
    arch = facts.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise unsupported(path, arch)
    config = {name: facts[f"{arch}.{key}"] for name, key in _CONFIG_KEYS.items() if f"{arch}.{key}" in facts}
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    family = FAMILIES[ARCHITECTURES[arch]]
    missing = [
        key for key in ("block_count", "embedding_length", "attention.head_count") if f"{arch}.{key}" not in facts
    ]
    if missing:
        raise ModelError(f"{path} has no field {arch}.{missing[0]}")
    config |= {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": family.model_type,
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "dtype": _dtype(reader),
        "rope_parameters": _rope_parameters(facts, arch, str(path)),
        **family.gguf_config({key.removeprefix(f"{arch}."): value for key, value in facts.items()}),
    }
    if "num_experts" in config:
        config["norm_topk_prob"] = bool(facts.get(f"{arch}.expert_weights_norm", True))
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in facts:
            config[f"{name}_token_id"] = facts[f"tokenizer.ggml.{name}_token_id"]
    return config


def read_spec(path: Path, reader: GGUFReader | None = None) -> ModelSpec:
    """Read the spec of a gguf file. `reader` is the open file, or None to open it. Raises ModelError."""
    reader = reader or open_gguf(path)
    config = hf_config(reader, path)
    facts = metadata(reader)
    eot = {"eos_token_id": facts.get("tokenizer.ggml.eot_token_id")}
    spec = spec_from_config(config, eot, where=str(path), freq_divisors=_freq_divisors(reader))
    head_dim = spec.attentions[0].head_dim
    rotated = facts.get(f"{facts['general.architecture']}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"{path}: rope.dimension_count {rotated} differs from the head size {head_dim}")
    return spec


def _freq_divisors(reader: GGUFReader) -> tuple[float, ...] | None:
    """Return the divisors of the rotary frequencies; None when the file has none."""
    divisors = [tensor for tensor in reader.tensors if tensor.name == ROPE_DIVISORS]
    if not divisors:
        return None
    return tuple(float(value) for value in np.asarray(divisors[0].data, dtype=np.float32))


@dataclasses.dataclass(frozen=True)
class GgufSource:
    """One tensor of a gguf file by its HF name, dequantised on read. Implements `params.TensorSource`.

    `num_heads` is the head count used to undo llama.cpp's row reordering; None when the tensor is not reordered.
    `offset` is subtracted from the values. `expert` is the index of this expert in a tensor of all experts; None for
    other tensors.
    """

    path: Path
    name: str
    tensor: ReaderTensor
    num_heads: int | None
    offset: float = 0.0
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSource.shape`. gguf stores the fastest dimension first."""
        shape = tuple(int(size) for size in reversed(self.tensor.shape))
        return shape if self.expert is None else shape[1:]

    @property
    def data(self) -> npt.NDArray[Any]:
        """The values in the file."""
        return self.tensor.data if self.expert is None else self.tensor.data[self.expert]

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        """See `TensorSource.read`. Dequantises the whole tensor to float32. Raises ModelError for unknown types."""
        from gguf import dequantize

        try:
            values = dequantize(self.data, self.tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = self.tensor.tensor_type.name
            raise ModelError(f"{self.path}: {self.tensor.name} has type {kind}: {error}") from error
        if self.num_heads is not None:
            values = _unpermute(values, self.num_heads)
        whole = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        if self.offset:
            whole = whole - self.offset
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
        read = decode(self.data[index.numpy()], kind)
        groups = slice(columns.start // self.format.group, -(-columns.stop // self.format.group))
        mins = None if read.mins is None else read.mins[:, groups]
        group_of = read.group_of[columns] - groups.start
        return QuantizedWeight(read.values[:, columns], read.scale[:, groups], mins, group_of, read.bits)


def sources(path: Path, spec: ModelSpec, reader: GGUFReader | None = None) -> Iterator[GgufSource]:
    """Yield every parameter unread. `reader` as in `read_spec`. Raises ModelError for unknown tensors."""
    heads, family = spec.attentions[0], FAMILIES[spec.architectures[0]]
    for tensor in (reader or open_gguf(path)).tensors:
        if tensor.name == ROPE_DIVISORS:
            continue
        name = hf_name(tensor.name, path, family.gguf_names)
        experts = range(int(tensor.shape[2])) if "{expert}" in name else (None,)
        num_heads = None
        if family.gguf_rotates_pairs and ("q_proj" in name or "k_proj" in name):
            num_heads = heads.num_heads if "q_proj" in name else heads.num_kv_heads
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        is_kept = len(tensor.shape) > 1 and tensor.tensor_type.name in FORMATS
        for expert in experts:
            own = name if expert is None else name.format(expert=expert)
            yield (QuantizedGgufSource if is_kept else GgufSource)(path, own, tensor, num_heads, offset, expert)


def tensors(path: Path, spec: ModelSpec, reader: GGUFReader | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield `(HF name, float32 tensor)` of every parameter, dequantised one at a time. `reader` as in `read_spec`.

    Raises ModelError for unknown tensors.
    """
    for source in sources(path, spec, reader):
        yield source.name, source.read(None)


def hf_name(name: str, path: Path, own: Mapping[str, str]) -> str:
    """Return the HF name of a gguf tensor, with `{expert}` where it has all experts. `own`: see `Family.gguf_names`.

    Raises:
        ModelError: the tensor is unknown.
    """
    layer, names = _LAYER.fullmatch(name), {**LAYER_NAMES, **EXPERT_NAMES, **own}
    if layer is not None and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    if name not in TOP_NAMES:
        raise ModelError(f"{path} has a tensor {name} that pdserve does not use")
    return TOP_NAMES[name]


def _unpermute(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's row reordering, which turns HF's half-split rotation into a pairwise one."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _dtype(reader: GGUFReader) -> str:
    """Choose the export dtype: float32 or float16 when all matrices have that type, else bfloat16."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope_parameters(facts: dict[str, Any], arch: str, where: str) -> dict[str, Any]:
    """Build HF's `rope_parameters`."""

    def number(key: str, default: float) -> float:
        return read_number(facts, f"{arch}.rope.{key}", where, default=default)

    params: dict[str, Any] = {"rope_theta": number("freq_base", 10000.0), "rope_type": "default"}
    kind = facts.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return params
    params |= {"rope_type": kind, "factor": number("scaling.factor", 1.0)}
    if kind == "yarn":
        original = facts.get(f"{arch}.rope.scaling.original_context_length")
        scale = number("scaling.attn_factor", 1.0) * yarn_attention_factor(params["factor"], {}, where)
        params |= {"original_max_position_embeddings": original, "attention_factor": scale}
    return params
