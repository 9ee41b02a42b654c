"""`GatedDeltaNet`: the weights of a GatedDeltaNet layer and the projections around its recurrence.

Tensor ranks split the value heads, and have the key heads that these share. Checkpoints store several projections in
one tensor, in one of two orders; `ParamSlots.divide` gives each projection its rows.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from pdserve.base.parallel import RankCoord, kv_heads_of, part_of
from pdserve.model.attention.interface import LayerStates
from pdserve.model.layer_spec import GatedDeltaSpec, LayerNames
from pdserve.model.layers.dense import Outputs, column_linear, row_linear
from pdserve.model.layers.gated_delta import (
    CONV_PLANES,
    DeltaRows,
    causal_conv,
    gated_delta_rule,
    gated_norm,
    in_whole_vectors,
    log_decay_of,
)
from pdserve.model.layers.kernels import Kernels
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamPiece, ParamSlots


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Outputs of a layer's projections for N tokens, and the weights of its recurrence.

    `qkv` `[N, channels]`: q, k and v of this rank's heads. `b` and `a` `[N, num_value_heads]` give rate and decay.
    `conv_weight` is `[channels, conv_kernel]`, `a_log` and `dt_bias` are float32 `[num_value_heads]`.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


class DeltaKernels(Protocol):
    """The arithmetic of the layer between its projections."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """Apply convolution and delta rule, and advance the states: `[N, num_value_heads, value_dim]`.

        The planes of `states` are `conv_q`, `conv_k`, `conv_v` and `state`; see `state_planes`.
        """
        ...

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `weight * rms_norm(heads) * silu(z)` in the dtype of `z`; all have the shape that `mix` returns."""
        ...


class TorchDelta:
    """Implements `DeltaKernels` with torch, in float32."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """See `DeltaKernels.mix`."""
        planes = states.planes
        rows = states.rows.once("delta", lambda: DeltaRows(states.rows.slots, states.rows.starts, states.rows.host))
        convs, pending = [planes[name] for name in CONV_PLANES], states.pending
        mixed = causal_conv(inputs.qkv, inputs.conv_weight, convs, rows, pending)
        key_width = inputs.num_key_heads * inputs.key_dim
        q, k, v = torch.split(mixed, [key_width, key_width, mixed.shape[1] - 2 * key_width], -1)
        q, k = (part.view(len(part), inputs.num_key_heads, inputs.key_dim) for part in (q, k))
        v = v.view(len(v), inputs.num_value_heads, inputs.value_dim)
        log_decay = log_decay_of(inputs.a, inputs.a_log, inputs.dt_bias)
        rate = in_whole_vectors(torch.sigmoid, inputs.b.float())
        return gated_delta_rule(q, k, v, log_decay, rate, planes["state"], rows, pending)

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DeltaKernels.norm`."""
        return gated_norm(heads, z, weight, eps).to(z.dtype)


