"""`GatedDeltaNet`: the weights of a GatedDeltaNet layer and the projections around its recurrence.

Tensor ranks split the value heads, and have the key heads that these share. Checkpoints store several projections in
one tensor, in one of two orders; `ParamSlots.divide` gives each projection its rows. Those of Kimi Delta Attention have
a tensor for each projection.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from pdserve.base.parallel import RankCoord, kv_heads_of, part_of
from pdserve.model.attention.interface import LayerStates
from pdserve.model.layer_spec import GatedDeltaSpec, LayerNames
from pdserve.model.layers.dense import Linear, Outputs, column_linear, row_linear
from pdserve.model.layers.gated_delta import (
    CONV_PLANES,
    DeltaRows,
    OutputGate,
    causal_conv,
    gated_delta_rule,
    gated_norm,
    in_whole_vectors,
    log_decay_of,
)
from pdserve.model.layers.kernels import Kernels
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamSlots
from pdserve.model.tensor_sources import ParamPiece


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Outputs of a layer's projections for N tokens, and the weights of its recurrence.

    `qkv` `[N, channels]`: q, k and v of this rank's heads. `b` and `a` `[N, num_value_heads]` give rate and decay.
    `conv_weight` is `[channels, conv_kernel]`, `a_log` and `dt_bias` are float32 `[num_value_heads]`. Where each row of
    a state has a decay, `a` is `[N, num_value_heads * key_dim]` and `dt_bias` `[num_value_heads * key_dim]`.
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

    @property
    def has_channel_decay(self) -> bool:
        """Whether each row of a state has a decay of its own; see `GatedDeltaSpec`."""
        return self.dt_bias.shape != self.a_log.shape


class DeltaKernels(Protocol):
    """The arithmetic of the layer between its projections."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """Apply convolution and delta rule, and advance the states: `[N, num_value_heads, value_dim]`.

        The planes of `states` are `conv_q`, `conv_k`, `conv_v` and `state`; see `state_planes`.
        """
        ...

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float, gate: OutputGate = "silu") -> Tensor:
        """Return `weight * rms_norm(heads) * gate(z)` in the dtype of `z`; all have the shape that `mix` returns."""
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
        a, a_log, dt_bias = inputs.a, inputs.a_log, inputs.dt_bias
        if inputs.has_channel_decay:
            a, dt_bias = (x.reshape(*x.shape[:-1], inputs.num_value_heads, inputs.key_dim) for x in (a, dt_bias))
            a_log = a_log[:, None]
        log_decay = log_decay_of(a, a_log, dt_bias)
        rate = in_whole_vectors(torch.sigmoid, inputs.b.float())
        return gated_delta_rule(q, k, v, log_decay, rate, planes["state"], rows, pending)

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float, gate: OutputGate = "silu") -> Tensor:
        """See `DeltaKernels.norm`."""
        return gated_norm(heads, z, weight, eps, gate).to(z.dtype)


@dataclasses.dataclass(frozen=True)
class LowRankGates:
    """The second halves of the projections a and z, from `key_dim` inputs each; see `GatedDeltaSpec.channel_decay`."""

    a: Linear
    z: Linear


class GatedDeltaNet:
    """A GatedDeltaNet layer: this rank's value heads and the key heads that they share, with the projections.

    `local` is the layer's index on this rank. A rank has one key head where there are fewer than ranks. `low_rank` is
    not None with a decay for each row of a state. The first halves of those projections are whole on each rank.
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
        key, value = _held(keys, spec.key_dim), _held(values, spec.value_dim)
        self.low_rank: LowRankGates | None = None
        if spec.channel_decay:
            outputs = _kimi_outputs(spec, names, keys, values)
            convs = names.delta_conv_q, names.delta_conv_k, names.delta_conv_v
            gates = (
                Outputs(names.delta_f_b, spec.num_value_heads * spec.key_dim, _held(values, spec.key_dim)),
                Outputs(names.delta_g_b, spec.value_width, value),
            )
            a, z = (column_linear(kernels, params, (gate,), spec.key_dim, bias=False) for gate in gates)
            self.low_rank = LowRankGates(a, z)
        else:
            _divide(spec, hidden_size, names, params)
            outputs = _outputs(spec, names, keys, values)
            convs = f"{names.delta_conv}.q", f"{names.delta_conv}.k", f"{names.delta_conv}.v"
        self.project = column_linear(kernels, params, outputs, hidden_size, bias=False)
        """The projections q, k, v, z, b and a of this rank's heads, stacked; with `low_rank` q, k, v, b, and the first
        halves of a and z.
        """
        widths = ((spec.key_width, key), (spec.key_width, key), (spec.value_width, value))
        taps = params.stacked(
            *(
                Param(f"{name}.weight", (total, 1, spec.conv_kernel), 0, held)
                for name, (total, held) in zip(convs, widths, strict=True)
            )
        )
        self.conv_weight = taps.view(-1, spec.conv_kernel)
        """`[channels, conv_kernel]`; the channels are those of q, k and v."""
        heads = (spec.num_value_heads,)
        decays, biases = Param(names.delta_a_log, heads, 0, values), Param(names.delta_dt_bias, heads, 0, values)
        if spec.channel_decay:
            decays = Param(names.delta_a_log, (1, 1, *heads, 1), 2, values)
            width = spec.num_value_heads * spec.key_dim
            biases = Param(names.delta_dt_bias, (width,), 0, _held(values, spec.key_dim))
        self.a_log = params.stacked(decays, dtype=torch.float32).view(-1)
        self.dt_bias = params.stacked(biases, dtype=torch.float32)
        self.norm_weight = params.new(f"{names.delta_norm}.weight", spec.value_dim)
        heads_out = Outputs(names.delta_out, spec.value_width, value)
        self.out = row_linear(kernels, params, names.delta_out, hidden_size, heads_out, bias=False, adds_bias=False)

    def __call__(self, x: Tensor, states: LayerStates) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`, equal on all tensor ranks, and advance the states of the rows."""
        channels, num_heads = len(self.conv_weight), self.num_value_heads
        gate: OutputGate = "silu"
        if self.low_rank is None:
            widths = [channels, num_heads * self.value_dim, num_heads, num_heads]
            qkv, z, b, a = torch.split(self.project(x), widths, -1)
        else:
            widths, gate = [channels, num_heads, self.key_dim, self.key_dim], "sigmoid"
            qkv, b, a, z = torch.split(self.project(x), widths, -1)
            a, z = self.low_rank.a(a.contiguous()), self.low_rank.z(z.contiguous())
        inputs = DeltaInputs(
            qkv, b, a, self.conv_weight, self.a_log, self.dt_bias,
            self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim,
        )  # fmt: skip
        heads = self.kernels.mix(inputs, states)
        normed = self.kernels.norm(heads, z.view(heads.shape), self.norm_weight, self.eps, gate)
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


def _outputs(spec: GatedDeltaSpec, names: LayerNames, keys: range, values: range) -> tuple[Outputs, ...]:
    """Return the outputs q, k, v, z, b and a of this rank's heads."""
    q, k, v, z, b, a = _projections(spec, names)
    key, value = _held(keys, spec.key_dim), _held(values, spec.value_dim)
    return (
        *(Outputs(name, spec.key_width, key) for name in (q, k)),
        *(Outputs(name, spec.value_width, value) for name in (v, z)),
        *(Outputs(name, spec.num_value_heads, values) for name in (b, a)),
    )


def _kimi_outputs(spec: GatedDeltaSpec, names: LayerNames, keys: range, values: range) -> tuple[Outputs, ...]:
    """Return the outputs q, k, v and b of this rank's heads, and the first halves of a and z."""
    key, value = _held(keys, spec.key_dim), _held(values, spec.value_dim)
    return (
        *(Outputs(name, spec.key_width, key) for name in (names.q, names.k)),
        Outputs(names.v, spec.value_width, value),
        Outputs(names.delta_b, spec.num_value_heads, values),
        *(Outputs(name, spec.key_dim, range(spec.key_dim)) for name in (names.delta_f_a, names.delta_g_a)),
    )


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
