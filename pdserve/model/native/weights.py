"""Linear layers packed for the kernels. Made by `NativeDecoder`, and given their weights while a model is loaded.

Packed weights of one model lie in one `Arena` and live as long as it. See `csrc/kernels.h` for the layouts.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from pdserve.base.native import library

BLOCK = 32
"""Outputs that are computed together; fewer are filled up with zeros."""
Format = Literal["bf16", "int8"]
_FORMATS: dict[Format, int] = {"bf16": 0, "int8": 1}


class Arena:
    """Memory of packed weights; given back when this object goes."""

    def __init__(self) -> None:
        self._library = library()
        self.handle: int | None = self._library.pdk_arena_open()
        if self.handle is None:
            raise MemoryError("no memory for packed weights")

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far."""
        return int(self._library.pdk_arena_bytes(self.handle))

    def __del__(self) -> None:
        if self.handle is not None:
            self._library.pdk_arena_close(self.handle)
            self.handle = None


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed linear layer of `num_out` outputs and `num_in` inputs. It keeps its memory alive.

    Of `num_parts` equal parts, which lie one behind the other in weights and biases, blocks take turns.
    """

    arena: Arena
    handle: int
    num_out: int
    num_in: int
    num_parts: int
    num_bytes: int

    def put(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Its weights bf16 `[out, in]` and, where it was opened with one, its bias `[out]`."""
        assert weight.dtype == torch.bfloat16 and weight.shape == (self.num_out, self.num_in), (
            weight.dtype,
            weight.shape,
        )
        rows = weight.contiguous()
        wide = None if bias is None else bias.float().contiguous()
        each = self.num_out // self.num_parts
        for index in range(self.num_parts):
            library().pdk_weights_put(
                self.handle, index, self.num_parts, rows[index * each :].data_ptr(), each, self.num_in, self.num_in,
                None if wide is None else wide[index * each :].data_ptr(),
            )  # fmt: skip


def open_packed(
    arena: Arena, format: Format, num_out: int, num_in: int, *, has_bias: bool = False, num_parts: int = 1
) -> Packed:
    """Memory for a layer; the operating system gives that of bf16 when the weights are `put`.

    Raises:
        MemoryError: there is none.
    """
    assert num_out % num_parts == 0, (num_out, num_parts)
    blocks = -(-(num_out // num_parts) // BLOCK) * num_parts
    before = arena.num_bytes
    handle = library().pdk_weights_open(arena.handle, _FORMATS[format], blocks, num_in, has_bias)
    if handle is None:
        raise MemoryError(f"no memory for packed weights of {num_out} x {num_in}")
    return Packed(arena, handle, num_out, num_in, num_parts, arena.num_bytes - before)


def pack(arena: Arena, format: Format, weight: Tensor, bias: Tensor | None = None, *, num_parts: int = 1) -> Packed:
    """`weight` bf16 `[out, in]` and `bias` `[out]`, in equal parts whose blocks take turns."""
    packed = open_packed(arena, format, *weight.shape, has_bias=bias is not None, num_parts=num_parts)
    packed.put(weight, bias)
    return packed


def pack_gated(arena: Arena, format: Format, gate_up: Tensor, bias: Tensor | None = None) -> Packed:
    """Gate and up of a feed-forward layer, which lie one behind the other in `gate_up` bf16 `[2 * inner, in]`."""
    return pack(arena, format, gate_up, bias, num_parts=2)
