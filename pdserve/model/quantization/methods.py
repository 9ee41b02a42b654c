"""How checkpoints store the weight of one linear layer: FP8, int8, AWQ, GPTQ, compressed-tensors and MXFP4.

A `QuantMethod` names the tensors of a layer and makes one `TensorSource` of them, which reads the weight dequantized.
The source of a format that the CPU kernels can keep implements `QuantizedSource` too. Any part of a weight can be read:
the groups and words that it touches are read whole, and cut afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.params import TensorSource
from pdserve.model.quantization.grouped import GroupFormat, QuantizedWeight, power_of_two, whole_row
from pdserve.model.quantization.unpack import (
    AWQ_ORDER,
    WORD_BITS,
    Part,
    covering,
    read_unpacked,
    whole,
)

Parts = Mapping[str, TensorSource]
"""The tensors of one layer, by the end of their names."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of MXFP4; the fourth bit is the sign."""
_MX_BLOCK, _E8M0_BIAS = 32, 127


class QuantMethod(Protocol):
    """How the weight of a layer is stored. The names of its tensors are that of the layer, and one of these endings."""

    @property
    def main(self) -> str:
        """Ending of the tensor that has the values."""
        ...

    @property
    def scales(self) -> tuple[str, ...]:
        """Endings of tensors that have scales. The weight is quantized if the checkpoint has one of them."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Endings of all other tensors of a layer, those that are not used included."""
        ...

    @property
    def weight(self) -> str:
        """Ending of the name of the weight itself."""
        ...

    def source(self, name: str, parts: Parts) -> TensorSource:
        """Return the weight. `name` is for messages. Raises ModelError when the shapes do not fit."""
        ...


