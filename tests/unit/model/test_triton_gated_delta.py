"""Triton's kernels of GatedDeltaNet and KDA beside the definition in float64: slots of NaN, rows of any lengths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model import triton_delta
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.state_slots import CapturedRows, StateSlots, state_rows
from pdserve.model.forward_batch import HostRows, fill
from pdserve.model.gated_delta_net import DeltaInputs, TorchDelta
from pdserve.model.gpu.gated_delta import gated_rms_norm
from pdserve.model.layer_spec import GatedDeltaSpec
from pdserve.model.triton_delta import TritonDelta
from tests.share import rest_slow
from tests.unit.model import delta_kit
from tests.unit.model.delta_kit import delta_spec
from tests.unit.model.draft_kit import DeltaEngine, check_drafts
from tests.unit.model.triton_kit import DEVICE

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2}
SPECS = [
    delta_spec((2, 4), 16, 16),  # Qwen3-Next and Qwen3.5-35B-A3B, whose heads are 16 and 32 of 128
    delta_spec((2, 2), 32, 32),  # Qwen3.5-0.8B: 16 and 16
    delta_spec((2, 6), 16, 16),  # Qwen3.5-27B: 16 and 48
    delta_spec((1, 2), 24, 40),  # no powers of two
    delta_spec((1, 1), 16, 64, taps=2),
]
KIMI = [
    delta_spec((2, 2), 16, 16, channel_decay=True),  # Kimi Linear, whose heads are 32 and 32 of 128
    delta_spec((1, 2), 24, 40, channel_decay=True),
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


def run(inputs: DeltaInputs, host: HostRows, pool: GroupPool, layer: int) -> Tensor:
    """Outputs of one step of a layer."""
    states = StateSlots(pool, torch.device(DEVICE)).begin(state_rows(host, torch.device(DEVICE))).states(layer)
    return TritonDelta().mix(inputs, states)


def check(spec: GatedDeltaSpec, spans: list[tuple[int, int]], slots: list[int], dtype: torch.dtype, seed: int) -> None:
    """Outputs and states of one step are those of the definition, and nothing else of the pool changes."""
    host = delta_kit.host_rows([(start, start + count) for start, count in spans], slots)
    pool = delta_kit.state_pool(spec, max(slots) + 3, dtype)
    delta_kit.fill_slots(pool, 1, host, seed)
    planes, before = delta_kit.planes_of(pool, 1), pool.pages_as_bytes.clone()
    inputs = delta_kit.inputs_of(spec, sum(count for _, count in spans), dtype, seed)
    expected, kept, states = delta_kit.defined(inputs, host, planes)
    close(run(inputs, host, pool, 1), expected, dtype, "outputs")
    for row, slot in enumerate(slots):
        if slot >= 0:
            conv = torch.cat([plane[slot].flatten(0, 1) for plane in planes[:3]])
            assert torch.equal(conv.double().cpu(), kept[row]), "last inputs"
            close(planes[3][slot], states[row], dtype, "state")
    unused = [slot for slot in range(pool.num_pages) if slot not in slots]
    assert torch.equal(pool.pages_as_bytes[unused], before[unused]), "a slot of no row was written"
    assert torch.equal(other_layer(pool.group, pool.pages_as_bytes), other_layer(pool.group, before))


def other_layer(group: KVGroup, slots: Tensor) -> Tensor:
    """The bytes of the layer that was not computed."""
    return slots[:, : group.layer_bytes]


@QUICK
@given(
    spec=st.sampled_from(SPECS + KIMI), spans=st.lists(SPANS, min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_steps_are_the_definition(
    spec: GatedDeltaSpec, spans: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    check(spec, spans, [2 * row + 1 for row in range(len(spans))][::-1], dtype, seed)


@pytest.mark.parametrize("spec", SPECS + KIMI, ids=str)
def test_decode_steps_are_the_definition(spec: GatedDeltaSpec) -> None:
    check(spec, [(5, 1), (0, 1), (64, 1)], [4, 0, 2], torch.float32, 1)


@pytest.mark.parametrize("spec", [*rest_slow(SPECS[:4]), *rest_slow(KIMI)], ids=str)
def test_chunks_are_the_definition(spec: GatedDeltaSpec) -> None:
    check(spec, [(0, 65), (62, 5)], [1, 0], torch.float32, 2)


def test_negative_slots_are_not_touched() -> None:
    """Padding rows of a captured step; their outputs are finite."""
    check(SPECS[0], [(3, 1), (9, 1), (0, 2)], [-1, 1, -1], torch.float32, 3)


def test_a_prompt_in_parts_ends_in_the_same_state() -> None:
    spec, dtype = SPECS[4], torch.float32
    inputs = delta_kit.inputs_of(spec, 131, dtype, 4)
    found = []
    for cuts in ([0, 131], [0, 64, 128, 131], [0, 1, 50, 51, 131]):
        pool = delta_kit.state_pool(spec, 1, dtype)
        outs = [
            run(delta_kit.part_of(inputs, slice(start, end)), delta_kit.host_rows([(start, end)], [0]), pool, 0)
            for start, end in itertools.pairwise(cuts)
        ]
        found.append((torch.cat(outs), pool.plane(0, 3)[0]))
    for out, state in found[1:]:
        close(out, found[0][0], dtype, "outputs")
        close(state, found[0][1], dtype, "state")


def test_chunks_in_several_parts_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that end within rows, and between them."""
    monkeypatch.setattr(triton_delta, "MAX_CHUNKS", 2)
    check(SPECS[4], [(0, 200), (70, 60), (9, 1), (0, 64), (3, 90)], [4, 2, 1, 0, 3], torch.float32, 6)


