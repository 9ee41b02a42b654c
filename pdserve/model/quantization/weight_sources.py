"""Reads the weight of one linear layer from the tensors of its `QuantMethod`.

`weight_source` makes one `TensorSource` of them, which reads the weight dequantized. The source of a format that the
CPU kernels can keep implements `QuantizedSource` too. Any part of a weight can be read: the groups and words that it
touches are read whole, and cut afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.grouped_weights import E2M1, GroupFormat, QuantizedWeight, mxfp4_scale, power_of_two, whole_row
from pdserve.model.quantization.schemes import MXFP4_MATRIX, Awq, Float8, Gptq, Grouped, Mxfp4, QuantMethod
from pdserve.model.tensor_sources import TensorSource

Parts = Mapping[str, TensorSource]
"""The tensors of one layer, by the end of their names."""
Part = tuple[slice, ...]
_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight values of AWQ's gemm packing."""
_E4M3_NAN = 0x7F
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
    made = _Float8Source(name, values, scale, block)
    is_e4m3 = values.read((slice(0, 1), slice(0, 1))).dtype == torch.float8_e4m3fn
    return made if is_e4m3 and _format(8, block[1], made.shape, True, False) else _Dequantized(made)


def _grouped(method: Grouped, name: str, parts: Parts) -> TensorSource:
    values, scale = _matrix(name + method.main, parts[method.main]), parts[method.scales[0]]
    shape, per_word = values.shape, _WORD_BITS // method.bits
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
    made = _GroupedSource(name, shape, values, scale, zero, index, method)
    kept = _format(method.bits, method.group, shape, method.is_symmetric, method.reorders)
    return made if kept else _Dequantized(made)


def _gptq(method: Gptq, name: str, parts: Parts) -> TensorSource:
    per_word = _WORD_BITS // method.bits
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
        packs_inputs=False, order=_AWQ_ORDER, zero_offset=0, is_symmetric=False,
    )  # fmt: skip
    return made if _format(4, method.group, made.shape, False, False) else _Dequantized(made)