@dataclasses.dataclass(frozen=True)
class Float8:
    """`weight` in 8-bit floats, with one scale, one for each output, or one for each block of outputs and inputs.

    `block` is the size of a block; None: the checkpoint has no blocks.
    """

    block: tuple[int, int] | None = None
    main: str = ".weight"
    scales: tuple[str, ...] = (".weight_scale_inv", ".weight_scale")
    others: tuple[str, ...] = (".input_scale", ".activation_scale", ".weight_scale_ub")
    weight: str = ".weight"

    def source(self, name: str, parts: Parts) -> TensorSource:
        """See `QuantMethod.source`."""
        values, scale = parts[self.main], next(parts[end] for end in self.scales if end in parts)
        if len(values.shape) != 2:
            raise ModelError(f"tensor {name}{self.main} is {list(values.shape)}, expected a matrix")
        num_out, num_in = values.shape
        block = (num_out, num_in)
        if math.prod(scale.shape) != 1:
            block = (1, num_in) if scale.shape in ((num_out,), (num_out, 1)) else self.block or block
        wanted = tuple(-(-size // unit) for size, unit in zip(values.shape, block, strict=True))
        fits = math.prod(scale.shape) == 1 if block == values.shape else scale.shape in (wanted, wanted[:1])
        if not fits:
            raise ModelError(f"the scale of {name} is {list(scale.shape)}, expected {list(wanted)}")
        return _Float8Source(values, scale, block)


@dataclasses.dataclass(frozen=True)
class _Float8Source:
    """Implements `TensorSource`."""

    values: TensorSource
    scale: TensorSource
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, part: Part | None) -> Tensor:
        cut = whole(self.shape, part)
        scale = self.scale.read(None).float().reshape(-(-self.shape[0] // self.block[0]), -1)
        for dim in (0, 1):
            scale = scale.index_select(dim, torch.arange(cut[dim].start, cut[dim].stop) // self.block[dim])
        return self.values.read(part).float() * scale


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Integers of `bits` bits with a scale per output and group of inputs, of compressed-tensors.

    `group` is the number of inputs of a group; None: all. Values are packed into 32-bit words with `is_packed`, and
    int8 otherwise. `is_symmetric`: there are no zero points. `reorders`: inputs of a group are not neighbours.
    """

    bits: int
    group: int | None
    is_packed: bool
    is_symmetric: bool
    reorders: bool = False
    scales: tuple[str, ...] = (".weight_scale",)
    others: tuple[str, ...] = (".weight_zero_point", ".weight_g_idx", ".weight_shape", ".input_scale")
    weight: str = ".weight"

    @property
    def main(self) -> str:
        """See `QuantMethod.main`."""
        return ".weight_packed" if self.is_packed else ".weight"

    def source(self, name: str, parts: Parts) -> TensorSource:
        """See `QuantMethod.source`."""
        values, scale = parts[self.main], parts[self.scales[0]]
        shape = values.shape
        if self.is_packed:
            stated = parts[".weight_shape"].read(None).tolist() if ".weight_shape" in parts else None
            shape = (shape[0], shape[1] * WORD_BITS // self.bits) if stated is None else tuple(map(int, stated))
        groups = -(-shape[1] // (self.group or shape[1]))
        shapes = ((shape[0],), (1,), (1, 1), ()) if groups == 1 else ()
        _check(name + self.scales[0], scale, ((shape[0], groups), *shapes))
        index = parts.get(".weight_g_idx")
        made = _GroupedSource(shape, values, scale, parts.get(".weight_zero_point"), index, self)
        return made if _format(self.bits, self.group, shape, self.is_symmetric, self.reorders) else _Dequantized(made)


@dataclasses.dataclass(frozen=True)
class _GroupedSource:
    """Implements `QuantizedSource`, if groups are of a size that a `GroupFormat` may have."""

    shape: tuple[int, ...]
    values: TensorSource
    scale: TensorSource
    zero: TensorSource | None
    index: TensorSource | None
    method: Grouped

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def format(self) -> GroupFormat:
        method = self.method
        return _known(_format(method.bits, method.group, self.shape, method.is_symmetric, method.reorders))

    def read(self, part: Part | None) -> Tensor:
        return self.read_quantized(part).dequantized()

    def read_quantized(self, part: Part | None) -> QuantizedWeight:
        rows, columns = cut = whole(self.shape, part)
        bits, half = self.method.bits, 1 << (self.method.bits - 1)
        if self.method.is_packed:
            values = read_unpacked(self.values, cut, bits, 1).to(torch.uint8)
        else:
            values = (self.values.read(cut).to(torch.int16) + half).to(torch.uint8)
        group_of, groups = _groups(columns, self.method.group or self.shape[1], self.index)
        scale = _of_groups(self.scale, self.shape[0], rows, groups)
        if self.method.is_symmetric:
            return QuantizedWeight(values, scale, None, group_of, bits)
        assert self.zero is not None
        if self.method.is_packed:
            zero = read_unpacked(self.zero, (rows, groups), bits, 0).float()
        else:
            zero = _of_groups(self.zero, self.shape[0], rows, groups) + half
        return QuantizedWeight(values, scale, scale * -zero, group_of, bits)


@dataclasses.dataclass(frozen=True)
class Gptq:
    """GPTQ: words of values along the inputs. `group`: inputs of a group; None: all.

    `stores_zero_less_one`: the checkpoint has zero points less 1, as all but its version 2. `reorders`: groups follow
    `g_idx` (desc_act).
    """

    bits: int
    group: int | None
    is_symmetric: bool
    reorders: bool
    stores_zero_less_one: bool = True
    main: str = ".qweight"
    scales: tuple[str, ...] = (".scales",)
    others: tuple[str, ...] = (".qzeros", ".g_idx")
    weight: str = ".weight"

    def source(self, name: str, parts: Parts) -> TensorSource:
        """See `QuantMethod.source`."""
        per_word = WORD_BITS // self.bits
        values, scale, zeros = parts[self.main], parts[self.scales[0]], _part(name, parts, ".qzeros")
        num_in, num_out = values.shape[0] * per_word, values.shape[1]
        groups = -(-num_in // (self.group or num_in))
        _check(f"{name}.scales", scale, ((groups, num_out),))
        _check(f"{name}.qzeros", zeros, ((groups, num_out // per_word),))
        index = _part(name, parts, ".g_idx") if self.reorders else None
        made = _WordSource(
            name, (num_out, num_in), values, scale, zeros, index, self.bits, self.group or num_in,
            packs_inputs=True, order=None, zero_offset=int(self.stores_zero_less_one), is_symmetric=self.is_symmetric,
        )  # fmt: skip
        kept = _format(self.bits, self.group, made.shape, self.is_symmetric, self.reorders)
        return made if kept else _Dequantized(made)


@dataclasses.dataclass(frozen=True)
class Awq:
    """AWQ, gemm packing: words of eight 4-bit values along the outputs. `group`: inputs of a group; None: all."""

    group: int | None
    main: str = ".qweight"
    scales: tuple[str, ...] = (".scales",)
    others: tuple[str, ...] = (".qzeros",)
    weight: str = ".weight"

    def source(self, name: str, parts: Parts) -> TensorSource:
        """See `QuantMethod.source`."""
        values, scale, zeros = parts[self.main], parts[self.scales[0]], _part(name, parts, ".qzeros")
        num_in, words = values.shape
        num_out = words * 8
        groups = -(-num_in // (self.group or num_in))
        _check(f"{name}.scales", scale, ((groups, num_out),))
        _check(f"{name}.qzeros", zeros, ((groups, words),))
        made = _WordSource(
            name, (num_out, num_in), values, scale, zeros, None, 4, self.group or num_in,
            packs_inputs=False, order=AWQ_ORDER, zero_offset=0, is_symmetric=False,
        )  # fmt: skip
        return made if _format(4, self.group, made.shape, False, False) else _Dequantized(made)


@dataclasses.dataclass(frozen=True)
class _WordSource:
    """Implements `QuantizedSource` for matrices that are stored by input: AWQ and GPTQ."""

    name: str
    shape: tuple[int, ...]
    values: TensorSource
    scale: TensorSource
    zeros: TensorSource
    index: TensorSource | None
    bits: int
    group: int
    packs_inputs: bool
    order: tuple[int, ...] | None
    zero_offset: int
    is_symmetric: bool

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def format(self) -> GroupFormat:
        return _known(_format(self.bits, self.group, self.shape, self.is_symmetric, self.index is not None))

    def read(self, part: Part | None) -> Tensor:
        return self.read_quantized(part).dequantized()

    def read_quantized(self, part: Part | None) -> QuantizedWeight:
        rows, columns = whole(self.shape, part)
        dim = 0 if self.packs_inputs else 1
        values = read_unpacked(self.values, (columns, rows), self.bits, dim, self.order).T
        group_of, groups = _groups(columns, self.group, self.index)
        scale = self.scale.read((groups, rows)).float().T.contiguous()
        zero = read_unpacked(self.zeros, (groups, rows), self.bits, 1, self.order).T.float() + self.zero_offset
        if self.is_symmetric and not bool((zero == 1 << (self.bits - 1)).all()):
            raise ModelError(f"quantization_config has sym true, but {self.name}.qzeros has other zero points")
        mins = None if self.is_symmetric else (scale * -zero).contiguous()
        return QuantizedWeight(values.to(torch.uint8).contiguous(), scale, mins, group_of, self.bits)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """MXFP4 of gpt-oss: all experts of a layer in one tensor, with an exponent per output and 32 inputs."""

    main: str = "_blocks"
    scales: tuple[str, ...] = ("_scales",)
    others: tuple[str, ...] = ()
    weight: str = ""

    def source(self, name: str, parts: Parts) -> TensorSource:
        """See `QuantMethod.source`."""
        values, scale = parts[self.main], parts[self.scales[0]]
        if len(values.shape) != 4 or values.shape[3] != _MX_BLOCK // 2:
            raise ModelError(f"tensor {name}_blocks is {list(values.shape)}, expected [experts, outputs, blocks, 16]")
        _check(f"{name}_scales", scale, (values.shape[:3],))
        return _Mxfp4Source(values, scale)


@dataclasses.dataclass(frozen=True)
class _Mxfp4Source:
    """Implements `TensorSource`: `[experts, in, out]`, as gpt-oss's unquantized checkpoints have it."""

    values: TensorSource
    scale: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        experts, num_out, blocks, _ = self.values.shape
        return experts, blocks * _MX_BLOCK, num_out

    def read(self, part: Part | None) -> Tensor:
        experts, columns, rows = whole(self.shape, part)
        blocks = covering(columns, _MX_BLOCK)
        packed = self.values.read((experts, rows, blocks, slice(0, _MX_BLOCK // 2)))
        exponent = self.scale.read((experts, rows, blocks)).to(torch.int32) - _E8M0_BIAS
        places = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int64)
        values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))[places]
        wide = torch.ldexp(values, exponent.unsqueeze(-1)).flatten(-2)
        first = blocks.start * _MX_BLOCK
        return wide[..., columns.start - first : columns.stop - first].transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class _Dequantized:
    """Implements `TensorSource`: hides that `made` could be read quantized."""

    made: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.made.shape

    def read(self, part: Part | None) -> Tensor:
        return self.made.read(part)


def _format(
    bits: int, group: int | None, shape: tuple[int, ...], symmetric: bool, reorders: bool
) -> GroupFormat | None:
    """Return the format that holds such a weight; None: there is none."""
    size = whole_row(shape[1]) if group is None or group >= shape[1] else power_of_two(group)
    return None if size is None or reorders else GroupFormat(bits, size, not symmetric)


def _known(format: GroupFormat | None) -> GroupFormat:
    assert format is not None, "a weight without a format is not read quantized"
    return format


def _groups(columns: slice, group: int, index: TensorSource | None) -> tuple[Tensor, slice]:
    """Return the group of each input in `columns`, counted from the first group to read, and the groups to read."""
    if index is not None:
        group_of = index.read(None)[columns].to(torch.int64)
        groups = slice(int(group_of.min()), int(group_of.max()) + 1)
    else:
        group_of = torch.arange(columns.start, columns.stop) // group
        groups = covering(columns, group)
    return group_of - groups.start, groups


def _of_groups(source: TensorSource, num_out: int, rows: slice, groups: slice) -> Tensor:
    """Read scales or zero points `[rows, groups]` in float32, of which the checkpoint may have one for all outputs."""
    found = source.read(None).float()
    found = found.reshape(num_out, -1) if found.numel() > 1 else found.reshape(1, 1).expand(num_out, 1)
    return found[rows, groups].contiguous()


def _part(name: str, parts: Parts, end: str) -> TensorSource:
    if end not in parts:
        raise ModelError(f"the checkpoint has no tensor {name}{end}, which its quantization needs")
    return parts[end]


def _check(name: str, source: TensorSource, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise ModelError unless `source` has one of `shapes`."""
    if source.shape not in shapes:
        raise ModelError(f"tensor {name} is {list(source.shape)}, expected {list(shapes[0])}")
