"""Reads the weight of one linear layer from the tensors of its `QuantMethod`.

`weight_source` makes one `TensorSource` of them, which reads the weight dequantized. The source of a format that the
CPU kernels can keep implements `QuantizedSource` too. Any part of a weight can be read: the groups and words that it
touches are read whole, and cut afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, power_of_two, whole_row
from pdserve.model.params import TensorSource
from pdserve.model.quantization.schemes import Awq, Float8, Gptq, Grouped, Mxfp4, QuantMethod
from pdserve.model.quantization.unpack import AWQ_ORDER, WORD_BITS, Part, covering, read_unpacked, whole

Parts = Mapping[str, TensorSource]
"""The tensors of one layer, by the end of their names."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of MXFP4; the fourth bit is the sign."""
_MX_BLOCK, _E8M0_BIAS = 32, 127


def weight_source(method: QuantMethod, name: str, parts: Parts) -> TensorSource:
    """Return the weight of the layer `name`. Raises ModelError when the shapes of its tensors do not fit."""
    if isinstance(method, Float8):
        return _float8(method, name, parts)
    if isinstance(method, Grouped):
        return _grouped(method, name, parts)
    if isinstance(method, Gptq):
        return _gptq(method, name, parts)
    if isinstance(method, Awq):
        return _awq(method, name, parts)
    assert isinstance(method, Mxfp4), method
    return _mxfp4(method, name, parts)