def test_equal_keys_lose_no_digits() -> None:
    """A token repeated without decay: the matrix of a chunk is one that powers of itself cannot invert in float32."""
    spec, dtype = SPECS[0], torch.float32
    host, pool = delta_kit.host_rows([(0, 64)], [0]), delta_kit.state_pool(spec, 1, dtype)
    inputs = delta_kit.inputs_of(spec, 64, dtype, 5)
    inputs.qkv.copy_(inputs.qkv[:1].expand(64, -1).clone())
    inputs.a.fill_(-15.0)
    inputs.b.fill_(15.0)
    planes = delta_kit.planes_of(pool, 0)
    expected, _, states = delta_kit.defined(inputs, host, planes)
    close(run(inputs, host, pool, 0), expected, dtype, "outputs")
    close(planes[3][0], states[0], dtype, "state")


@pytest.mark.parametrize("spec", [SPECS[0], KIMI[0]], ids=str)
def test_captured_rows_are_read_at_each_replay(spec: GatedDeltaSpec) -> None:
    """One launch after another over the same tensors: other slots, a new row, and padding."""
    dtype = torch.float32
    device, pool = torch.device(DEVICE), delta_kit.state_pool(spec, 3, dtype)
    captured = CapturedRows(2, device)
    states = StateSlots(pool, device).begin(captured.rows).states(0)
    kernels = TritonDelta()
    for seed, (spans, slots) in enumerate([([(4, 5), (0, 1)], [2, 0]), ([(1, 2), (0, 1)], [0, -1])]):
        host = delta_kit.host_rows(spans, slots)
        delta_kit.fill_slots(pool, 0, host, seed)
        inputs = delta_kit.inputs_of(spec, 2, dtype, seed)
        expected, _, after = delta_kit.defined(inputs, host, delta_kit.planes_of(pool, 0))
        fill(captured.filling(host))
        close(kernels.mix(inputs, states), expected, dtype, "outputs")
        close(pool.plane(0, 3)[slots[0]], after[0], dtype, "state")
    assert pool.plane(0, 3)[1].isnan().all(), "a slot of no row was written"


@pytest.mark.parametrize(
    ("spec", "dtype", "seed"),
    rest_slow([(SPECS[3], torch.float16, 4), (KIMI[0], torch.float32, 4), (SPECS[0], torch.float32, 3)]),
)
def test_rows_with_drafts_leave_what_single_steps_leave(spec: GatedDeltaSpec, dtype: torch.dtype, seed: int) -> None:
    """See `draft_kit`. The same bits where numpy computes the kernels; a GPU's compiler may fuse operations."""
    single, drafted = (DeltaEngine(spec, dtype, TritonDelta(), DEVICE) for _ in range(2))

    def alike(got: Tensor, wanted: Tensor) -> bool:
        return torch.allclose(got.double(), wanted.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    check_drafts(
        single, drafted, seed, folds=seed % 2 == 0, num_steps=3, same=torch.equal if DEVICE == "cpu" else alike
    )


def test_strong_decays_overflow_nothing() -> None:
    """Channels that forget everything within a token beside channels that keep all, in keys of one chunk and a half."""
    spec, dtype = KIMI[0], torch.float32
    inputs = delta_kit.inputs_of(spec, 90, dtype, 4)
    inputs.a[:, ::2] = 60.0
    inputs.a[:, 1::2] = -60.0
    inputs.dt_bias.zero_()
    inputs.a_log.fill_(math.log(16.0))
    host, pool = delta_kit.host_rows([(0, 90)], [0]), delta_kit.state_pool(spec, 1, dtype)
    expected, _, states = delta_kit.defined(inputs, host, delta_kit.planes_of(pool, 0))
    close(run(inputs, host, pool, 0), expected, dtype, "outputs")
    close(pool.plane(0, 3)[0], states[0], dtype, "state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_with_a_sigmoid_gate_are_torch_s(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(3, 5, 24, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.linspace(0.5, 1.5, 24).to(DEVICE, dtype)
    expected = TorchDelta().norm(x, gate, weight, 1e-6, "sigmoid")
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    got = gated_rms_norm(x, gate, weight, 1e-6, is_silu=False)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "heads", "dim"), [(3, 5, 16), (1, 4, 24), (0, 2, 16)])
def test_gated_norms_are_torch_s(num_tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(num_tokens, heads, dim, generator=generator).to(DEVICE, dtype)
    gate = torch.randn(num_tokens, heads + 2, dim, generator=generator).to(DEVICE, dtype)[:, 2:]
    weight = torch.linspace(0.5, 1.5, dim).to(DEVICE, dtype)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    expected = (normed * torch.nn.functional.silu(gate.float())).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    got = gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
