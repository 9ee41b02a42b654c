"""Weights packed for the CPU kernels. Made by `NativeDecoder`, and filled while a model is loaded.

Packed weights of one model are in one `Arena`. See `csrc/kernels.h` for the layouts.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from pdserve.base import native
from pdserve.base.native import library
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize
from pdserve.model.named_weights import MemoryRange

BLOCK = 32
"""Outputs computed together; a partial block is padded with zeros."""
Format = Literal["bf16", "int8"] | GroupFormat
"""Number format of packed weights. `inputs_of` gives that of the inputs of their products."""
_BF16, _INT8, _GROUP4, _GROUP8, _FP8, _MXFP4 = range(6)
_MXFP4_LINES = 17
"""Rows of 32 bytes of 32 inputs of a block in MXFP4: exponents, and half a byte for each weight."""
_ZERO = 128
"""The 8-bit encoding of a zero weight."""


class Arena:
    """Memory of packed weights, in huge pages when the system has them; freed with the last tensor in it."""

    def __init__(self) -> None:
        self._library = library()
        self._handle: int | None = self._library.pdk_arena_open()
        if self._handle is None:
            raise MemoryError("no memory for packed weights")
        self._taken: list[MemoryRange] = []

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return int(self._library.pdk_arena_bytes(self._handle))

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of zeros, which takes no memory until it is written. Raises MemoryError."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        if not wanted.nbytes:
            return torch.empty(shape, dtype=dtype)
        address = self._library.pdk_arena_take(self._handle, wanted.nbytes)
        if address is None:
            raise MemoryError(f"no memory for packed weights of {wanted.nbytes} bytes")
        raw: Any = (ctypes.c_char * wanted.nbytes).from_address(address)
        raw.arena = self  # keeps the arena alive as long as the tensor
        self._taken.append(MemoryRange(address, wanted.nbytes))
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def memory(self) -> list[MemoryRange]:
        """Return the memory of all tensors in it."""
        return list(self._taken)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.pdk_arena_close(self._handle)
            self._handle = None


@dataclasses.dataclass(frozen=True)
class Packed:
    """Linear layers of `num_out` outputs and `num_in` inputs each, packed one after the other.

    `data` is bf16 `[count, blocks, k / 2, 32, 2]`, or for 8 bits uint8 `[count, blocks, k / 4, 32, 4]` with `scale`
    float32 `[count, blocks * 32]`; `bias` is float32 of that shape. With groups of inputs `scale` is `[count, blocks,
    groups, 1, 32]`, or with minima `[..., 2, 32]`, and `data` of 4 bits is uint8 `[count, blocks, k / 4, 16, 4]`. FP8
    has such scales, and `data` uint8 `[count, blocks, k / 4, 64, 2]`. `data` of MXFP4 is uint8 `[count, blocks, k / 32,
    17, 32]`, with the scales in it. `scale` is None for bf16 and MXFP4, and `bias` is None for layers without one. `k`
    is the number of inputs, padded to a multiple of 32. A layer may consist of `num_parts` equal parts (gate and up),
    which are consecutive in the unpacked weights. Each block holds the same number of outputs of every part, part by
    part.
    """

    data: Tensor
    scale: Tensor | None
    bias: Tensor | None
    num_out: int
    num_in: int
    num_parts: int = 1

    @property
    def tensors(self) -> list[Tensor]:
        """All its tensors, `[count, ...]` each."""
        return [tensor for tensor in (self.data, self.scale, self.bias) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def pointers(self) -> native.Weights:
        """Pointers for the C interface, valid as long as this object lives."""
        address = [None if tensor is None else tensor.data_ptr() for tensor in (self.data, self.scale, self.bias)]
        count, blocks, deep = self.data.shape[:3]
        group = has_mins = 0
        if self.scale is not None and self.scale.ndim == 5:
            group, has_mins = _group_size(deep * 4, self.scale.shape[2]), self.scale.shape[3] - 1
        return native.Weights(
            _kind(self.data, self.scale), count * blocks, self.num_in, *address, group, has_mins
        )  # fmt: skip

    @property
    def inputs(self) -> Literal["bf16", "int8"]:
        """Number format of the inputs of its products."""
        return "bf16" if _kind(self.data, self.scale) in (_BF16, _FP8, _MXFP4) else "int8"

    def put_values(self, weight: QuantizedWeight, bias: Tensor | None = None, *, index: int = 0) -> None:
        """Pack the weights of layer `index`, which have its format, and its bias `[out]` or None.

        Outputs at the end of a layer of one part may be missing, and stay zero.
        """
        num_rows, num_in = weight.values.shape
        assert num_in == self.num_in and (num_rows == self.num_out or self.num_parts == 1), weight.values.shape
        assert bias is None or (self.bias is not None and bias.shape == (self.num_out,)), "opened without a bias"
        wide = None if bias is None else bias.float().contiguous()
        if weight.is_float and weight.bits == 4:
            assert bool((weight.scale.frexp().mantissa == 0.5).all()), "scales of MXFP4 are powers of two"
        values, scale = weight.values.contiguous(), weight.scale.contiguous()
        mins = None if weight.mins is None else weight.mins.contiguous()
        each, block = num_rows // self.num_parts, index * self.data.shape[1]
        for part in range(self.num_parts):
            first = part * each
            library().pdk_weights_put_values(
                ctypes.byref(self.pointers), block, part, self.num_parts, values[first:].data_ptr(),
                scale[first:].data_ptr(), None if mins is None else mins[first:].data_ptr(), each, num_in,
                None if wide is None else wide[first:].data_ptr(),
            )  # fmt: skip

    def put(self, weight: Tensor, bias: Tensor | None = None, *, index: int = 0) -> None:
        """Pack the weights bf16 `[out, in]` of layer `index`, and its bias `[out]` or None."""
        assert weight.dtype == torch.bfloat16 and weight.shape == (self.num_out, self.num_in), (
            weight.dtype,
            weight.shape,
        )
        assert 0 <= index < len(self.data), (index, len(self.data))
        assert bias is None or (self.bias is not None and bias.shape == (self.num_out,)), (
            "the packed layer was opened without a bias"
        )
        rows = weight.contiguous()
        wide = None if bias is None else bias.float().contiguous()
        each, block = self.num_out // self.num_parts, index * self.data.shape[1]
        for part in range(self.num_parts):
            library().pdk_weights_put(
                ctypes.byref(self.pointers), block, part, self.num_parts, rows[part * each :].data_ptr(), each,
                self.num_in, self.num_in, None if wide is None else wide[part * each :].data_ptr(),
            )  # fmt: skip


def open_packed(
    arena: Arena,
    format: Format,
    num_out: int,
    num_in: int,
    *,
    has_bias: bool = False,
    num_parts: int = 1,
    count: int = 1,
) -> Packed:
    """Allocate memory for `count` layers. The operating system commits bf16 memory on the first `put`.

    Raises:
        MemoryError: the allocation failed.
    """
    assert num_out % num_parts == 0, (num_out, num_parts)
    blocks = -(-(num_out // num_parts) // BLOCK) * num_parts
    width = -(-num_in // BLOCK) * BLOCK
    scale: Tensor | None = None
    if format == "bf16":
        data = arena.zeros(count, blocks, width // 2, BLOCK, 2, dtype=torch.bfloat16)
    elif isinstance(format, GroupFormat) and format.is_float and format.bits == 4:
        data = arena.zeros(count, blocks, width // BLOCK, _MXFP4_LINES, BLOCK, dtype=torch.uint8)
    elif isinstance(format, GroupFormat) and not is_int8(format, num_in):
        lanes = (2 * BLOCK, 2) if format.is_float else (BLOCK // 2 if format.bits == 4 else BLOCK, 4)
        data = arena.zeros(count, blocks, width // 4, *lanes, dtype=torch.uint8)
        groups = -(-width // format.group)
        scale = arena.zeros(count, blocks, groups, 2 if format.has_mins else 1, BLOCK, dtype=torch.float32)
    else:
        data = arena.zeros(count, blocks, width // 4, BLOCK, 4, dtype=torch.uint8).fill_(_ZERO)
        scale = arena.zeros(count, blocks * BLOCK, dtype=torch.float32)
    bias = arena.zeros(count, blocks * BLOCK, dtype=torch.float32) if has_bias else None
    return Packed(data, scale, bias, num_out, num_in, num_parts)


def pack(arena: Arena, format: Format, weight: Tensor, bias: Tensor | None = None, *, num_parts: int = 1) -> Packed:
    """Pack `weight` bf16 `[out, in]` and `bias` `[out]` in `num_parts` equal parts; see `Packed`."""
    packed = open_packed(arena, format, *weight.shape, has_bias=bias is not None, num_parts=num_parts)
    if isinstance(format, GroupFormat):
        packed.put_values(quantize(weight, format), bias)
    else:
        packed.put(weight, bias)
    return packed


def is_int8(format: GroupFormat, num_in: int) -> bool:
    """Return whether a format with groups is that of "int8": a scale for all of an output's `num_in` inputs."""
    return format.bits == 8 and not format.has_mins and not format.is_float and format.group >= num_in


def inputs_of(format: Format) -> Literal["bf16", "int8"]:
    """Return the number format of the inputs of products with such weights: bf16 for bf16 and floats, else 8 bits."""
    return "bf16" if format == "bf16" or (isinstance(format, GroupFormat) and format.is_float) else "int8"


def _kind(data: Tensor, scale: Tensor | None) -> int:
    """Return the format of packed weights as the C interface has it."""
    if scale is None:
        return _BF16 if data.dtype == torch.bfloat16 else _MXFP4
    if scale.ndim != 5:
        return _INT8
    if data.shape[-1] == 2:
        return _FP8
    return _GROUP4 if data.shape[-2] < BLOCK else _GROUP8


def _group_size(width: int, groups: int) -> int:
    """Return the inputs of a group: the smallest power of two such that `groups` groups cover `width` inputs."""
    size = BLOCK
    while -(-width // size) > groups:
        size *= 2
    return size


def pack_gated(arena: Arena, format: Format, gate_up: Tensor, bias: Tensor | None = None) -> Packed:
    """Pack gate and up of a feed-forward layer, which are consecutive in `gate_up` bf16 `[2 * inner, in]`."""
    return pack(arena, format, gate_up, bias, num_parts=2)
