"""Finds batch-invariant tile sizes: row counts of a product at which a row's bits do not depend on the other rows.

A matrix product sums each element in an order that depends on its shape and the number of threads, not on its data. So
if one batch of probe data gives the bits of the reference at every position of a tile, all data will. The reference is
a tile of REFERENCE_ROWS rows on one thread. Called by `BatchInvariantKernels` and `BatchInvariantAttention` when a
model is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pdserve.errors import ConfigError

_LOG = logging.getLogger(__name__)
REFERENCE_ROWS = 16
CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROBE_ROWS = 256
_TILES_TRIED = 4
_PAD_FREELY = 32
"""Up to this many rows a product costs what reading its weights costs: padding is cheaper than a second product."""

Product = Callable[[Tensor], Tensor]
"""Maps `[M, in]` to `[M, out]`, always with the same second operand; or the same with leading batch dimensions."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows `[start, start + rows)` computed as a product of `size` rows, padded with zeros."""

    start: int
    rows: int
    size: int


def cut(num_rows: int, sizes: tuple[int, ...]) -> list[Tile]:
    """Return tiles that cover `num_rows` rows. `sizes` are ascending."""
    tiles: list[Tile] = []
    start = 0
    while start < num_rows:
        left = num_rows - start
        size = _next_size(left, sizes)
        tiles.append(Tile(start, min(left, size), size))
        start += size
    return tiles


def _next_size(left: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest size that holds all rows left, unless it wastes too much; then the largest full size."""
    above = next((size for size in sizes if size >= left), None)
    below = max((size for size in sizes if size <= left), default=None)
    if above is None:
        assert below is not None, "sizes is empty"
        return below
    if below is None or above <= _PAD_FREELY or 4 * (above - left) <= above:
        return above
    return below


def padded(x: Tensor, tile: Tile) -> Tensor:
    """Return the rows of `tile` from `x` `[N, in]`, padded to `[size, in]`, contiguous."""
    rows = x[tile.start : tile.start + tile.rows]
    if tile.rows == tile.size:
        return rows
    whole = x.new_zeros(tile.size, x.shape[1])
    whole[: tile.rows] = rows
    return whole


def telling(
    num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Make probe operands `x` `[num_rows, in]` and `w` `[num_out, in]` whose exact products are 0.

    The results are rounding errors alone, so that a different summation order changes nearly every element, in 16-bit
    formats too. Rows of `w` repeat when `num_out` is large.
    """
    generator = torch.Generator().manual_seed(num_out * 7919 + num_in)
    half, distinct = num_in // 2, min(num_out, 512)
    order = torch.randperm(half, generator=generator)
    u = torch.randn(num_rows, half, generator=generator)
    v = torch.randn(distinct, half, generator=generator)
    rest = torch.zeros(1, num_in - 2 * half)
    x = torch.cat((u, u[:, order], rest.expand(num_rows, -1)), 1)
    w = torch.cat((v, -v[:, order], rest.expand(distinct, -1)), 1)
    repeated = w.to(device, dtype).repeat(-(-num_out // distinct), 1)[:num_out].contiguous()
    return x.to(device, dtype), repeated


def safe_sizes(product: Product, x: Tensor, what: str, *, reference: Product | None = None) -> tuple[int, ...]:
    """Return the candidates, ascending, that give every row of `x` `[..., PROBE_ROWS, in]` the reference's bits.

    `reference` is the form of the product to compare with; None for `product` itself. It runs on one thread, so that
    servers with different thread counts agree. When no size matches on one thread, the reference runs on all threads,
    and a warning is logged.

    Raises:
        ConfigError: no candidate qualifies; `what` names the product.
    """
    for alone in (True, False):
        with _threads(1) if alone else contextlib.nullcontext():
            wanted = _by_tiles(reference or product, x, REFERENCE_ROWS)
            fixed = torch.equal(wanted.roll(5, -2), _by_tiles(reference or product, x.roll(5, -2), REFERENCE_ROWS))
        sizes = tuple(size for size in CANDIDATES if fixed and _agrees(product, x, wanted, size))
        if sizes:
            if not alone:
                _LOG.warning(
                    "%s has different bits on %d threads than on one: answers are the same only between servers with "
                    "the same number of threads (cpu_threads)", what, torch.get_num_threads(),
                )  # fmt: skip
            return sizes
    raise ConfigError(
        f"enable_deterministic_inference: the bits of a row in {what} depend on its position in the batch on this "
        "device, at every tile size; try another dtype, or --cpu-threads 1",
        field="enable_deterministic_inference",
    )


def _by_tiles(product: Product, x: Tensor, size: int) -> Tensor:
    """Run `product` over all of `x`, `size` rows at a time."""
    return torch.cat([product(part.contiguous()) for part in torch.split(x, size, -2)], -2)


def _agrees(product: Product, x: Tensor, wanted: Tensor, size: int) -> bool:
    """Whether the first few tiles of `size` rows have the bits in `wanted`."""
    num_rows = min(PROBE_ROWS, _TILES_TRIED * size)
    return torch.equal(_by_tiles(product, x[..., :num_rows, :], size), wanted[..., :num_rows, :])


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Run torch with `num_threads` CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
