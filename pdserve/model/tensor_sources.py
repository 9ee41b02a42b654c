"""Tensors of a checkpoint as sources of parameters: whole ones, and pieces of larger ones. `params` reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, concatenated


class TensorSource(Protocol):
    """An unread tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        ...

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        """Read `part`, one slice per dimension; the whole tensor for None."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorInMemory:
    """Implements `TensorSource` over a tensor in host memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorSource`."""
        return tuple(self.tensor.shape)

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        """See `TensorSource`."""
        return self.tensor if part is None else self.tensor[part]


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A tensor of a checkpoint that can be read without being dequantized."""

    @property
    def format(self) -> GroupFormat:
        """The format that holds what `read_quantized` returns."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether `read_quantized` returns the values of `read`; otherwise it rounds them."""
        ...

    def read_quantized(self, part: tuple[slice, ...] | None) -> QuantizedWeight:
        """Read `part`, as `read` does. Of `[experts, in, out]` it is the part of one expert, with outputs first."""
        ...


@dataclasses.dataclass(frozen=True)
class ParamPiece:
    """A parameter `name` of `shape` that is a part of a larger checkpoint tensor; see `params.ParamSlots.divide`.

    Its rows are blocks of `block` rows of the tensor, which begin at rows `first`, `first + stride`, and so on; None:
    all rows from `first` on. With `index` the tensor has one more dimension in front, and the piece is there. With
    `transposed` the rows of the piece, a matrix, are columns of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    block: int | None = None
    stride: int = 0
    index: int | None = None
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class PieceSource:
    """Implements `TensorSource` for a piece of `whole`; reads only the requested rows."""

    whole: TensorSource
    piece: ParamPiece

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        piece = self.piece
        if piece.block == 1:  # one read, and not one for each row
            asked, *rest = part or [slice(0, size) for size in piece.shape]
            first, last = (piece.first + row * piece.stride for row in (asked.start, asked.stop - 1))
            return self._rows(slice(first, last + 1), rest)[:: piece.stride]
        found = [self._rows(rows, rest) for rows, *rest in self.parts(part)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def parts(self, part: tuple[slice, ...] | None) -> list[tuple[slice, ...]]:
        """Return the parts of the whole that are `part` of the piece, without regard to `index` and `transposed`."""
        piece = self.piece
        asked, *rest = part or [slice(0, size) for size in piece.shape]
        block = piece.block or piece.shape[0]
        found, row = [], asked.start
        while row < asked.stop:
            number, within = divmod(row, block)
            count = min(block - within, asked.stop - row)
            start = piece.first + number * piece.stride + within
            found.append((slice(start, start + count), *rest))
            row += count
        return found

    def _rows(self, rows: slice, rest: Sequence[slice]) -> Tensor:
        """Read rows of the tensor, or its columns where they are rows of the piece."""
        lead = () if self.piece.index is None else (slice(self.piece.index, self.piece.index + 1),)
        part = self.whole.read((*lead, *rest, rows) if self.piece.transposed else (*lead, rows, *rest))
        found = part if self.piece.index is None else part[0]
        return found.t() if self.piece.transposed else found


@dataclasses.dataclass(frozen=True)
class QuantizedPieceSource(PieceSource):
    """Implements `QuantizedSource` for rows of a matrix, or of an expert's matrix."""

    whole: QuantizedSource

    @property
    def format(self) -> GroupFormat:
        return self.whole.format

    @property
    def is_exact(self) -> bool:
        return self.whole.is_exact

    def read_quantized(self, part: tuple[slice, ...] | None) -> QuantizedWeight:
        piece = self.piece
        if piece.block == 1:
            asked, *rest = part or [slice(0, size) for size in piece.shape]
            first, last = (piece.first + row * piece.stride for row in (asked.start, asked.stop - 1))
            found = self._quantized_rows(slice(first, last + 1), rest)
            return found.rows(torch.arange(0, last + 1 - first, piece.stride))
        return concatenated([self._quantized_rows(rows, rest) for rows, *rest in self.parts(part)])

    def _quantized_rows(self, rows: slice, rest: Sequence[slice]) -> QuantizedWeight:
        """Read rows of the piece, which are columns of the tensor if the piece is transposed."""
        lead = () if self.piece.index is None else (slice(self.piece.index, self.piece.index + 1),)
        return self.whole.read_quantized((*lead, *rest, rows) if self.piece.transposed else (*lead, rows, *rest))
