"""Shapes and state planes of GatedDeltaNet layers for the CPU kernels. Used by `Program.delta`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pdserve.base.native import PdkStates
from pdserve.model.layers.gated_delta import MAX_PENDING, PendingTokens

DELTA_UNIT = 16
"""Key and value dims are multiples of this."""


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """A layer's heads on this rank: key heads of `key_dim`, value heads of `value_dim`, a convolution of `taps` tokens.

    Key head i serves the value heads `i * r` to `i * r + r - 1`, r being `num_value_heads / num_key_heads`. With
    `channel_decay` each row of a state has a decay; see `GatedDeltaSpec`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    channel_decay: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: items of a token's Q, K and V together."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Items of a token's V, and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """Decays of a token."""
        return self.num_value_heads * (self.key_dim if self.channel_decay else 1)

    @property
    def width(self) -> int:
        """Items of a token's input: Q, K, V, z, b and a. With `channel_decay` they are Q, K, V and b."""
        return self.conv_width + self.num_value_heads + (0 if self.channel_decay else self.gate_width)

    @property
    def gate_width(self) -> int:
        """Items of a token's a and z, which with `channel_decay` are an input of their own."""
        return self.num_decays + self.value_width


@dataclasses.dataclass(frozen=True)
class DeltaStates:
    """Planes of one layer in a pool of slots, `[slots, head, row, width]` each; see `memory.layout`.

    `conv` are bfloat16 planes of Q, K and V, `[slots, heads, head_dim, taps - 1]`. `state` is float32
    `[slots, num_value_heads, key_dim, value_dim]`. `pending`: of the same slots; None: no row has drafts.
    """

    conv: tuple[Tensor, Tensor, Tensor]
    state: Tensor
    pending: PendingTokens | None = None

    @property
    def max_pending(self) -> int:
        """Most tokens of a row with drafts; 0: no row has drafts."""
        return 0 if self.pending is None else self.pending.most

    def pointers(self, shape: DeltaShape) -> PdkStates:
        """Return the planes for the C interface, valid as long as the pool lives."""
        assert shape.key_dim % DELTA_UNIT == 0 and shape.value_dim % DELTA_UNIT == 0, shape
        assert shape.num_value_heads % shape.num_key_heads == 0 and shape.taps >= 1, shape
        of_keys = (shape.num_key_heads, shape.key_dim, shape.taps - 1)
        of_values = (shape.num_value_heads, shape.value_dim, shape.taps - 1)
        of_states = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        planes = (*self.conv, self.state)
        for plane, expected in zip(planes, (of_keys, of_keys, of_values, of_states), strict=True):
            assert plane.shape[1:] == expected and plane[0].is_contiguous(), (plane.shape, expected)
        assert self.state.dtype == torch.float32 and all(plane.dtype == torch.bfloat16 for plane in self.conv)
        (stride,) = {plane.stride(0) * plane.element_size() for plane in planes}
        return PdkStates(
            *(plane.data_ptr() for plane in planes), stride, shape.num_key_heads, shape.num_value_heads,
            shape.key_dim, shape.value_dim, shape.taps, *self._pending_pointers(shape), self.max_pending,
        )  # fmt: skip

    def _pending_pointers(self, shape: DeltaShape) -> tuple[int | None, ...]:
        """Return the addresses of inputs, keys, deltas and decays of the pending tokens."""
        if self.pending is None:
            return None, None, None, None
        pending, first = self.pending, (len(self.state), self.pending.most)
        of_inputs, of_keys = (shape.conv_width,), (shape.num_key_heads, shape.key_dim)
        of_deltas = (shape.num_value_heads, shape.value_dim)
        of_decays = (shape.num_value_heads, *((shape.key_dim,) if shape.channel_decay else ()))
        tensors = (pending.inputs, pending.keys, pending.deltas, pending.decays)
        for tensor, expected in zip(tensors, (of_inputs, of_keys, of_deltas, of_decays), strict=True):
            assert tensor.shape == first + expected and tensor.is_contiguous(), (tensor.shape, first, expected)
        assert pending.inputs.dtype == torch.bfloat16 and pending.most <= MAX_PENDING
        assert all(tensor.dtype == torch.float32 for tensor in tensors[1:])
        return tuple(tensor.data_ptr() for tensor in tensors)
