"""Linear layers packed for the kernels. Made by `NativeDecoder` while it takes a loaded model over.

Packed weights of one model lie in one `Arena` and live as long as it. See `csrc/kernels.h` for the layouts.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from pdserve.model.native.library import library

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
    """A packed linear layer of `num_out` outputs and `num_in` inputs. It keeps its memory alive."""

    arena: Arena
    handle: int
    num_out: int
    num_in: int


def pack(arena: Arena, format: Format, weight: Tensor, bias: Tensor | None = None) -> Packed:
    """`weight` bf16 `[out, in]` and `bias` `[out]`."""
    return _pack(arena, format, [weight], [bias])


def pack_gated(arena: Arena, format: Format, gate_up: Tensor, bias: Tensor | None = None) -> Packed:
    """Gate and up of a feed-forward layer, which lie one behind the other in `gate_up` bf16 `[2 * inner, in]`."""
    gate, up = gate_up.chunk(2)
    biases: list[Tensor | None] = [None, None] if bias is None else list(bias.chunk(2))
    return _pack(arena, format, [gate, up], biases)


def _pack(arena: Arena, format: Format, parts: list[Tensor], biases: list[Tensor | None]) -> Packed:
    """Blocks of the parts, which are of one shape, take turns."""
    num_out, num_in = parts[0].shape
    blocks = -(-num_out // BLOCK) * len(parts)
    native = library()
    handle = native.pdk_weights_open(arena.handle, _FORMATS[format], blocks, num_in, biases[0] is not None)
    if handle is None:
        raise MemoryError(f"no memory for packed weights of {len(parts) * num_out} x {num_in}")
    for index, (part, bias) in enumerate(zip(parts, biases, strict=True)):
        assert part.dtype == torch.bfloat16 and part.shape == (num_out, num_in), (part.dtype, part.shape)
        rows = part.contiguous()
        wide = None if bias is None else bias.float().contiguous()
        native.pdk_weights_put(
            handle, index, len(parts), rows.data_ptr(), num_out, num_in, num_in,
            None if wide is None else wide.data_ptr(),
        )  # fmt: skip
    return Packed(arena, handle, num_out * len(parts), num_in)