class GatedDeltaNet:
    """A GatedDeltaNet layer: this rank's value heads and the key heads that they share, with the projections.

    `local` is the layer's index on this rank. A rank has one key head where there are fewer than ranks.
    """

    def __init__(
        self,
        spec: GatedDeltaSpec,
        local: int,
        hidden_size: int,
        eps: float,
        names: LayerNames,
        params: ParamSlots,
        kernels: Kernels,
        parallel: Parallel,
    ) -> None:
        self._parallel, self.local, self.eps = parallel, local, eps
        self.kernels: DeltaKernels = TorchDelta()
        keys, values = delta_head_shares(spec, parallel.coord)
        self.num_key_heads, self.num_value_heads = len(keys), len(values)
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        _divide(spec, hidden_size, names, params)
        q, k, v, z, b, a = _projections(spec, names)
        key = _held(keys, spec.key_dim)
        value = _held(values, spec.value_dim)
        outputs = (
            *(Outputs(name, spec.key_width, key) for name in (q, k)),
            *(Outputs(name, spec.value_width, value) for name in (v, z)),
            *(Outputs(name, spec.num_value_heads, values) for name in (b, a)),
        )
        self.project = column_linear(kernels, params, outputs, hidden_size, bias=False)
        """The projections q, k, v, z, b and a of this rank's heads, stacked in this order."""
        convs = (
            (f"{names.delta_conv}.{part}.weight", total, held)
            for part, total, held in (
                ("q", spec.key_width, key),
                ("k", spec.key_width, key),
                ("v", spec.value_width, value),
            )
        )
        taps = params.stacked(*(Param(name, (total, 1, spec.conv_kernel), 0, held) for name, total, held in convs))
        self.conv_weight = taps.view(-1, spec.conv_kernel)
        """`[channels, conv_kernel]`; the channels are those of q, k and v."""
        heads = (spec.num_value_heads,)
        self.a_log = params.stacked(Param(names.delta_a_log, heads, 0, values), dtype=torch.float32)
        self.dt_bias = params.stacked(Param(names.delta_dt_bias, heads, 0, values), dtype=torch.float32)
        self.norm_weight = params.new(f"{names.delta_norm}.weight", spec.value_dim)
        self.out = row_linear(kernels, params, names.delta_out, hidden_size, outputs[2], bias=False, adds_bias=False)

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`, equal on all tensor ranks, and advance the states of the rows."""
        value_width = self.num_value_heads * self.value_dim
        widths = [len(self.conv_weight), value_width, self.num_value_heads, self.num_value_heads]
        qkv, z, b, a = torch.split(self.project(x), widths, -1)
        inputs = DeltaInputs(
            qkv, b, a, self.conv_weight, self.a_log, self.dt_bias,
            self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim,
        )  # fmt: skip
        heads = self.kernels.mix(inputs, states)
        normed = self.kernels.norm(heads, z.view(heads.shape), self.norm_weight, self.eps)
        return self._parallel.all_reduce(self.out(normed.flatten(1)))


def delta_head_shares(spec: GatedDeltaSpec, coord: RankCoord) -> tuple[range, range]:
    """Return key heads and value heads of a tensor rank; its value heads share its key heads."""
    tp_size, rank = coord.shape.tp_size, coord.tp_rank
    return kv_heads_of(spec.num_key_heads, tp_size, rank), part_of(spec.num_value_heads, tp_size, rank)


def _held(heads: range, width: int) -> range:
    """Return the outputs of `heads`, of `width` each."""
    return range(heads.start * width, heads.stop * width)


def _projections(spec: GatedDeltaSpec, names: LayerNames) -> tuple[str, str, str, str, str, str]:
    """Return the names of the projections q, k, v, z, b and a; parts of a larger tensor have names of their own."""
    if spec.interleaved:
        qkvz, ba = names.delta_qkvz, names.delta_ba
        return f"{qkvz}.q", f"{qkvz}.k", f"{qkvz}.v", f"{qkvz}.z", f"{ba}.b", f"{ba}.a"
    qkv = names.delta_qkv
    return f"{qkv}.q", f"{qkv}.k", f"{qkv}.v", names.delta_z, names.delta_b, names.delta_a


def _divide(spec: GatedDeltaSpec, hidden_size: int, names: LayerNames, params: ParamSlots) -> None:
    """Say which checkpoint tensors hold several projections, and the convolution of all of q, k and v."""
    key, value, shared = spec.key_width, spec.value_width, spec.num_value_heads // spec.num_key_heads
    q, k, v, z, b, a = (f"{name}.weight" for name in _projections(spec, names))
    if spec.interleaved:  # grouped by key head: its q and k, then v and z of its value heads
        dim, wide = spec.key_dim, shared * spec.value_dim
        stride = 2 * (dim + wide)
        blocks = ((q, key, 0, dim), (k, key, dim, dim), (v, value, 2 * dim, wide), (z, value, 2 * dim + wide, wide))
        pieces = [ParamPiece(name, (total, hidden_size), first, block, stride) for name, total, first, block in blocks]
        params.divide(f"{names.delta_qkvz}.weight", (2 * (key + value), hidden_size), pieces)
        num_heads = spec.num_value_heads
        pieces = [
            ParamPiece(name, (num_heads, hidden_size), first, shared, 2 * shared)
            for name, first in ((b, 0), (a, shared))
        ]
        params.divide(f"{names.delta_ba}.weight", (2 * num_heads, hidden_size), pieces)
    else:
        stacked = ((q, key, 0), (k, key, key), (v, value, 2 * key))
        pieces = [ParamPiece(name, (total, hidden_size), first) for name, total, first in stacked]
        params.divide(f"{names.delta_qkv}.weight", (2 * key + value, hidden_size), pieces)
    conv, width = names.delta_conv, spec.conv_kernel
    parts = (("q", key, 0), ("k", key, key), ("v", value, 2 * key))
    pieces = [ParamPiece(f"{conv}.{part}.weight", (total, 1, width), first) for part, total, first in parts]
    params.divide(f"{conv}.weight", (2 * key + value, 1, width), pieces)
