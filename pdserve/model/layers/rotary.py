"""Rotary position embedding over the halves of a head, as in Llama and Qwen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
    """Compute `(cos, sin)`, `[N, 1, head_dim]` each. The first half of sin is negated; `rotate` is then two products.

    `inverse` float32 `[head_dim / 2]` comes from `inverse_frequencies`; `factor` multiplies both.
    """
    angles = positions.to(torch.float32)[:, None, None] * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[N, num_heads, head_dim]` by the angles of `Rotary.tables`."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return radians per position of each pair of dimensions: float32 `[head_dim / 2]` on CPU."""
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
