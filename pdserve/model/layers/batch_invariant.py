"""Batch-invariant kernels in torch: a row's result has the same bits in any batch.

Made by the executor factory when `enable_deterministic_inference` is set and torch computes; called by the layers.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pdserve.model.layers.kernels import TorchKernels
from pdserve.model.layers.tiles import PROBE_ROWS, Tile, cut, padded, safe_sizes, telling

Shape = tuple[int, int, bool, torch.dtype]
"""`(out, in, with bias, dtype)` of a linear layer."""


class BatchInvariantKernels(TorchKernels):
    """Computes products in tiles of batch-invariant sizes, which `safe_sizes` finds at start-up on this machine."""

    def __init__(self) -> None:
        self._sizes: dict[Shape, tuple[int, ...]] = {}

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """See `Kernels.prepare_linear`. Probes the tile sizes of this shape once."""
        shape = (num_out, num_in, bias, dtype)
        if shape in self._sizes:
            return
        x, weight = telling(PROBE_ROWS, num_out, num_in, dtype, device)
        small = (x[0, :1].abs() * 1e-4).expand(num_out).contiguous() if bias else None
        product = functools.partial(_product, weight=weight, bias=small)
        self._sizes[shape] = safe_sizes(product, x, f"a linear layer from {num_in} to {num_out} in {dtype}")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        tiles = cut(x.shape[0], self._sizes[weight.shape[0], weight.shape[1], bias is not None, weight.dtype])
        x = x.contiguous()
        if len(tiles) == 1:
            return _one(x, tiles[0], weight, bias)[: x.shape[0]]
        out = x.new_empty(x.shape[0], weight.shape[0])
        for tile in tiles:
            out[tile.start : tile.start + tile.rows] = _one(x, tile, weight, bias)[: tile.rows]
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.swiglu`. Torch's silu rounds differently in a partly filled vector register; exp does not."""
        wide = gate.float()
        return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `TorchKernels.geglu`. By exp, for the reason given in `swiglu`."""
        wide = gate.float()
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (wide / (1.0 + torch.exp(-2.0 * inner))).to(gate.dtype) * up

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Kernels.softcap`. By exp, for the reason given in `swiglu`."""
        return tanh_capped(x.float(), cap).to(x.dtype)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Kernels.gate`. By exp, for the reason given in `swiglu`."""
        return x * (1.0 / (1.0 + torch.exp(-gate.float()))).to(x.dtype)


def tanh_capped(x: Tensor, cap: float) -> Tensor:
    """Compute `cap * tanh(x / cap)` of float32 values by exp."""
    return cap * (2.0 / (1.0 + torch.exp(x * (-2.0 / cap))) - 1.0)


def _one(x: Tensor, tile: Tile, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product of one tile, `[size, out]`."""
    return _product(padded(x, tile), weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias` with the same call as in the probe."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
