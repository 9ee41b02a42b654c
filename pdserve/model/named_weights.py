"""Weights by their names in the checkpoint, as all ranks together have them; for `/get_weights_by_name`.

`ParamSlots.read` returns the rows of one rank, and `joined` puts those of all ranks together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.model.tensor_sources import ParamPiece

MAX_VALUES = 8 << 20
"""Most values of an answer: 32 MiB in float32."""


@dataclasses.dataclass(frozen=True)
class MemoryRange:
    """Bytes of a process: `num_bytes` from `address` on."""

    address: int
    num_bytes: int


class NamedRows(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor of the checkpoint, which has `shape`.

    `values`: float32, row after row. `rows`: index of each row in the tensor's first dimension, or with `index` in the
    second one, below entry `index` of the first. `transposed`: the rows are columns there. `first_column`: index of the
    rows' first value.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    values: bytes
    first_column: int = 0
    index: int | None = None
    transposed: bool = False


def named_rows(
    shape: Sequence[int], first_row: int, first_column: int, values: Tensor, piece: ParamPiece | None = None
) -> NamedRows:
    """Return the part of a tensor of `shape` that begins at `first_row`; `piece`: where these rows are within it."""
    flat = values.detach().float().cpu().contiguous().numpy()
    rows = range(first_row, first_row + len(flat))
    if piece is None:
        return NamedRows(shape=tuple(shape), rows=tuple(rows), values=flat.tobytes(), first_column=first_column)
    block = piece.block or piece.shape[0]
    places = tuple(piece.first + row // block * piece.stride + row % block for row in rows)
    return NamedRows(
        shape=tuple(shape), rows=places, values=flat.tobytes(), first_column=first_column, index=piece.index,
        transposed=piece.transposed,
    )  # fmt: skip


def check_size(name: str, shape: Sequence[int], max_rows: int) -> None:
    """Raise ModelError if the first `max_rows` rows of a tensor of `shape` have more than `MAX_VALUES` values."""
    row = math.prod(shape[1:])
    if min(shape[0], max_rows) * row > MAX_VALUES:
        most = MAX_VALUES // row
        hint = f"use a truncate_size of at most {most}" if most else "a single row has more"
        raise ModelError(f"{name} is {list(shape)}, and an answer has at most {MAX_VALUES} values; {hint}")


def joined(name: str, parts: Sequence[NamedRows], max_rows: int) -> npt.NDArray[np.float32]:
    """Return the first `max_rows` rows of the tensor `name`, float32.

    Raises:
        ModelError: the parts do not cover these rows.
    """
    if not parts:
        raise ModelError(f"no rank has the tensor {name}")
    shape = parts[0].shape
    found = np.zeros((min(shape[0], max_rows), *shape[1:]), dtype=np.float32)
    covered = np.zeros(found.shape, dtype=np.float32)
    for part in parts:
        if part.rows and (part.index is None or part.index < len(found)):
            lines = np.frombuffer(part.values, np.float32).reshape(len(part.rows), -1)
            _put(found, part, lines)
            _put(covered, part, np.ones_like(lines))
    if not covered.all():
        raise ModelError(f"this replica has only a part of {name}; other replicas have the rest of it")
    return found


def _put(whole: npt.NDArray[np.float32], part: NamedRows, lines: npt.NDArray[np.float32]) -> None:
    """Write `lines`, the rows of `part`, as far as they are among the first rows of a tensor that `whole` has."""
    matrix = whole if part.index is None else whole[part.index]
    matrix = matrix.T if part.transposed else matrix.reshape(len(matrix), -1)
    rows = np.array(part.rows, dtype=np.int64)
    within = rows < len(matrix)
    matrix[rows[within], part.first_column : part.first_column + lines.shape[1]] = lines[within]