def _float8(method: Float8, name: str, parts: Parts) -> TensorSource:
    values = _matrix(name + method.main, parts[method.main])
    scale = next(parts[end] for end in method.scales if end in parts)
    num_out, num_in = values.shape
    block = (num_out, num_in)
    if math.prod(scale.shape) != 1:
        block = (1, num_in) if scale.shape in ((num_out,), (num_out, 1)) else method.block or block
    wanted = tuple(-(-size // unit) for size, unit in zip(values.shape, block, strict=True))
    fits = math.prod(scale.shape) == 1 if block == values.shape else scale.shape in (wanted, wanted[:1])
    if not fits:
        raise ModelError(f"the scale of {name} is {list(scale.shape)}, expected {list(wanted)}")
    return _Float8Source(values, scale, block)


def _grouped(method: Grouped, name: str, parts: Parts) -> TensorSource:
    values, scale = _matrix(name + method.main, parts[method.main]), parts[method.scales[0]]
    shape, per_word = values.shape, WORD_BITS // method.bits
    if method.is_packed:
        stated = parts[".weight_shape"].read(None).tolist() if ".weight_shape" in parts else None
        shape = (shape[0], shape[1] * per_word) if stated is None else tuple(map(int, stated))
        if len(shape) != 2 or values.shape != (shape[0], -(-shape[1] // per_word)):
            raise ModelError(f"tensor {name}{method.main} is {list(values.shape)}, but {name}.weight_shape is {stated}")
    groups = -(-shape[1] // (method.group or shape[1]))
    whole_rows = ((shape[0],), (1,), (1, 1), ()) if groups == 1 else ()
    _check(name + method.scales[0], scale, ((shape[0], groups), *whole_rows))
    index = _part(name, parts, ".weight_g_idx") if method.reorders else None
    if index is not None:
        _check(f"{name}.weight_g_idx", index, ((shape[1],),))
    zero = None if method.is_symmetric else _part(name, parts, ".weight_zero_point")
    if zero is not None and method.is_packed:
        _check(f"{name}.weight_zero_point", zero, ((-(-shape[0] // per_word), groups),))
    elif zero is not None:
        _check(f"{name}.weight_zero_point", zero, ((shape[0], groups), *whole_rows))
    made = _GroupedSource(shape, values, scale, zero, index, method)
    kept = _format(method.bits, method.group, shape, method.is_symmetric, method.reorders)
    return made if kept else _Dequantized(made)


def _gptq(method: Gptq, name: str, parts: Parts) -> TensorSource:
    per_word = WORD_BITS // method.bits
    values, scale = _matrix(name + method.main, parts[method.main]), parts[method.scales[0]]
    zeros = _part(name, parts, ".qzeros")
    num_in, num_out = values.shape[0] * per_word, values.shape[1]
    groups = -(-num_in // (method.group or num_in))
    _check(f"{name}.scales", scale, ((groups, num_out),))
    _check(f"{name}.qzeros", zeros, ((groups, num_out // per_word),))
    index = _part(name, parts, ".g_idx") if method.reorders else None
    if index is not None:
        _check(f"{name}.g_idx", index, ((num_in,),))
    made = _WordSource(
        name, (num_out, num_in), values, scale, zeros, index, method.bits, method.group or num_in,
        packs_inputs=True, order=None, zero_offset=int(method.stores_zero_less_one), is_symmetric=method.is_symmetric,
    )  # fmt: skip
    kept = _format(method.bits, method.group, made.shape, method.is_symmetric, method.reorders)
    return made if kept else _Dequantized(made)


def _awq(method: Awq, name: str, parts: Parts) -> TensorSource:
    values, scale = _matrix(name + method.main, parts[method.main]), parts[method.scales[0]]
    zeros = _part(name, parts, ".qzeros")
    num_in, words = values.shape
    num_out = words * 8
    groups = -(-num_in // (method.group or num_in))
    _check(f"{name}.scales", scale, ((groups, num_out),))
    _check(f"{name}.qzeros", zeros, ((groups, words),))
    made = _WordSource(
        name, (num_out, num_in), values, scale, zeros, None, 4, method.group or num_in,
        packs_inputs=False, order=AWQ_ORDER, zero_offset=0, is_symmetric=False,
    )  # fmt: skip
    return made if _format(4, method.group, made.shape, False, False) else _Dequantized(made)


def _mxfp4(method: Mxfp4, name: str, parts: Parts) -> TensorSource:
    values, scale = parts[method.main], parts[method.scales[0]]
    if len(values.shape) != 4 or values.shape[3] != _MX_BLOCK // 2:
        raise ModelError(f"tensor {name}_blocks is {list(values.shape)}, expected [experts, outputs, blocks, 16]")
    _check(f"{name}_scales", scale, (values.shape[:3],))
    return _Mxfp4Source(values, scale)


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


@dataclasses.dataclass
class _Mxfp4Source:
    """Implements `TensorSource`: `[experts, in, out]`, as gpt-oss's unquantized checkpoints have it.

    An expert is dequantized whole, in bfloat16, which holds every value, and kept until another one is read: its rows
    are read one by one where gate and up alternate.
    """

    values: TensorSource
    scale: TensorSource
    _expert: int = -1
    _dequantized: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))

    @property
    def shape(self) -> tuple[int, ...]:
        experts, num_out, blocks, _ = self.values.shape
        return experts, blocks * _MX_BLOCK, num_out

    def read(self, part: Part | None) -> Tensor:
        experts, *rest = whole(self.shape, part)
        return torch.stack([self._read(expert)[tuple(rest)] for expert in range(experts.start, experts.stop)])

    def _read(self, expert: int) -> Tensor:
        if expert != self._expert:
            _, num_out, blocks, _ = self.values.shape
            rest = (slice(0, num_out), slice(0, blocks))
            packed = self.values.read((slice(expert, expert + 1), *rest, slice(0, _MX_BLOCK // 2)))[0]
            exponent = self.scale.read((slice(expert, expert + 1), *rest))[0].to(torch.int32) - _E8M0_BIAS
            places = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int64)
            values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))[places]
            wide = torch.ldexp(values, exponent.unsqueeze(-1)).flatten(-2)
            self._expert, self._dequantized = expert, wide.bfloat16().T
        return self._dequantized


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
    """Read scales or zero points `[rows, groups]` in float32. The checkpoint may have one for all outputs."""
    found = source.read(None).float()
    found = found.reshape(num_out, -1) if found.numel() > 1 else found.reshape(1, 1).expand(num_out, 1)
    return found[rows, groups].contiguous()


def _part(name: str, parts: Parts, end: str) -> TensorSource:
    if end not in parts:
        raise ModelError(f"the checkpoint has no tensor {name}{end}, which its quantization needs")
    return parts[end]


def _matrix(name: str, source: TensorSource) -> TensorSource:
    """Return `source`. Raises ModelError unless it is a matrix."""
    if len(source.shape) != 2:
        raise ModelError(f"tensor {name} is {list(source.shape)}, expected a matrix")
    return source


def _check(name: str, source: TensorSource, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise ModelError unless `source` has one of `shapes`."""
    if source.shape not in shapes:
        raise ModelError(f"tensor {name} is {list(source.shape)}, expected {list(shapes[0])}")
