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
from pdserve.model.gated_delta_net import DeltaInputs
from pdserve.model.layer_spec import GatedDeltaSpec
from tests.unit.model.triton_kit import DEVICE


def delta_spec(
    heads: tuple[int, int], key_dim: int, value_dim: int, taps: int = 4, *, channel_decay: bool = False
) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        num_key_heads=heads[0], num_value_heads=heads[1], key_dim=key_dim, value_dim=value_dim, conv_kernel=taps,
        channel_decay=channel_decay,
    )  # fmt: skip


def num_decays(spec: GatedDeltaSpec) -> int:
    """Decays of a token."""
    return spec.num_value_heads * (spec.key_dim if spec.channel_decay else 1)


def state_pool(spec: GatedDeltaSpec, num_slots: int, dtype: torch.dtype) -> GroupPool:
    """A pool of two layers whose bytes are all NaN."""
    planes = state_planes(spec, str(dtype).removeprefix("torch."))
    group = KVGroup(
        name="state", kind=GroupKind.STATE, layers=(0, 1), num_model_layers=2, page_tokens=0, planes=planes
    )  # fmt: skip
    pool = GroupPool(group, num_slots, torch.device(DEVICE))
    pool.pages_as_bytes.fill_(255)
    return pool


def planes_of(pool: GroupPool, layer: int) -> list[Tensor]:
    """Planes q, k and v of the convolution, and the state."""
    return [pool.plane(layer, plane) for plane in range(4)]


def inputs_of(spec: GatedDeltaSpec, num_tokens: int, dtype: torch.dtype, seed: int) -> DeltaInputs:
    """Random inputs whose rows lie apart; decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(seed)
    channels, heads, decays = 2 * spec.key_width + spec.value_width, spec.num_value_heads, num_decays(spec)
    wide = torch.randn(num_tokens, channels + heads + decays + 3, generator=generator).to(DEVICE, dtype)
    qkv, b, a, _ = wide.split((channels, heads, decays, 3), 1)
    weight = torch.randn(channels, spec.conv_kernel, generator=generator).to(DEVICE, dtype)
    return DeltaInputs(
        qkv, b, a, weight,
        a_log=torch.linspace(-3.0, 2.0, heads, device=DEVICE), dt_bias=torch.linspace(-2.0, 1.0, decays, device=DEVICE),
        num_key_heads=spec.num_key_heads, num_value_heads=heads, key_dim=spec.key_dim, value_dim=spec.value_dim,
    )  # fmt: skip


def part_of(inputs: DeltaInputs, tokens: slice) -> DeltaInputs:
    """Some of the tokens."""
    return dataclasses.replace(inputs, qkv=inputs.qkv[tokens], a=inputs.a[tokens], b=inputs.b[tokens])


def host_rows(spans: list[tuple[int, int]], slots: list[int]) -> HostRows:
    """Rows of these positions, one after the other in the batch."""
    starts, ends = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    lengths = ends - starts
    return HostRows(
        starts=starts, ends=ends, offsets=np.cumsum(lengths) - lengths, prompts=ends,
        pages=np.zeros((len(spans), 1), dtype=np.int32), slots=np.array(slots, dtype=np.int32),
    )  # fmt: skip


def fill_slots(pool: GroupPool, layer: int, host: HostRows, seed: int) -> None:
    """Write a random state for each row that goes on; the slots of new rows stay as they are."""
    assert host.slots is not None
    generator = torch.Generator().manual_seed(seed)
    for start, slot in zip(host.starts.tolist(), host.slots.tolist(), strict=True):
        if start > 0 and slot >= 0:
            for plane in range(4):
                target = pool.plane(layer, plane)[slot]
                target.copy_(torch.randn(target.shape, generator=generator).to(target.dtype))


def defined(
    inputs: DeltaInputs, host: HostRows, planes: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """The layer by its definition: outputs `[N, Hv, dv]`, and by row its last inputs `[channels, taps - 1]` and state.

    `planes` are as before the step.
    """
    assert host.slots is not None
    taps, outs, kept, states = inputs.conv_weight.double().cpu(), [], [], []
    for row, slot in enumerate(host.slots.tolist()):
        start, offset = int(host.starts[row]), int(host.offsets[row])
        tokens = slice(offset, offset + int(host.ends[row]) - start)
        old = torch.zeros(len(taps), taps.shape[1] - 1, dtype=torch.float64)
        state = torch.zeros(planes[3].shape[1:], dtype=torch.float64)
        if start > 0 and slot >= 0:
            old = torch.cat([plane[slot].double().cpu().flatten(0, 1) for plane in planes[:3]])
            state = planes[3][slot].double().cpu()
        both = torch.cat((old, inputs.qkv[tokens].double().cpu().T), 1)
        mixed = torch.nn.functional.silu((both.unfold(1, taps.shape[1], 1) * taps[:, None]).sum(-1)).T
        out, state = _ruled(part_of(inputs, tokens), mixed, state)
        outs.append(out)
        kept.append(both[:, both.shape[1] - taps.shape[1] + 1 :])
        states.append(state)
    return torch.cat(outs), kept, states


def _ruled(inputs: DeltaInputs, mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule of one row, token by token."""
    key_width, shared = inputs.num_key_heads * inputs.key_dim, inputs.num_value_heads // inputs.num_key_heads
    q, k, v = mixed.split((key_width, key_width, mixed.shape[1] - 2 * key_width), 1)
    q, k = (x.unflatten(1, (inputs.num_key_heads, -1)).repeat_interleave(shared, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(1, (inputs.num_value_heads, -1))
    steps = torch.nn.functional.softplus(inputs.a.double().cpu() + inputs.dt_bias.double().cpu())
    steps = steps.view(len(mixed), inputs.num_value_heads, -1)
    decay = (-inputs.a_log.double().cpu().exp()[:, None] * steps).exp()
    rate = inputs.b.double().cpu().sigmoid()
    outs = []
    for token in range(len(mixed)):
        state = state * decay[token, :, :, None]
        update = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * rate[token, :, None]
        state = state + k[token][:, :, None] * update[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", state, q[token]) * inputs.key_dim**-0.5)
    return torch.stack(outs), state
