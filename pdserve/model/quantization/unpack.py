"""Values that a checkpoint packs into 32-bit words, and the parts of tensors that belong to a part of a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.model.params import TensorSource

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight values of AWQ's gemm packing."""
Part = tuple[slice, ...]


def whole(shape: Sequence[int], part: Part | None) -> Part:
    """Return `part`, or for None all of a tensor of `shape`."""
    return part if part is not None else tuple(slice(0, size) for size in shape)


def covering(part: slice, unit: int) -> slice:
    """Return the units of `unit` items that `part` touches."""
    return slice(part.start // unit, -(-part.stop // unit))


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack int32 `words` along `dim`: word i has the values i * n to i * n + n - 1, n = 32 / `bits`.

    `order` is the place of each value in its word; None: the lowest bits are the first value. Returns int32.
    """
    count = WORD_BITS // bits
    places = torch.tensor(order if order is not None else range(count), dtype=torch.int32) * bits
    shape = list(words.shape)
    split = words.movedim(dim, -1).to(torch.int32).unsqueeze(-1) >> places
    shape[dim] *= count
    return (split & ((1 << bits) - 1)).flatten(-2).movedim(-1, dim).reshape(shape)


def read_unpacked(source: TensorSource, part: Part, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Read `part`, in values, of a matrix whose dimension `dim` is packed into words. Returns int32."""
    count = WORD_BITS // bits
    words = covering(part[dim], count)
    found = unpack(source.read((*part[:dim], words, *part[dim + 1 :])), bits, dim, order)
    first = words.start * count
    return found.narrow(dim, part[dim].start - first, part[dim].stop - part[dim].start)
