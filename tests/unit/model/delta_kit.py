"""Rows with state slots, and GatedDeltaNet by its definition in float64, token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, KVGroup
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.config import state_planes
from pdserve.model.forward_batch import HostRows
from pdserve.model.gpu.state_rows import StatePlanes
from pdserve.model.layer_spec import GatedDeltaSpec
from tests.unit.model.triton_kit import DEVICE


def delta_spec(heads: tuple[int, int], key_dim: int, value_dim: int, taps: int = 4) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        num_key_heads=heads[0], num_value_heads=heads[1], key_dim=key_dim, value_dim=value_dim, conv_kernel=taps
    )  # fmt: skip


def state_pool(spec: GatedDeltaSpec, num_slots: int, dtype: torch.dtype) -> GroupPool:
    """A pool of two layers whose bytes are all NaN."""
    planes = state_planes(spec, str(dtype).removeprefix("torch."))
    group = KVGroup(
        name="state", kind=GroupKind.STATE, layers=(0, 1), num_model_layers=2, page_tokens=0, planes=planes
    )  # fmt: skip
    pool = GroupPool(group, num_slots, torch.device(DEVICE))
    pool.pages_as_bytes.fill_(255)
    return pool


def planes_of(pool: GroupPool, layer: int) -> StatePlanes:
    return StatePlanes(*(pool.plane(layer, plane) for plane in range(4)))


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a layer's projections give: `x` `[N, channels]` before the convolution, `a`, `b` `[N, Hv]`; weights."""

    x: Tensor
    a: Tensor
    b: Tensor
    weight: Tensor
    a_log: Tensor
    dt_bias: Tensor


def inputs_of(spec: GatedDeltaSpec, num_tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Random inputs whose rows lie apart; decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * spec.key_width + spec.value_width
    wide = torch.randn(num_tokens, width + 2 * spec.num_value_heads + 3, generator=generator).to(DEVICE, dtype)
    a, b = wide[:, width : width + spec.num_value_heads], wide[:, width + spec.num_value_heads :]
    weight = torch.randn(width, spec.conv_kernel, generator=generator).to(DEVICE, dtype)
    a_log = torch.linspace(-3.0, 2.0, spec.num_value_heads, device=DEVICE)
    dt_bias = torch.linspace(-2.0, 1.0, spec.num_value_heads).to(DEVICE, dtype)
    return Inputs(wide[:, :width], a, b[:, : spec.num_value_heads], weight, a_log, dt_bias)


def host_rows(spans: list[tuple[int, int]], slots: list[int]) -> HostRows:
    """Rows of these positions, one after the other in the batch."""
    starts, ends = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    lengths = ends - starts
    return HostRows(
        starts=starts, ends=ends, offsets=np.cumsum(lengths) - lengths, prompts=ends,
        pages=np.zeros((len(spans), 1), dtype=np.int32), slots=np.array(slots, dtype=np.int32),
    )  # fmt: skip


def row_tensors(host: HostRows) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, starts and offsets of `StateChunks`."""
    assert host.slots is not None
    offsets = np.append(host.offsets, host.offsets[-1] + host.ends[-1] - host.starts[-1])
    slots, starts, flat = (torch.from_numpy(x.astype(np.int64)).to(DEVICE) for x in (host.slots, host.starts, offsets))
    return slots, starts, flat


def fill_slots(pool: GroupPool, layer: int, host: HostRows, seed: int) -> None:
    """Write a random state for each row that goes on; the slots of new rows stay as they are."""
    assert host.slots is not None
    generator = torch.Generator().manual_seed(seed)
    for start, slot in zip(host.starts.tolist(), host.slots.tolist(), strict=True):
        if start > 0 and slot >= 0:
            for plane in range(4):
                target = pool.plane(layer, plane)[slot]
                target.copy_(torch.randn(target.shape, generator=generator).to(target.dtype))


def convolved(spec: GatedDeltaSpec, inputs: Inputs, host: HostRows, planes: StatePlanes) -> tuple[Tensor, list[Tensor]]:
    """The convolution by its definition: `[N, channels]`, and the last inputs of each row, `[channels, taps - 1]`."""
    assert host.slots is not None
    out, kept = [], []
    for row, slot in enumerate(host.slots.tolist()):
        start, end, offset = int(host.starts[row]), int(host.ends[row]), int(host.offsets[row])
        new = inputs.x[offset : offset + end - start].double().cpu().T
        old = torch.zeros(new.shape[0], spec.conv_kernel - 1, dtype=torch.float64)
        if start > 0 and slot >= 0:
            old = torch.cat(
                [plane[slot].double().cpu().flatten(0, 1) for plane in (planes.conv_q, planes.conv_k, planes.conv_v)]
            )
        both = torch.cat((old, new), 1)
        windows = both.unfold(1, spec.conv_kernel, 1)
        out.append(torch.nn.functional.silu((windows * inputs.weight.double().cpu()[:, None]).sum(-1)).T)
        kept.append(both[:, both.shape[1] - spec.conv_kernel + 1 :])
    return torch.cat(out), kept


def ruled(
    spec: GatedDeltaSpec, mixed: Tensor, inputs: Inputs, host: HostRows, planes: StatePlanes
) -> tuple[Tensor, list[Tensor]]:
    """The delta rule by its definition, over `mixed` `[N, channels]`: `[N, Hv, dv]`, and the state of each row."""
    assert host.slots is not None
    widths = (spec.key_width, spec.key_width, spec.value_width)
    mixed = mixed.double().cpu()
    q, k, v = (x.view(len(x), heads, -1) for x, heads in zip(
        mixed.split(widths, 1), (spec.num_key_heads, spec.num_key_heads, spec.num_value_heads), strict=True
    ))  # fmt: skip
    shared = spec.num_value_heads // spec.num_key_heads
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 1) for x in (q, k)
    )  # fmt: skip
    softplus = torch.nn.functional.softplus(inputs.a.double().cpu() + inputs.dt_bias.double().cpu())
    decay = (-inputs.a_log.double().cpu().exp() * softplus).exp()
    beta = inputs.b.double().cpu().sigmoid()
    out = torch.empty(len(mixed), spec.num_value_heads, spec.value_dim, dtype=torch.float64)
    states = []
    for row, slot in enumerate(host.slots.tolist()):
        start, offset = int(host.starts[row]), int(host.offsets[row])
        state = torch.zeros(spec.num_value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64)
        if start > 0 and slot >= 0:
            state = planes.state[slot].double().cpu()
        for token in range(offset, offset + int(host.ends[row]) - start):
            state = state * decay[token, :, None, None]
            update = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * beta[token, :, None]
            state = state + k[token][:, :, None] * update[:, None, :]
            out[token] = torch.einsum("hkv,hk->hv", state, q[token]) * spec.key_dim**-0.5
        states.append(state)
    return out, states
