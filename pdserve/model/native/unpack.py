"""Reads packed weights back, by output: for `ParamSlots`, when a parameter is asked for by its name.

bf16 weights are copied from their layout. Weights of the other formats are the products of the CPU kernels with unit
vectors, which need no second description of the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.model.native.weights import BLOCK, Packed
from pdserve.model.params import RowReader

_UNITS = 512
"""Unit vectors of one product."""


def packed_rows(packed: Packed, start: int, stop: int, *, index: int = 0) -> Tensor:
    """Return outputs `[start, stop)` of layer `index`: `[stop - start, num_in]`, bf16 or else float32."""
    blocks, lanes = _places(packed, start, stop)
    if not len(blocks):
        return torch.empty(0, packed.num_in, dtype=torch.float32)
    if is_bf16(packed):
        rows = packed.data[index, blocks, :, lanes]
        return rows.reshape(len(blocks), -1)[:, : packed.num_in]
    low, high = int(blocks.min()), int(blocks.max()) + 1
    data = packed.data[index : index + 1, low:high].contiguous()
    scale = packed.scale
    if scale is not None:
        of_blocks = slice(low, high) if scale.ndim == 5 else slice(low * BLOCK, high * BLOCK)
        scale = scale[index : index + 1, of_blocks].contiguous()
    columns = []
    for first in range(0, packed.num_in, _UNITS):
        count = min(_UNITS, packed.num_in - first)
        units = torch.zeros(count, packed.num_in)
        units[:, first : first + count].fill_diagonal_(1.0)
        products: Tensor = torch.ops.pdserve.linear(units, data, scale, None, (high - low) * BLOCK)
        columns.append(products[:, (blocks - low) * BLOCK + lanes].t())
    return torch.cat(columns, 1)


def packed_biases(packed: Packed, start: int, stop: int, *, index: int = 0) -> Tensor:
    """Return the biases of outputs `[start, stop)` of layer `index`, float32."""
    assert packed.bias is not None, "a layer without biases"
    blocks, lanes = _places(packed, start, stop)
    return packed.bias[index, blocks * BLOCK + lanes]


def reader_of(packed: Packed, order: Tensor | None = None) -> RowReader:
    """Return the reader of a single layer. Output i of `packed` is row `order[i]`; None: row i."""
    if order is None:
        return RowReader(lambda start, stop: packed_rows(packed, start, stop), is_bf16(packed))
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return RowReader(lambda start, stop: packed_rows(packed, 0, packed.num_out)[places[start:stop]], is_bf16(packed))


def reader_of_layers(
    num_layers: int, num_rows: int, read: Callable[[int, int, int], Tensor], *, is_exact: bool, first: int = 0
) -> RowReader:
    """Return the reader of layers of `num_rows` rows each, one behind the other.

    `read(layer, start, stop)` returns rows of one layer; the first one is `first`. `is_exact`: see `RowReader`.
    """

    def rows(start: int, stop: int) -> Tensor:
        found: list[Tensor] = []
        for layer in range(num_layers):
            begin = layer * num_rows
            low, high = max(start, begin), min(stop, begin + num_rows)
            if low < high:
                found.append(read(first + layer, low - begin, high - begin))
        return found[0] if len(found) == 1 else torch.cat(found)

    return RowReader(rows, is_exact)


def reader_of_columns(parts: Sequence[Packed]) -> RowReader:
    """Return the reader of a layer whose inputs are split: `parts` have the columns of each row, side by side."""

    def rows(start: int, stop: int) -> Tensor:
        return torch.cat([packed_rows(part, start, stop) for part in parts], 1)

    return RowReader(rows, all(map(is_bf16, parts)))


def is_bf16(packed: Packed) -> bool:
    """Whether the packed values are those of the parameter."""
    return packed.data.dtype == torch.bfloat16


def _places(packed: Packed, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return block and lane of outputs `[start, stop)`: int64 each. See `Packed`."""
    each, per_block = packed.num_out // packed.num_parts, BLOCK // packed.num_parts
    outputs = torch.arange(start, stop)
    part, within = outputs // each, outputs % each
    return within // per_block, part * per_block + within % per_block