def _mxfp4(method: Mxfp4, name: str, parts: Parts) -> TensorSource:
    values, scale = parts[method.main], parts[method.scales[0]]
    if method == MXFP4_MATRIX:
        num_out, num_bytes = _matrix(name + method.main, values).shape
        _check(name + method.scales[0], scale, ((num_out, -(-2 * num_bytes // _MX_BLOCK)),))
        return _Mxfp4MatrixSource(name, values, scale)
    if len(values.shape) != 4 or values.shape[3] != _MX_BLOCK // 2:
        raise ModelError(f"tensor {name}_blocks is {list(values.shape)}, expected [experts, outputs, blocks, 16]")
    _check(f"{name}_scales", scale, (values.shape[:3],))
    return _Mxfp4Source(name, values, scale)


@dataclasses.dataclass(frozen=True)
class _Float8Source:
    """Implements `QuantizedSource`, if a row of blocks has a size that a `GroupFormat` may have. `block`: its size."""

    name: str
    values: TensorSource
    scale: TensorSource
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def format(self) -> GroupFormat:
        return dataclasses.replace(_known(_format(8, self.block[1], self.shape, True, False)), is_float=True)

    def read(self, part: Part | None) -> Tensor:
        rows, columns = _whole(self.shape, part)
        group_of = torch.arange(columns.start, columns.stop) // self.block[1]
        return self.values.read(part).float() * self._scale_of(rows).index_select(1, group_of)

    def read_quantized(self, part: Part | None) -> QuantizedWeight:
        rows, columns = _whole(self.shape, part)
        values = self.values.read(part).view(torch.uint8)
        if bool(((values & _E4M3_NAN) == _E4M3_NAN).any()):
            raise ModelError(f"tensor {self.name}.weight has values that are not a number")
        group_of, groups = _groups(self.name, columns, self.block[1], None, self.shape[1])
        return QuantizedWeight(values, self._scale_of(rows)[:, groups].contiguous(), None, group_of, 8, is_float=True)

    def _scale_of(self, rows: slice) -> Tensor:
        """Return the scales of the outputs `rows` and all blocks of inputs in float32."""
        scale = self.scale.read(None).float().reshape(-(-self.shape[0] // self.block[0]), -1)
        return scale.index_select(0, torch.arange(rows.start, rows.stop) // self.block[0])


@dataclasses.dataclass(frozen=True)
class _GroupedSource:
    """Implements `QuantizedSource`, if groups are of a size that a `GroupFormat` may have."""

    name: str
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
        rows, columns = cut = _whole(self.shape, part)
        bits, half = self.method.bits, 1 << (self.method.bits - 1)
        if self.method.is_packed:
            values = _read_unpacked(self.values, cut, bits, 1).to(torch.uint8)
        else:
            values = (self.values.read(cut).to(torch.int16) + half).to(torch.uint8)
        group_of, groups = _groups(self.name, columns, self.method.group or self.shape[1], self.index, self.shape[1])
        scale = _of_groups(self.scale, self.shape[0], rows, groups)
        if self.method.is_symmetric:
            return QuantizedWeight(values, scale, None, group_of, bits)
        assert self.zero is not None
        if self.method.is_packed:
            zero = _read_unpacked(self.zero, (rows, groups), bits, 0).float()
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
        rows, columns = _whole(self.shape, part)
        dim = 0 if self.packs_inputs else 1
        values = _read_unpacked(self.values, (columns, rows), self.bits, dim, self.order).T
        group_of, groups = _groups(self.name, columns, self.group, self.index, self.shape[1])
        scale = self.scale.read((groups, rows)).float().T.contiguous()
        zero = _read_unpacked(self.zeros, (groups, rows), self.bits, 1, self.order).T.float() + self.zero_offset
        if self.is_symmetric and not bool((zero == 1 << (self.bits - 1)).all()):
            raise ModelError(f"quantization_config has sym true, but {self.name}.qzeros has other zero points")
        mins = None if self.is_symmetric else (scale * -zero).contiguous()
        return QuantizedWeight(values.to(torch.uint8).contiguous(), scale, mins, group_of, self.bits)


@dataclasses.dataclass
class _Mxfp4Source:
    """Implements `QuantizedSource`: `[experts, in, out]`, as gpt-oss's unquantized checkpoints have it.

    For `read` an expert is dequantized whole, in bfloat16, which holds every value, and kept until another one is read.
    """

    name: str
    values: TensorSource
    scale: TensorSource
    _expert: int = -1
    _dequantized: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))

    @property
    def shape(self) -> tuple[int, ...]:
        experts, num_out, blocks, _ = self.values.shape
        return experts, blocks * _MX_BLOCK, num_out

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def format(self) -> GroupFormat:
        return GroupFormat(4, _MX_BLOCK, is_float=True)

    def read_quantized(self, part: Part | None) -> QuantizedWeight:
        experts, columns, rows = _whole(self.shape, part)
        assert experts.stop == experts.start + 1, "one expert"
        group_of, blocks = _groups(self.name, columns, _MX_BLOCK, None, self.shape[1])
        codes, exponent = self._codes(experts.start, rows, blocks)
        return _mxfp4_weight(f"{self.name}_scales", codes, exponent, columns, group_of)

    def read(self, part: Part | None) -> Tensor:
        experts, *rest = _whole(self.shape, part)
        return torch.stack([self._read(expert)[tuple(rest)] for expert in range(experts.start, experts.stop)])

    def _read(self, expert: int) -> Tensor:
        if expert != self._expert:
            _, num_out, blocks, _ = self.values.shape
            codes, exponent = self._codes(expert, slice(0, num_out), slice(0, blocks))
            wide = torch.ldexp(E2M1[codes.int()], exponent.unsqueeze(-1)).flatten(-2)
            self._expert, self._dequantized = expert, wide.bfloat16().T
        return self._dequantized

    def _codes(self, expert: int, rows: slice, blocks: slice) -> tuple[Tensor, Tensor]:
        """Read codes `[rows, blocks, 32]` and exponents `[rows, blocks]`, int32, of one expert."""
        rest = (slice(expert, expert + 1), rows, blocks)
        packed = self.values.read((*rest, slice(0, _MX_BLOCK // 2)))[0]
        return _codes_of(packed), self.scale.read(rest)[0].to(torch.int32) - _E8M0_BIAS


@dataclasses.dataclass(frozen=True)
class _Mxfp4MatrixSource:
    """Implements `QuantizedSource`: `[out, in]`, in bytes `[out, in / 2]` and exponents `[out, in / 32]`."""

    name: str
    values: TensorSource
    scale: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def format(self) -> GroupFormat:
        return GroupFormat(4, _MX_BLOCK, is_float=True)

    def read(self, part: Part | None) -> Tensor:
        _, columns = _whole(self.shape, part)
        codes, exponent, _ = self._codes(part)
        wide = torch.ldexp(E2M1[codes.int()], exponent.unsqueeze(-1)).flatten(-2)
        first = columns.start // _MX_BLOCK * _MX_BLOCK
        return wide[:, columns.start - first : columns.stop - first]

    def read_quantized(self, part: Part | None) -> QuantizedWeight:
        _, columns = _whole(self.shape, part)
        codes, exponent, group_of = self._codes(part)
        return _mxfp4_weight(f"{self.name}.weight_scale", codes, exponent, columns, group_of)

    def _codes(self, part: Part | None) -> tuple[Tensor, Tensor, Tensor]:
        """Read codes `[rows, blocks, 32]`, exponents `[rows, blocks]`, int32, and the block of each input."""
        rows, columns = _whole(self.shape, part)
        group_of, blocks = _groups(self.name, columns, _MX_BLOCK, None, self.shape[1])
        half = _MX_BLOCK // 2
        packed = self.values.read((rows, slice(blocks.start * half, min(blocks.stop * half, self.values.shape[1]))))
        exponent = self.scale.read((rows, blocks)).to(torch.int32) - _E8M0_BIAS
        codes = torch.nn.functional.pad(_codes_of(packed), (0, -2 * packed.shape[1] % _MX_BLOCK))
        return codes.reshape(len(codes), -1, _MX_BLOCK), exponent, group_of


def _codes_of(packed: Tensor) -> Tensor:
    """Return the codes of bytes `[..., n]`, `[..., 2 * n]`: the low bits of a byte are the first one."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _mxfp4_weight(name: str, codes: Tensor, exponent: Tensor, columns: slice, group_of: Tensor) -> QuantizedWeight:
    """Return the inputs `columns` of codes `[rows, blocks, 32]` whose first block has the first of them.

    Raises ModelError for exponents, those of the tensor `name`, that the kernels do not have.
    """
    scale = mxfp4_scale(name, codes, exponent)
    first = columns.start // _MX_BLOCK * _MX_BLOCK
    values = codes.flatten(-2)[:, columns.start - first : columns.stop - first].contiguous()
    return QuantizedWeight(values, scale, None, group_of, 4, is_float=True)


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


def _groups(name: str, columns: slice, group: int, index: TensorSource | None, num_in: int) -> tuple[Tensor, slice]:
    """Return the group of each input in `columns`, counted from the first group to read, and the groups to read.

    `num_in` inputs have groups of `group`; `index` has the group of each, or None where groups are in order. Raises
    ModelError for a group that the layer `name` does not have.
    """
    if index is not None:
        group_of, count = index.read(None)[columns].to(torch.int64), -(-num_in // group)
        low, high = (int(bound) for bound in group_of.aminmax())
        if low < 0 or high >= count:
            raise ModelError(f"{name} has {count} groups of inputs, but its g_idx has groups {low} to {high}")
        groups = slice(int(group_of.min()), int(group_of.max()) + 1)
    else:
        group_of = torch.arange(columns.start, columns.stop) // group
        groups = _covering(columns, group)
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


def _whole(shape: Sequence[int], part: Part | None) -> Part:
    """Return `part`, or for None all of a tensor of `shape`."""
    return part if part is not None else tuple(slice(0, size) for size in shape)


def _covering(part: slice, unit: int) -> slice:
    """Return the units of `unit` items that `part` touches."""
    return slice(part.start // unit, -(-part.stop // unit))


def _unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack int32 `words` along `dim`: word i has the values i * n to i * n + n - 1, n = 32 / `bits`.

    `order` is the place of each value in its word; None: the lowest bits are the first value. Returns int32.
    """
    count = _WORD_BITS // bits
    places = torch.tensor(order if order is not None else range(count), dtype=torch.int32) * bits
    shape = list(words.shape)
    split = words.movedim(dim, -1).to(torch.int32).unsqueeze(-1) >> places
    shape[dim] *= count
    return (split & ((1 << bits) - 1)).flatten(-2).movedim(-1, dim).reshape(shape)


def _read_unpacked(source: TensorSource, part: Part, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Read `part`, in values, of a matrix whose dimension `dim` is packed into words. Returns int32."""
    count = _WORD_BITS // bits
    words = _covering(part[dim], count)
    found = _unpack(source.read((*part[:dim], words, *part[dim + 1 :])), bits, dim, order)
    first = words.start * count
    return found.narrow(dim, part[dim].start - first, part[dim].stop - part[dim].start)
