"""LoRA adapters (arXiv:2106.09685) in the format of PEFT: an `adapter_config.json` and an `adapter_model.safetensors`.

An adapter adds `scaling * B A x` to the outputs of linear layers. `read_adapter` cuts A and B to a rank's part of the
model: of a layer that splits its outputs the rank has rows of B, of one that splits its inputs columns of A. B has the
factor `scaling`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.base.parallel import RankCoord, kv_heads_of, layers_of, part_of
from pdserve.errors import ModelError
from pdserve.model.config import ModelSpec, read_json
from pdserve.model.layer_spec import AttentionSpec, MLPSpec
from pdserve.model.params import Param

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
DIGEST_CHARS = 16
"""Hexadecimal digits of `LoraAdapter.digest`."""
_PREFIX = "base_model.model."
_PARTS = ("lora_A.weight", "lora_B.weight")
_MAX_ALPHA = 1e9
_REFUSED = {
    "use_dora": "DoRA", "fan_in_fan_out": "transposed weights", "lora_bias": "biases of B",
    "modules_to_save": "further trained modules", "rank_pattern": "ranks that differ by module",
    "alpha_pattern": "scalings that differ by module", "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trained tokens", "layer_replication": "replicated layers",
    "target_parameters": "adapted parameters",
}  # fmt: skip
"""Fields of `adapter_config.json` that must be absent, empty or false, and what they ask for."""


@dataclasses.dataclass(frozen=True)
class LoraTarget:
    """A linear layer of the checkpoint that an adapter may change, `[num_out, num_in]`.

    A rank computes its outputs `rows` from its inputs `columns`. `is_held`: the layer is on this rank. `order`: that of
    the rows in which the rank stores the layer, see `Param`. `parts`: the targets that a fused layer stacks, whose rows
    and columns count; empty for other layers.
    """

    num_out: int
    num_in: int
    rows: range
    columns: range
    is_held: bool
    order: tuple[int, ...] | None = None
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PackedLora:
    """An adapter's weights packed for the CPU kernels: `address` of a `pdk_adapter`, valid while `kept` lives."""

    address: int
    kept: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class LoraAdapter:
    """An adapter's weights on one rank. `number`: unlike that of other adapters of the process, from 1 on.

    `weights`: by name of a linear layer, A `[rank, columns]` and B `[rows, rank]`. `digest`: of the whole adapter, the
    same on all ranks and peers that have it. `packed`: the weights for the CPU kernels, instead of `weights`; None
    where torch computes.
    """

    name: str
    number: int
    rank: int
    digest: str
    weights: Mapping[str, tuple[Tensor, Tensor]] = dataclasses.field(repr=False, compare=False)
    packed: PackedLora | None = dataclasses.field(default=None, repr=False, compare=False)


Adapters = tuple[LoraAdapter | None, ...]
"""The adapter of each row of a step; None for a row without one."""


def adapter_pointers(adapters: Adapters) -> npt.NDArray[np.int64]:
    """Return the addresses of adapters for the CPU kernels, 0 for a row without one; valid while the adapters live."""
    return np.array([0 if each is None or each.packed is None else each.packed.address for each in adapters], np.int64)


def lora_targets(spec: ModelSpec, coord: RankCoord) -> dict[str, LoraTarget]:
    """Return the linear layers that adapters may change, by name: projections of attention and of dense MLPs.

    Fused layers are among them: Q, K and V as one, and gate and up as one.
    """
    tp_size, rank = coord.shape.tp_size, coord.tp_rank
    mine = layers_of(spec.num_layers, coord.shape.pp_size, coord.pp_rank)
    hidden, found = spec.hidden_size, {}
    for index, layer in enumerate(spec.layers):
        names = spec.names.layer.under(spec.names.layers.format(layer=index))

        def add(
            name: str,
            num_out: int,
            num_in: int,
            rows: range,
            columns: range,
            order: tuple[int, ...] | None = None,
            *,
            is_held: bool = index in mine,
        ) -> None:
            found[name] = LoraTarget(num_out, num_in, rows, columns, is_held, order)

        def fuse(name: str, *parts: str) -> None:
            whole = sum(found[part].num_out for part in parts)
            found[name] = LoraTarget(whole, hidden, range(whole), range(hidden), found[parts[0]].is_held, parts=parts)

        for op in layer.operations:
            if isinstance(op, AttentionSpec):
                q, kv = part_of(op.num_heads, tp_size, rank), kv_heads_of(op.num_kv_heads, tp_size, rank)
                dim, every = op.head_dim, range(hidden)
                kv_rows = range(kv.start * dim, kv.stop * dim)
                wide, order = op.q_width // op.num_heads, op.head_order
                add(names.q, op.q_width, hidden, range(q.start * wide, q.stop * wide), every, order)
                add(names.k, op.num_kv_heads * dim, hidden, kv_rows, every, order)
                add(names.v, op.num_kv_heads * dim, hidden, kv_rows, every)
                fuse(names.qkv, names.q, names.k, names.v)
                add(names.o, hidden, op.num_heads * dim, every, range(q.start * dim, q.stop * dim))
            elif isinstance(op, MLPSpec):
                size = op.intermediate_size
                inner = part_of(size, tp_size, rank)
                add(names.gate, size, hidden, inner, range(hidden))
                add(names.up, size, hidden, inner, range(hidden))
                fuse(names.gate_up, names.gate, names.up)
                add(names.down, hidden, size, range(hidden), inner)
    return found


