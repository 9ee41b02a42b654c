"""`Kernels`: the arithmetic of decoder layers, chosen once per model. Called by the modules of a `Decoder`.

`FastKernels` lets torch pick an algorithm by shape. `BatchInvariantKernels` (`batch_invariant.py`) gives a row the same
bits in any batch.
"""

from __future__ import annotations

import abc
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.layers.rotary import angle_tables


class Kernels(Protocol):
    """Operations whose bits may depend on the number of rows in the batch."""

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """Prepare `linear` for a shape. Called once per shape when the model is built. Raises ConfigError."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `x @ weight.T + bias`: `[N, in]`, `[out, in]` and `[out]` to `[N, out]`."""
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `swiglu` of the halves of `linear`: `[N, out / 2]`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `silu(gate) * up`, all of one shape and dtype."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute RMS norm of the last dimension in float32, scaled by `weight` in the dtype of `x`."""
        ...

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `norm` of `x + more`, `[N, width]` each, and overwrite `x` with the sum."""
        ...

    def angles(self, positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `angle_tables`."""
        ...

    def route(self, logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Return the `top_k` likeliest experts of `[N, E]`, best first, int64 `[N, top_k]`, and float32 probabilities.

        With `normalise` the probabilities of a token add up to 1.
        """
        ...

    def experts(self, x: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Run row r through expert `slots[r]`: int64 `[R]` to `[R, hidden]`. Row r is row `r // (R / N)` of `x`.

        `x` is `[N, hidden]`. `gate_up` `[E, 2 * inner, hidden]` and `down` `[E, hidden, inner]` are the weights.
        """
        ...

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts' outputs `[N, top_k, hidden]` with float32 weights `[N, top_k]` to `[N, hidden]`."""
        ...


class TorchKernels(abc.ABC):
    """Operations shared by all torch kernels. Their bits do not depend on the batch."""

    @abc.abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""

    @abc.abstractmethod
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.swiglu`."""

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.gated`."""
        gate, up = self.linear(x, weight, bias).chunk(2, -1)
        return self.swiglu(gate, up)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_norm`."""
        x += more
        return self.norm(x, weight, eps)

    def angles(self, positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Kernels.angles`."""
        return angle_tables(positions, inverse, factor, dtype)

    def route(self, logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `Kernels.route`."""
        best = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
        weights = best.values / best.values.sum(-1, keepdim=True) if normalise else best.values
        return best.indices, weights

    def experts(self, x: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """See `Kernels.experts`. Computes rows of one expert together; experts without rows cost nothing.

        Blocks until the device has counted each expert's rows.
        """
        if not len(slots):
            return x.new_empty(0, x.shape[1])
        order = slots.argsort(stable=True)
        sizes = torch.bincount(slots, minlength=len(gate_up)).tolist()
        rows = x.index_select(0, order // (len(slots) // len(x)))
        parts = []
        for slot, part in enumerate(torch.split(rows, sizes)):
            if len(part):
                parts.append(self.linear(self.gated(part, gate_up[slot], None), down[slot], None))
        return torch.empty_like(rows).index_copy_(0, order, torch.cat(parts))

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """See `Kernels.weighted_sum`. Adds in float32, in the order of the routes."""
        total = outputs[:, 0].float() * weights[:, :1]
        for index in range(1, weights.shape[1]):
            total += outputs[:, index].float() * weights[:, index : index + 1]
        return total.to(outputs.dtype)


class FastKernels(TorchKernels):
    """Torch's own choice for every shape: fastest; a row's bits may depend on the batch."""

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """See `Kernels.prepare_linear`. Does nothing."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.swiglu`."""
        return F.silu(gate).mul_(up)
