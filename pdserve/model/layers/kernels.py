"""The arithmetic of decoder layers as one object: chosen once per model, called by `Linear` and `DecoderLayer`.

`FastKernels` lets the library pick by shape. `FixedKernels` (`fixed.py`) gives a row the same bits in any batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernels(Protocol):
    """What depends on how many rows a batch has, unless care is taken."""

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """Said once for each shape that `linear` will be called with, when the model is built. Raises ConfigError."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: `[N, in]`, `[out, in]` and `[out]` to `[N, out]`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, all of one shape and dtype."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of the last dimension, in float32, scaled by `weight` in the dtype of `x`."""
        ...

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`norm` of `x + more`, which replaces `x`: `[N, width]` each."""
        ...


class TorchNorms:
    """Norms by torch, whose bits do not depend on the batch."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_norm`."""
        x += more
        return self.norm(x, weight, eps)


class FastKernels(TorchNorms):
    """The library's own choice for every shape: fastest, and a row's bits may differ from batch to batch."""

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """See `Kernels.prepare_linear`; nothing to do."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.swiglu`."""
        return F.silu(gate).mul_(up)
