"""GatedDeltaNet layers by the CPU kernels against a recurrence in float64, at every level that this CPU can run.

Slots that belong to no row hold NaN, and so do those of rows that begin at position 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.attention.state_slots import fold_rows
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.gated_delta import PendingTokens
from pdserve.model.native.delta import DeltaShape, DeltaStates
from pdserve.model.native.program import Program
from pdserve.model.native.resources import Buffer, Threads
from tests.unit.model.draft_kit import (
    LONGEST,
    MAX_DRAFTS,
    NUM_SLOTS,
    PROMPTS,
    Row,
    check_drafts,
    host_rows,
    one_by_one,
    outputs,
    prompts,
)
from tests.unit.model.native_kit import LEVELS_HERE, batch_of, needs_kernels
from tests.unit.model.native_programs import FEW, fenced, levels, poison, put, relative, taken

pytestmark = needs_kernels
SHAPES = [
    DeltaShape(1, 1, 16, 16, 4), DeltaShape(2, 4, 32, 48, 3), DeltaShape(3, 3, 128, 128, 4),
    DeltaShape(1, 3, 80, 32, 2), DeltaShape(2, 4, 48, 112, 4),
    *(DeltaShape(*sizes, channel_decay=True) for sizes in ((3, 3, 128, 128, 4), (2, 2, 16, 16, 3), (1, 2, 144, 48, 4))),
]  # fmt: skip
EPS = 1e-6
IN_CHUNKS, DECODED = 0.02, 1e-5
"""Relative errors: products of a chunk have inputs in bfloat16, decoded tokens are computed in float32."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of a layer: see `Program.delta`."""

    shape: DeltaShape
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor

    @staticmethod
    def of(shape: DeltaShape) -> Layer:
        """Random weights, with states that last for tens of tokens."""
        return Layer(
            shape, torch.randn(shape.conv_width, shape.taps) * 0.5, -torch.rand(shape.num_value_heads) * 0.1,
            torch.randn(shape.num_decays), torch.rand(shape.value_dim) + 0.5,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Items of a token's inputs."""
        return self.shape.width + (self.shape.gate_width if self.shape.channel_decay else 0)

    def states(self, num_slots: int) -> DeltaStates:
        """A pool of slots in one memory, full of NaN, with the layer in the middle of each slot."""
        of = self.shape
        shapes = [(of.num_key_heads, of.key_dim, of.taps - 1)] * 2
        shapes += [(of.num_value_heads, of.value_dim, of.taps - 1), (of.num_value_heads, of.key_dim, of.value_dim)]
        sizes = [-(-math.prod(shape) * (4 if i == 3 else 2) // 64) * 64 for i, shape in enumerate(shapes)]
        *starts, end = itertools.accumulate(sizes, initial=64)
        stride = end + 64
        raw = torch.full((num_slots * stride,), 255, dtype=torch.uint8).view(torch.float32)
        planes = []
        for i, (start, shape) in enumerate(zip(starts, shapes, strict=True)):
            values = raw if i == 3 else raw.view(torch.bfloat16)
            item = values.element_size()
            strides = (stride // item, shape[1] * shape[2], shape[2], 1)
            planes.append(values.as_strided((num_slots, *shape), strides, start // item))
        return DeltaStates((planes[0], planes[1], planes[2]), planes[3])

    def program(self, level: str, threads: int, states: DeltaStates) -> tuple[Program, list[Buffer], Buffer]:
        """A program of the layer alone, with its inputs and its output."""
        p = Program(Threads(threads), level)
        sources, out = [p.buffer(self.shape.width)], p.buffer(self.shape.value_width)
        if self.shape.channel_decay:
            sources.append(p.buffer(self.shape.gate_width))
        vectors = (fenced(vector) for vector in (self.conv, self.decay, self.bias, self.norm))
        p.delta(sources[0], self.shape, states, *vectors, EPS, out, *sources[1:])
        return p, sources, out


def stated(rows: Sequence[tuple[int, int]], slots: Sequence[int], prompts: Sequence[int] | None = None) -> ForwardBatch:
    """Rows that compute positions `[start, end)` in `slots`; those up to `prompts` as a prompt's, None: all."""
    batch, _ = batch_of(rows, 64)
    known = batch.host.ends if prompts is None else np.array(prompts, dtype=np.int64)
    return dataclasses.replace(
        batch, host=dataclasses.replace(batch.host, prompts=known, slots=np.array(slots, dtype=np.int32))
    )


def run(p: Program, sources: Sequence[Buffer], out: Buffer, batch: ForwardBatch, x: Tensor) -> Tensor:
    """One step, with poison behind its buffers."""
    p.reserve(len(x) + 1, 0)
    p.begin(batch)
    for source, part in zip(sources, x.split([source.width for source in sources], 1), strict=True):
        put(p, source, part)
    poison(p, out, len(x))
    p.run(0, p.num_ops)
    return taken(p, out, len(x)).clone()


def recurrence(layer: Layer, x: Tensor, kept: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layer in float64, token by token. Returns outputs, `kept` `[channels, taps - 1]`, and the state."""
    of, x = layer.shape, x.double()
    keys, values, heads = of.num_key_heads * of.key_dim, of.value_width, of.num_value_heads
    if of.channel_decay:
        mixed, b, a, z = x.split((of.conv_width, heads, of.num_decays, values), 1)
    else:
        mixed, z, b, a = x.split((of.conv_width, values, heads, heads), 1)
    inputs = torch.cat((kept.double().t(), mixed.bfloat16().double()))
    windows = inputs.unfold(0, of.taps, 1)
    convolved = F.silu((windows * layer.conv.double()).sum(-1))
    share = heads // of.num_key_heads
    q, k = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(share, 1)
        for part in (half.view(len(x), -1, of.key_dim) for half in convolved[:, : 2 * keys].split(keys, 1))
    )
    q, v = q * of.key_dim**-0.5, convolved[:, 2 * keys :].view(len(x), heads, -1)
    steps, beta = F.softplus(a + layer.bias.double()).view(len(x), heads, -1), b.sigmoid()
    decay = (layer.decay.double()[:, None] * steps).exp()
    state, out = state.double(), torch.empty(len(x), heads, of.value_dim, dtype=torch.float64)
    for t in range(len(x)):
        state = state * decay[t][:, :, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * layer.norm.double()
    gate = z.sigmoid() if of.channel_decay else F.silu(z)
    return (normed.flatten(1) * gate).float(), inputs[len(inputs) - of.taps + 1 :].t(), state


def in_slot(states: DeltaStates, slot: int) -> tuple[Tensor, Tensor]:
    """The inputs that a slot keeps, `[channels, taps - 1]`, and its state."""
    return torch.cat([plane[slot].flatten(0, 1) for plane in states.conv]), states.state[slot]


def fill_slot(states: DeltaStates, slot: int) -> None:
    """A random state."""
    for plane in (*states.conv, states.state):
        plane[slot] = torch.randn(plane.shape[1:]).to(plane.dtype)


@levels
@FEW
@given(
    shape=st.sampled_from(SHAPES),
    rows=st.lists(
        st.sampled_from([(0, 1), (0, 2), (0, 64), (0, 150), (17, 18), (63, 64), (64, 65), (40, 70), (128, 230)]),
        min_size=1,
        max_size=5,
    ),
    kind=st.sampled_from(["prompt", "decoded", "both"]),
    threads=st.integers(1, 3),
)
def test_delta(level: str, shape: DeltaShape, rows: list[tuple[int, int]], kind: str, threads: int) -> None:
    torch.manual_seed(len(rows))
    layer, num_slots = Layer.of(shape), len(rows) + 2
    slots = np.random.default_rng(len(rows)).permutation(num_slots)[: len(rows)].tolist()
    states = layer.states(num_slots)
    for (start, _), slot in zip(rows, slots, strict=True):
        if start:
            fill_slot(states, slot)
    before = [tuple(part.clone() for part in in_slot(states, slot)) for slot in range(num_slots)]
    prompts = {"prompt": None, "decoded": [0] * len(rows), "both": [(start + end) // 2 for start, end in rows]}[kind]
    lengths = [end - start for start, end in rows]
    x = torch.randn(sum(lengths), layer.width)
    got = run(*layer.program(level, threads, states), stated(rows, slots, prompts), x)
    allowed = DECODED if kind == "decoded" else IN_CHUNKS
    for (start, _), slot, own, part in zip(rows, slots, x.split(lengths), got.split(lengths), strict=True):
        kept, state = (torch.zeros_like(part) if start == 0 else part for part in before[slot])
        wanted, kept, state = recurrence(layer, own, kept, state)
        assert relative(part, wanted) < allowed
        assert torch.equal(in_slot(states, slot)[0].double(), kept)
        assert relative(in_slot(states, slot)[1], state.float()) < allowed
    for slot in set(range(num_slots)) - set(slots):
        assert all(bool(part.isnan().all()) for part in in_slot(states, slot)), "another slot was written"


@levels
@pytest.mark.parametrize("shape", [*SHAPES[1:4], SHAPES[5], SHAPES[7]], ids=str)
def test_chunks_on_the_grid_threads_and_company_leave_every_bit_as_it_is(level: str, shape: DeltaShape) -> None:
    """A prompt of 300 tokens, then tokens that are decoded one by one, or again in one row as after a retraction."""
    layer, prompt, total = Layer.of(shape), 300, 306
    x, others = torch.randn(total, layer.width), torch.randn(210, layer.width)
    results = []
    for threads, cuts, beside in (
        (1, (0, prompt, *range(prompt + 1, total + 1)), False),
        (2, (0, 64, 256, prompt, total), True),
        (3, (0, 128, 192, prompt, prompt + 2, total), True),
        (2, (0, total), False),
    ):
        states = layer.states(4)
        fill_slot(states, 2)
        program = layer.program(level, threads, states)
        found = []
        for start, end in itertools.pairwise(cuts):
            rows, slots, prompts, own = [(start, end)], [1], [prompt], x[start:end]
            if beside:
                rows, slots, prompts = [(64, 70), (start, end), (0, 204)], [2, 1, 3], [64, prompt, 204]
                own = torch.cat((others[:6], own, others[6:]))
            got = run(*program, stated(rows, slots, prompts), own)
            found.append(got[6 : 6 + end - start] if beside else got)
        results.append((torch.cat(found), *(part.clone() for part in in_slot(states, 1))))
    for result in results[1:]:
        for got, wanted in zip(result, results[0], strict=True):
            assert torch.equal(got, wanted)


@levels
@pytest.mark.parametrize("shape", [SHAPES[1], DeltaShape(2, 4, 32, 48, 3, channel_decay=True)], ids=str)
def test_strong_decay_and_large_inputs_stay_finite(level: str, shape: DeltaShape) -> None:
    """Decays whose products underflow, gates that saturate, and inputs of zero, whose keys have no direction."""
    layer = dataclasses.replace(Layer.of(shape), decay=torch.full((4,), -16.0))
    states = layer.states(1)
    x = torch.randn(200, layer.width) * 30
    x[50:60] = 0.0
    got = run(*layer.program(level, 2, states), stated([(0, 200)], [0], [150]), x)
    wanted, _, state = recurrence(layer, x, torch.zeros(layer.shape.conv_width, 2), torch.zeros(4, 32, 48))
    assert bool(got.isfinite().all()) and relative(got, wanted) < IN_CHUNKS
    assert relative(states.state[0], state.float()) < IN_CHUNKS


class NativeEngine:
    """Implements `draft_kit.Engine` by `Program.delta`; memory that was not written is NaN."""

    def __init__(self, layer: Layer, level: str, threads: int) -> None:
        shape, most = layer.shape, MAX_DRAFTS + 1
        pending = PendingTokens(
            torch.full((NUM_SLOTS, most, shape.conv_width), torch.nan, dtype=torch.bfloat16),
            torch.full((NUM_SLOTS, most, shape.num_key_heads, shape.key_dim), torch.nan),
            torch.full((NUM_SLOTS, most, shape.num_value_heads, shape.value_dim), torch.nan),
            torch.full((NUM_SLOTS, most, shape.num_decays), torch.nan),
        )
        if shape.channel_decay:
            decays = pending.decays.view(NUM_SLOTS, most, shape.num_value_heads, shape.key_dim)
            pending = dataclasses.replace(pending, decays=decays)
        self._width, self._states = layer.width, dataclasses.replace(layer.states(NUM_SLOTS), pending=pending)
        self.program = layer.program(level, threads, self._states)

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self._width)

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        host = host_rows(rows)
        spans = list(zip(host.starts.tolist(), host.ends.tolist(), strict=True))
        return run(*self.program, dataclasses.replace(stated(spans, []), host=host), x)

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        program = self.program[0]
        program.begin_fold(fold_rows(np.array(slots), np.array(counts)))
        program.run(0, 1)

    def slot(self, slot: int) -> list[Tensor]:
        return [part.clone() for part in in_slot(self._states, slot)]


@levels
@pytest.mark.parametrize("seed", range(6))
def test_rows_with_drafts_leave_the_bits_of_single_steps(level: str, seed: int) -> None:
    """See `draft_kit`; on one thread, and on several."""
    shapes = [
        DeltaShape(2, 4, 32, 48, 4), DeltaShape(1, 3, 80, 112, 2), DeltaShape(2, 2, 128, 128, 4),
        DeltaShape(1, 2, 16, 16, 1), DeltaShape(2, 2, 128, 128, 4, channel_decay=True),
        DeltaShape(1, 2, 48, 112, 2, channel_decay=True),
    ]  # fmt: skip
    torch.manual_seed(seed)
    layer = Layer.of(shapes[seed])
    check_drafts(NativeEngine(layer, level, 1), NativeEngine(layer, level, 1 + seed % 3), seed, folds=seed % 2 == 0)


@levels
@pytest.mark.parametrize("channel_decay", [False, True])
def test_a_row_of_several_known_tokens_folds_first(level: str, channel_decay: bool) -> None:
    """No plan has such a row behind a row with drafts; the operation takes it."""
    torch.manual_seed(1)
    layer = Layer.of(DeltaShape(2, 4, 32, 48, 4, channel_decay=channel_decay))
    single, drafted = NativeEngine(layer, level, 1), NativeEngine(layer, level, 2)
    x = [single.inputs(LONGEST) for _ in PROMPTS]
    expected = outputs(single, one_by_one([76, 1, 3]), x)
    found = outputs(drafted, iter([prompts(), [Row(0, 70, 3, 2)]]), x)
    host = dataclasses.replace(host_rows([Row(0, 73, num_folded=3)]), ends=np.array([76]))
    got = run(*drafted.program, dataclasses.replace(stated([(73, 76)], []), host=host), x[0][73:76])
    assert torch.equal(found[0][72], expected[0][72])
    assert all(torch.equal(got[i], expected[0][73 + i]) for i in range(3))


def test_a_program_without_pending_tokens_takes_no_drafts() -> None:
    layer = Layer.of(SHAPES[0])
    program, sources, out = layer.program(LEVELS_HERE[0], 1, layer.states(4))
    host = host_rows([Row(1, 1, 1)])
    with pytest.raises(AssertionError):
        run(
            program,
            sources,
            out,
            dataclasses.replace(stated([(1, 3)], []), host=host),
            torch.randn(2, layer.width),
        )