def read_scaling(directory: Path) -> tuple[int, float]:
    """Return rank and scaling of the adapter in `directory`, from its config.

    Raises:
        ModelError: it is no adapter, or one with a feature that is not supported.
    """
    _check_file(directory / CONFIG, MAX_CONFIG_BYTES)
    config = read_json(directory / CONFIG)
    where = str(directory / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type {config.get('peft_type')!r} is not supported; supported: LORA")
    for field, what in _REFUSED.items():
        if config.get(field):
            raise ModelError(f"{where}: {field}: {what} are not supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias {config['bias']!r} is not supported; supported: none")
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{where}: r must be a whole number from 1 on, got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
        raise ModelError(f"{where}: lora_alpha must be a number of magnitude at most {_MAX_ALPHA:g}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_adapter(
    directory: Path,
    name: str,
    number: int,
    targets: Mapping[str, LoraTarget],
    dtype: torch.dtype,
    device: torch.device,
    max_rank: int,
) -> LoraAdapter:
    """Read the adapter in `directory`, and cut it to this rank's part of `targets`.

    Raises:
        ModelError: it is missing or damaged, is not of this model, has a rank above `max_rank`, or changes other layers
            than `targets`.
    """
    rank, scaling = read_scaling(directory)
    if rank > max_rank:
        raise ModelError(f"{directory}: rank {rank} is larger than --max-lora-rank {max_rank}")
    whole = dict(_pairs(directory, targets, rank))
    digest = hashlib.sha256(repr((rank, scaling)).encode())
    for layer in sorted(whole):
        digest.update(layer.encode())
        for part in whole[layer]:
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    weights = {}
    for layer, (a, b) in _apart(whole, targets, directory).items():
        target = targets[layer]
        if target.is_held:
            rows, columns = target.rows, target.columns
            held = b[rows.start : rows.stop].float() * scaling
            mine = a[:, columns.start : columns.stop], Param(layer, tuple(b.shape), order=target.order).ordered(held)
            weights[layer] = (mine[0].to(device, dtype).contiguous(), mine[1].to(device, dtype).contiguous())
    return LoraAdapter(name, number, rank, digest.hexdigest()[:DIGEST_CHARS], weights)


def _pairs(
    directory: Path, targets: Mapping[str, LoraTarget], rank: int
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield A and B of each linear layer of an adapter, whole. Raises ModelError, before it reads a wrong tensor."""
    path = directory / WEIGHTS
    _check_file(path)
    try:
        with safe_open(path, "pt") as file:
            layers = _checked(file, path, targets, rank)
            for layer, (a, b) in layers.items():
                yield layer, (file.get_tensor(a), file.get_tensor(b))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _apart(
    whole: Mapping[str, tuple[Tensor, Tensor]], targets: Mapping[str, LoraTarget], directory: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by layer, with those of fused layers divided. Raises ModelError for a layer that comes twice."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for layer, (a, b) in whole.items():
        parts = targets[layer].parts or (layer,)
        rows = torch.split(b, [targets[part].num_out for part in parts])
        for part, own in zip(parts, rows, strict=True):
            if part in found:
                raise ModelError(f"{directory / WEIGHTS}: {part} is changed twice, also as a part of a fused layer")
            found[part] = a, own
    return found


def _check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise ModelError unless `path` is a regular file, of at most `max_bytes` bytes: others could block the reader."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size} bytes, more than {max_bytes}")


def _checked(file: Any, path: Path, targets: Mapping[str, LoraTarget], rank: int) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B of each linear layer, by the header of `file`. Raises ModelError."""
    layers: dict[str, dict[str, str]] = {}
    for key in file.keys():  # noqa: SIM118
        part = next((part for part in _PARTS if key.endswith(f".{part}")), None)
        layer = key.removeprefix(_PREFIX).removesuffix(f".{part}")
        if part is None or layer not in targets:
            raise ModelError(
                f"{path}: {key} changes no linear layer of this model that adapters may change: projections of "
                "attention and of dense MLPs"
            )
        layers.setdefault(layer, {})[part] = key
    if not layers:
        raise ModelError(f"{path} has no tensors")
    for layer, parts in layers.items():
        target = targets[layer]
        shapes = dict(zip(_PARTS, ((rank, target.num_in), (target.num_out, rank)), strict=True))
        for part, shape in shapes.items():
            if part not in parts:
                raise ModelError(f"{path}: {layer}.{part} is missing")
            header = file.get_slice(parts[part])
            found, dtype = list(header.get_shape()), header.get_dtype()
            if found != list(shape):
                raise ModelError(f"{path}: {layer}.{part} has shape {found}, but this model needs {list(shape)}")
            if not dtype.startswith(("F", "BF")):
                raise ModelError(f"{path}: {layer}.{part} is {dtype}, not a floating-point tensor")
    return {layer: (parts[_PARTS[0]], parts[_PARTS[1]]) for layer, parts in layers.items()}
