"""`Kernels`: the arithmetic of decoder layers, chosen once per model. Called by the modules of a `Decoder`.

`FastKernels` lets torch pick an algorithm by shape. `BatchInvariantKernels` (`batch_invariant.py`) gives a row the same
bits in any batch. `Rotary` makes the angles of rotary position embedding over the halves of a head, as in Llama and
Qwen.
"""

from __future__ import annotations

import abc
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.expert_math import ExpertWeights, choose_experts, clamped_gate
from pdserve.model.layer_spec import Activation, MoeSpec
from pdserve.model.rope import RopeSpec


class Rotary:
    """Rotary angles of one model. Called once per step; the tables serve all layers."""

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.inverse = inverse_frequencies(rope, head_dim).to(device)
        self.factor = rope.attention_factor
        self.dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `angle_tables` of this model, in torch."""
        return angle_tables(positions, self.inverse, self.factor, self.dtype)


def angle_tables(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `(cos, sin)`, `[N, 1, rotary_dim]` each. The first half of sin is negated; `rotate` is then two products.

    `inverse` float32 `[rotary_dim / 2]` comes from `inverse_frequencies`; `factor` multiplies both.
    """
    angles = positions.to(torch.float32)[:, None, None] * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of `[N, num_heads, head_dim]` by the angles of `Rotary.tables`."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :rotary_dim], cos, sin), heads[..., rotary_dim:]), -1)
    return torch.addcmul(heads * cos, heads.roll(rotary_dim // 2, -1), sin)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return radians per position of each pair of rotated dimensions: float32 `[rotary_dim / 2]` on CPU."""
    head_dim = rope.rotary_dim(head_dim)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inverse = 1.0 / wavelengths
    if rope.freq_divisors is not None:
        return inverse / torch.tensor(rope.freq_divisors, dtype=torch.float32)
    if rope.type == "linear":
        return inverse / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, inverse)
    if rope.type == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Llama 3.1 scaling: frequencies of long wavelengths are divided by `factor`, short ones kept, others blended."""
    turns = rope.original_max_positions * inverse / (2.0 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1.0 - keep) * inverse / rope.factor + keep * inverse


def _yarn(rope: RopeSpec, inverse: Tensor, head_dim: int) -> Tensor:
    """YaRN: a linear ramp over dimensions from keeping the frequency to dividing it by `factor`."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_positions / (rotations * 2.0 * math.pi)
        return head_dim * math.log(ratio) / (2.0 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return (inverse / rope.factor) * ramp + inverse * (1.0 - ramp)


class Kernels(Protocol):
    """Operations whose bits may depend on the number of rows in the batch."""

    def prepare_linear(self, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """Prepare `linear` for a shape. Called once per shape when the model is built. Raises ConfigError."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `x @ weight.T + bias`: `[N, in]`, `[out, in]` and `[out]` to `[N, out]`."""
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation = "silu") -> Tensor:
        """Compute `act(gate) * up` of the halves of `linear`: `[N, out / 2]`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `silu(gate) * up`, all of one shape and dtype."""
        ...

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `gelu(gate) * up` with GELU's approximation by tanh, all of one shape and dtype."""
        ...

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute `x * sigmoid(gate)`: `[N, width]` or `[N, heads, width]`, contiguous; `gate` broadcasts to it."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Compute `cap * tanh(x / cap)`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Compute RMS norm of the last dimension in float32, scaled by `weight` in the dtype of `x`.

        With `offset` other than 0 it is scaled by `offset + weight`, in float32.
        """
        ...

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Compute `norm` of `x + more`, `[N, width]` each, and overwrite `x` with the sum."""
        ...

    def angles(self, positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `angle_tables`."""
        ...

    def route(self, logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token from the outputs `[N, E]` of a router.

        `correction` float32 `[E]` is the bias of `MoeSpec.correction_bias`. Returns the experts, best first, int64
        `[N, top_k]`, and their weights, float32 `[N, top_k]`.
        """
        ...

    def experts(self, x: Tensor, slots: Tensor, weights: ExpertWeights) -> Tensor:
        """Run row r through expert `slots[r]`: int64 `[R]` to `[R, hidden]`. Row r is row `r // (R / N)` of `x`.

        `x` is `[N, hidden]`.
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

    @abc.abstractmethod
    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.geglu`."""

    @abc.abstractmethod
    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Kernels.gate`."""

    @abc.abstractmethod
    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Kernels.softcap`."""

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation = "silu") -> Tensor:
        """See `Kernels.gated`."""
        gate, up = self.linear(x, weight, bias).chunk(2, -1)
        return self.swiglu(gate, up) if act == "silu" else self.geglu(gate, up)

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """See `Kernels.norm`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if offset:
            return (wide * scale * (offset + weight.float())).to(x.dtype)
        return (wide * scale).to(x.dtype) * weight

    def add_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """See `Kernels.add_norm`."""
        x += more
        return self.norm(x, weight, eps, offset)

    def angles(self, positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Kernels.angles`."""
        return angle_tables(positions, inverse, factor, dtype)

    def route(self, logits: Tensor, moe: MoeSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels.route`."""
        return choose_experts(logits, moe, correction)

    def experts(self, x: Tensor, slots: Tensor, weights: ExpertWeights) -> Tensor:
        """See `Kernels.experts`. Computes rows of one expert together; experts without rows cost nothing.

        Blocks until the device has counted each expert's rows.
        """
        if not len(slots):
            return x.new_empty(0, x.shape[1])
        order = slots.argsort(stable=True)
        sizes = torch.bincount(slots, minlength=len(weights.gate_up)).tolist()
        rows = x.index_select(0, order // (len(slots) // len(x)))
        parts = []
        for slot, part in enumerate(torch.split(rows, sizes)):
            if len(part):
                parts.append(self._expert(part, slot, weights))
        return torch.empty_like(rows).index_copy_(0, order, torch.cat(parts))

    def _expert(self, x: Tensor, slot: int, weights: ExpertWeights) -> Tensor:
        """Run rows `[N, hidden]` through one expert."""
        wide, deep = (None if bias is None else bias[slot] for bias in (weights.gate_up_bias, weights.down_bias))
        if weights.act == "silu":
            inner = self.gated(x, weights.gate_up[slot], wide)
        else:
            gate, up = self.linear(x, weights.gate_up[slot], wide).chunk(2, -1)
            inner = clamped_gate(gate, up, weights.act_limit)
        return self.linear(inner, weights.down[slot], deep)

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

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Kernels.geglu`."""
        return F.gelu(gate, approximate="tanh").mul_(up)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `Kernels.gate`."""
        return x * gate.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `Kernels.softcap`."""
        return (x / cap).tanh_().mul_(cap)
