"""The kernels of GatedDeltaNet and Kimi Delta Attention beside torch's at the shapes of real models.

Called by `kernel_checks.py`, `kernel_timings.py` and `compile_kernels.py`. Slots of rows that begin are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, KVGroup
from pdserve.model.attention.interface import LayerStates
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.state_slots import StateSlots, state_rows
from pdserve.model.config import state_planes
from pdserve.model.forward_batch import HostRows
from pdserve.model.gated_delta_net import DeltaInputs, TorchDelta
from pdserve.model.layer_spec import GatedDeltaSpec
from pdserve.model.layers.gated_delta import OutputGate
from pdserve.model.params import torch_dtype

Span = tuple[int, int]
"""Positions `[start, end)` that a row computes."""
TOLERANCE = {"bfloat16": 3e-2, "float32": 2e-4}
"""Of the largest value."""


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """Heads of a GatedDeltaNet layer. `channel_decay`: see `GatedDeltaSpec`."""

    name: str
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    channel_decay: bool = False

    @property
    def spec(self) -> GatedDeltaSpec:
        """The layer."""
        return GatedDeltaSpec(
            num_key_heads=self.num_key_heads, num_value_heads=self.num_value_heads,
            key_dim=self.key_dim, value_dim=self.value_dim, conv_kernel=4, channel_decay=self.channel_decay,
        )  # fmt: skip


QWEN3_NEXT = DeltaShape("Qwen3-Next", 16, 32, 128, 128)
KIMI_LINEAR = DeltaShape("Kimi Linear", 32, 32, 128, 128, channel_decay=True)
SHAPES = (QWEN3_NEXT, DeltaShape("Qwen3.5, a small one", 16, 16, 128, 128), KIMI_LINEAR)
TINY_SHAPE = DeltaShape("tiny", 2, 4, 16, 16, "float32")
TINY_KIMI = DeltaShape("tiny, by channel", 2, 2, 16, 16, "float32", channel_decay=True)
STEPS: dict[str, tuple[Span, ...]] = {
    "decode": ((0, 1), (700, 701), (4095, 4096), (15, 16)),
    "prefill": ((0, 1000), (64, 65), (0, 130), (100, 163)),
    "mixed": ((512, 1537), (99, 100), (0, 64), (3000, 3001)),
}
TINY_STEPS: dict[str, tuple[Span, ...]] = {"decode": ((0, 1), (9, 10)), "mixed": ((5, 12), (3, 4), (0, 70))}
VERIFY: tuple[Span, ...] = ((700, 704), (99, 100), (15, 21), (3000, 3002))
"""Rows whose last tokens, behind the first, are drafts; some fold pending tokens before."""


def delta_checks(device: torch.device, *, tiny: bool) -> list[tuple[str, Callable[[], object]]]:
    """All checks, by name."""

    def check(shape: DeltaShape, spans: tuple[Span, ...], *, drafts: bool) -> Callable[[], object]:
        return lambda: check_delta(shape, spans, device, drafts=drafts)

    shapes, steps = ((TINY_SHAPE, TINY_KIMI), TINY_STEPS) if tiny else (SHAPES, STEPS)
    return [
        (f"delta rule, {shape.name}, {step}", check(shape, spans, drafts=step == "verify"))
        for shape in shapes
        for step, spans in {**steps, "verify": VERIFY}.items()
    ]


def check_delta(shape: DeltaShape, spans: tuple[Span, ...], device: torch.device, *, drafts: bool = False) -> None:
    """Outputs, states, last inputs, pending tokens and the norm of a step are those of torch."""
    from pdserve.model.triton_delta import TritonDelta

    inputs, states = delta_step(shape, spans, device, drafts=drafts)
    mine, theirs = states(), states()
    got, expected = TritonDelta().mix(inputs, mine), TorchDelta().mix(inputs, theirs)
    _close(got, expected, shape.dtype, "outputs")
    for name, plane in mine.planes.items():
        used = mine.rows.slots
        _close(plane[used], theirs.planes[name][used], shape.dtype, name)
    if mine.pending is not None and theirs.pending is not None:
        for name, left in vars(mine.pending).items():
            _close(left, getattr(theirs.pending, name), shape.dtype, name)
    gate: OutputGate = "sigmoid" if shape.channel_decay else "silu"
    z = torch.randn(expected.shape, generator=torch.Generator(device).manual_seed(7), device=device).to(got.dtype)
    weight = torch.linspace(0.5, 1.5, shape.value_dim, device=device).to(got.dtype)
    normed, other = (kernels.norm(got, z, weight, 1e-6, gate) for kernels in (TritonDelta(), TorchDelta()))
    _close(normed, other, shape.dtype, "norm")


def delta_step(
    shape: DeltaShape, spans: tuple[Span, ...], device: torch.device, *, drafts: bool = False
) -> tuple[DeltaInputs, Callable[[], LayerStates]]:
    """Projections of these rows, and states before the step, all alike.

    With `drafts` all tokens of a row but the first are drafts, and every second row folds two pending tokens.
    """
    spec, dtype = shape.spec, torch_dtype(shape.dtype)
    group = KVGroup(
        name="state", kind=GroupKind.STATE, layers=(0, 1), num_model_layers=2, page_tokens=0,
        planes=state_planes(spec, shape.dtype),
    )  # fmt: skip
    starts, ends = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    lengths, slots = ends - starts, np.arange(len(spans), 0, -1, dtype=np.int32)
    host = HostRows(
        starts=starts, ends=ends, offsets=np.cumsum(lengths) - lengths, prompts=starts if drafts else ends,
        pages=np.zeros((len(spans), 1), dtype=np.int32), slots=slots,
        num_drafts=lengths - 1 if drafts else None, num_folded=np.arange(len(spans)) % 2 * 2 if drafts else None,
    )  # fmt: skip
    max_drafts = int(lengths.max()) - 1 if drafts else 0
    rows = state_rows(host, device)
    generator = torch.Generator(device).manual_seed(5)

    def states() -> LayerStates:
        pool = GroupPool(group, len(spans) + 1, device)
        pool.pages_as_bytes.fill_(255)
        seeded = torch.Generator(device).manual_seed(3)
        for plane in range(len(group.planes)):
            of_plane = pool.plane(1, plane)
            for start, slot in zip(starts.tolist(), slots.tolist(), strict=True):
                if start > 0:
                    one = torch.randn(of_plane.shape[1:], generator=seeded, device=device)
                    of_plane[slot] = one.to(of_plane.dtype)
        slots_of = StateSlots(pool, device, max_drafts, channel_decay=spec.channel_decay)
        found = slots_of.begin(rows).states(1)
        for tensor in () if found.pending is None else vars(found.pending).values():
            tensor.copy_(torch.rand(tensor.shape, generator=seeded, device=device) / 2)
        return found

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    channels, heads, num_tokens = 2 * spec.key_width + spec.value_width, spec.num_value_heads, int(lengths.sum())
    decays = heads * (spec.key_dim if spec.channel_decay else 1)
    wide = normal(num_tokens, channels + spec.value_width + heads + decays).to(dtype)
    qkv, b, a = wide[:, :channels], wide[:, -heads - decays : -decays], wide[:, -decays:]
    inputs = DeltaInputs(
        qkv, b, a, conv_weight=(normal(channels, spec.conv_kernel) / 2).to(dtype),
        a_log=torch.linspace(-3.0, 2.0, heads, device=device), dt_bias=normal(decays),
        num_key_heads=spec.num_key_heads, num_value_heads=heads, key_dim=spec.key_dim, value_dim=spec.value_dim,
    )  # fmt: skip
    return inputs, states


def _close(got: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    """Equal up to some roundings, and never NaN."""
    assert got.isfinite().all(), f"{what}: not finite"
    worst, most = float((got.float() - expected.float()).abs().max()), float(expected.abs().max())
    assert worst <= TOLERANCE[dtype] * most, f"{what}: differs by {worst:.3g}, the largest value is {most:.3g}"
