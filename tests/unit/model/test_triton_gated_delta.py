"""Triton's kernels of GatedDeltaNet beside the definition in float64: slots of NaN, rows of all lengths, in any mix."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.attention.triton_state import split_rows
from pdserve.model.forward_batch import HostRows
from pdserve.model.gpu.causal_conv import conv_chunks, conv_decode
from pdserve.model.gpu.gated_delta import delta_decode, gated_rms_norm
from pdserve.model.gpu.gated_delta_prefill import delta_prefill
from pdserve.model.gpu.state_rows import StatePlanes
from pdserve.model.layer_spec import GatedDeltaSpec
from tests.unit.model import delta_kit
from tests.unit.model.delta_kit import Inputs, delta_spec
from tests.unit.model.triton_kit import DEVICE

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2}
SPECS = [
    delta_spec((2, 4), 16, 16),  # Qwen3-Next and Qwen3.5-35B-A3B, whose heads are 16 and 32 of 128
    delta_spec((2, 2), 32, 32),  # Qwen3.5-0.8B: 16 and 16
    delta_spec((2, 6), 16, 16),  # Qwen3.5-27B: 16 and 48
    delta_spec((1, 2), 24, 40),  # no powers of two
    delta_spec((1, 1), 16, 64, taps=2),
]
QUICK = settings(max_examples=6, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
SPANS = st.one_of(
    st.tuples(st.integers(0, 140), st.just(1)),
    st.tuples(st.sampled_from([0, 0, 1, 37, 63, 64, 65]), st.sampled_from([2, 3, 63, 64, 65, 130])),
)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal up to rounding, and never NaN."""
    torch.testing.assert_close(
        got.double().cpu(), expected.double().cpu(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype],
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def run(inputs: Inputs, host: HostRows, planes: StatePlanes) -> tuple[Tensor, Tensor]:
    """All rows of a step: the convolution's and the rule's outputs."""
    slots, starts, offsets = delta_kit.row_tensors(host)
    decode, chunks = split_rows(slots, starts, offsets, host)
    mixed = torch.full_like(inputs.x, float("nan")).contiguous()
    out = torch.full((len(mixed), planes.num_value_heads, planes.value_dim), float("nan"), device=DEVICE).to(mixed)
    rule = mixed, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, out, planes
    if decode is not None:
        conv_decode(inputs.x, mixed, inputs.weight, planes, decode)
        delta_decode(*rule, decode)
    if chunks is not None:
        conv_chunks(inputs.x, mixed, inputs.weight, planes, chunks)
        delta_prefill(*rule, chunks)
    return mixed, out


def check(spec: GatedDeltaSpec, spans: list[tuple[int, int]], slots: list[int], dtype: torch.dtype, seed: int) -> None:
    """Outputs and states of one step are those of the definition, and nothing else of the pool changes."""
    host = delta_kit.host_rows([(start, start + count) for start, count in spans], slots)
    pool = delta_kit.state_pool(spec, max(slots) + 3, dtype)
    delta_kit.fill_slots(pool, 1, host, seed)
    planes, before = delta_kit.planes_of(pool, 1), pool.pages_as_bytes.clone()
    inputs = delta_kit.inputs_of(spec, sum(count for _, count in spans), dtype, seed)
    expected_mixed, kept = delta_kit.convolved(spec, inputs, host, planes)
    first = StatePlanes(*(plane.clone() for plane in (planes.conv_q, planes.conv_k, planes.conv_v, planes.state)))
    mixed, out = run(inputs, host, planes)
    close(mixed, expected_mixed, dtype, "convolution")
    expected, states = delta_kit.ruled(spec, mixed, inputs, host, first)
    close(out, expected, dtype, "outputs")
    for row, slot in enumerate(slots):
        if slot >= 0:
            conv = [plane[slot].flatten(0, 1) for plane in (planes.conv_q, planes.conv_k, planes.conv_v)]
            close(torch.cat(conv), kept[row], dtype, "last inputs")
            close(planes.state[slot], states[row], dtype, "state")
    unused = [slot for slot in range(pool.num_pages) if slot not in slots]
    assert torch.equal(pool.pages_as_bytes[unused], before[unused]), "a slot of no row was written"
    assert torch.equal(other_layer(pool.group, pool.pages_as_bytes), other_layer(pool.group, before))


def other_layer(group: KVGroup, slots: Tensor) -> Tensor:
    """The bytes of the layer that was not computed."""
    return slots[:, : group.layer_bytes]


@QUICK
@given(
    spec=st.sampled_from(SPECS), spans=st.lists(SPANS, min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_steps_are_the_definition(
    spec: GatedDeltaSpec, spans: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    check(spec, spans, [2 * row + 1 for row in range(len(spans))][::-1], dtype, seed)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decode_steps_are_the_definition(spec: GatedDeltaSpec) -> None:
    check(spec, [(5, 1), (0, 1), (64, 1)], [4, 0, 2], torch.float32, 1)


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_chunks_are_the_definition(spec: GatedDeltaSpec) -> None:
    check(spec, [(0, 65), (62, 5)], [1, 0], torch.float32, 2)


def test_negative_slots_are_not_touched() -> None:
    """Padding rows of a captured step; their outputs are finite."""
    check(SPECS[0], [(3, 1), (9, 1), (0, 2)], [-1, 1, -1], torch.float32, 3)


def test_a_prompt_in_parts_ends_in_the_same_state() -> None:
    spec, dtype = SPECS[0], torch.float32
    inputs = delta_kit.inputs_of(spec, 150, dtype, 4)
    found = []
    for cuts in ([0, 150], [0, 64, 128, 150], [0, 1, 50, 51, 150]):
        pool = delta_kit.state_pool(spec, 1, dtype)
        planes, outs = delta_kit.planes_of(pool, 0), []
        for start, end in itertools.pairwise(cuts):
            part = Inputs(
                inputs.x[start:end], inputs.a[start:end], inputs.b[start:end], inputs.weight, inputs.a_log,
                inputs.dt_bias,
            )  # fmt: skip
            outs.append(run(part, delta_kit.host_rows([(start, end)], [0]), planes)[1])
        found.append((torch.cat(outs), planes.state[0].clone()))
    for out, state in found[1:]:
        close(out, found[0][0], dtype, "outputs")
        close(state, found[0][1], dtype, "state")


def test_equal_keys_lose_no_digits() -> None:
    """A token repeated without decay: the matrix of a chunk is one that powers of itself cannot invert in float32."""
    spec, dtype = SPECS[0], torch.float32
    host, pool = delta_kit.host_rows([(0, 64)], [0]), delta_kit.state_pool(spec, 1, dtype)
    inputs = delta_kit.inputs_of(spec, 64, dtype, 5)
    inputs.x.copy_(inputs.x[:1].expand(64, -1).clone())
    inputs.a.fill_(-15.0)
    inputs.b.fill_(15.0)
    planes = delta_kit.planes_of(pool, 0)
    mixed, out = run(inputs, host, planes)
    expected, states = delta_kit.ruled(spec, mixed, inputs, host, planes)
    close(out, expected, dtype, "outputs")
    close(planes.state[0], states[0], dtype, "state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "heads", "dim"), [(3, 5, 16), (1, 4, 24), (0, 2, 16)])
def test_gated_norms_are_torch_s(num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(num_tokens, heads, dim, generator=generator).to(DEVICE, dtype)
    gate = torch.randn(num_tokens, heads * dim + 8, generator=generator).to(DEVICE, dtype)[:, 8:]
    weight = torch.linspace(0.5, 1.5, dim).to(DEVICE, dtype)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    expected = (normed * torch.nn.functional.silu(gate.float()).view(x.shape)).to(dtype).flatten(1)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    got = gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
