"""Recurrent layers under speculation: rows with drafts leave the bits of single decode steps, whatever is accepted.

One script of steps drives the arithmetic in torch and that of the CPU kernels. Its rows have different numbers of drafts
and of accepted ones, some rows have none, and some rest for a step with their tokens pending. The same tokens one by one
give what is expected: the outputs of the accepted tokens, and what the slots hold at the end.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.model.attention.state_slots import StateSlots, fold_rows, pending_bytes, pending_tokens, state_rows
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.gated_delta_net import DeltaInputs, TorchDelta
from pdserve.model.layer_spec import GatedDeltaSpec
from pdserve.model.layers.gated_delta import MAX_PENDING, PendingTokens
from pdserve.model.native.delta import DeltaShape
from tests.unit.model.delta_kit import delta_spec, planes_of, state_pool
from tests.unit.model.native_kit import needs_kernels
from tests.unit.model.native_programs import levels
from tests.unit.model.test_native_delta import Layer, in_slot, run, stated

CPU = torch.device("cpu")
PROMPTS = (70, 1, 3)
SLOTS = (3, 0, 2)
NUM_SLOTS = 4
MAX_DRAFTS = 5
LONGEST = 140


@dataclasses.dataclass(frozen=True)
class Row:
    """Request `request` computes `1 + num_drafts` tokens from position `start`; the first `num_right` drafts are right.

    `num_folded`: pending tokens that are folded before. A row at position 0 is the prompt.
    """

    request: int
    start: int
    num_drafts: int = 0
    num_right: int = 0
    num_folded: int = 0

    @property
    def num_tokens(self) -> int:
        return PROMPTS[self.request] if self.start == 0 else 1 + self.num_drafts


def prompts() -> list[Row]:
    return [Row(request, 0) for request in range(len(PROMPTS))]


def drafting(seed: int, num_steps: int, most: int = MAX_DRAFTS) -> Iterator[list[Row]]:
    """Steps behind the prompts. The last has the rows whose slots have pending tokens, without drafts or tokens used."""
    chance = random.Random(seed)
    at, pending = list(PROMPTS), [0] * len(PROMPTS)
    for _ in range(num_steps):
        rows = []
        for request in chance.sample(range(len(PROMPTS)), chance.randint(1, len(PROMPTS))):
            drafts = chance.choice([0, 0, 1, 2, 3, most])
            right = chance.choice([0, drafts, chance.randint(0, drafts)])
            rows.append(Row(request, at[request], drafts, right, pending[request]))
            at[request] += 1 + right
            pending[request] = 1 + right if drafts else 0
        yield rows
    yield [Row(request, at[request], num_folded=pending[request]) for request in range(len(PROMPTS))]


class Engine(Protocol):
    """One layer with its slots. `step` returns the outputs of all tokens of the rows, `[N, ...]`."""

    def inputs(self, num_tokens: int) -> Tensor: ...

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor: ...

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None: ...

    def slot(self, slot: int) -> list[Tensor]: ...


def host_rows(rows: Sequence[Row], old: HostRows | None = None) -> HostRows:
    """The rows for both kinds of layer."""
    lengths = np.array([row.num_tokens for row in rows])
    starts = np.array([row.start for row in rows])
    drafts, folded = (np.array([getattr(row, name) for row in rows]) for name in ("num_drafts", "num_folded"))
    return HostRows(
        starts, starts + lengths, lengths.cumsum() - lengths, np.array([PROMPTS[row.request] for row in rows]),
        np.zeros((len(rows), 1), dtype=np.int32), slots=np.array([SLOTS[row.request] for row in rows], dtype=np.int32),
        num_drafts=drafts if drafts.any() else None, num_folded=folded if folded.any() else None,
    )  # fmt: skip


class TorchEngine:
    """Implements `Engine` by `TorchDelta`; memory that was not written is NaN."""

    def __init__(self, spec: GatedDeltaSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        generator = torch.Generator().manual_seed(7)
        channels, heads = 2 * spec.key_width + spec.value_width, spec.num_value_heads
        self._weight = torch.randn(channels, spec.conv_kernel, generator=generator).to(dtype)
        self._decay, self._bias = (torch.randn(heads, generator=generator) for _ in range(2))
        self._pool = state_pool(spec, NUM_SLOTS, dtype)
        self._states = StateSlots(self._pool, CPU, MAX_DRAFTS)
        self._widths = [channels, heads, heads]

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, sum(self._widths)).to(self._dtype)

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        spec = self._spec
        inputs = DeltaInputs(
            *x.split(self._widths, 1), self._weight, self._decay, self._bias,
            spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim,
        )  # fmt: skip
        return TorchDelta().mix(inputs, self._states.begin(state_rows(host_rows(rows), CPU)).states(1))

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._states.fold(fold_rows(np.array(slots), np.array(counts)))

    def slot(self, slot: int) -> list[Tensor]:
        return [plane[slot].clone() for plane in planes_of(self._pool, 1)]


class NativeEngine:
    """Implements `Engine` by `Program.delta`; memory that was not written is NaN."""

    def __init__(self, layer: Layer, level: str, threads: int) -> None:
        shape, most = layer.shape, MAX_DRAFTS + 1
        pending = PendingTokens(
            torch.full((NUM_SLOTS, most, shape.conv_width), torch.nan, dtype=torch.bfloat16),
            torch.full((NUM_SLOTS, most, shape.num_key_heads, shape.key_dim), torch.nan),
            torch.full((NUM_SLOTS, most, shape.num_value_heads, shape.value_dim), torch.nan),
            torch.full((NUM_SLOTS, most, shape.num_value_heads), torch.nan),
        )
        self._width, self._states = shape.width, dataclasses.replace(layer.states(NUM_SLOTS), pending=pending)
        self._program = layer.program(level, threads, self._states)

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self._width)

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        host = host_rows(rows)
        spans = list(zip(host.starts.tolist(), host.ends.tolist(), strict=True))
        batch: ForwardBatch = stated(spans, [])
        return run(*self._program, dataclasses.replace(batch, host=host), x)

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        program = self._program[0]
        program.begin_fold(fold_rows(np.array(slots), np.array(counts)))
        program.run(0, 1)

    def slot(self, slot: int) -> list[Tensor]:
        return [part.clone() for part in in_slot(self._states, slot)]


def outputs(engine: Engine, steps: Iterator[list[Row]], x: Sequence[Tensor]) -> list[dict[int, Tensor]]:
    """Run the steps: the outputs of each request by position. `x`: the right inputs of each request."""
    found: list[dict[int, Tensor]] = [{} for _ in PROMPTS]
    for rows in steps:
        parts = []
        for row in rows:
            right = row.num_tokens - row.num_drafts + row.num_right
            wrong = engine.inputs(row.num_tokens - right) * 3
            parts += [x[row.request][row.start : row.start + right], wrong]
        out = engine.step(rows, torch.cat(parts))
        for row, part in zip(rows, out.split([row.num_tokens for row in rows]), strict=True):
            right = row.num_tokens - row.num_drafts + row.num_right
            found[row.request] |= {row.start + i: part[i].clone() for i in range(right)}
    return found


def one_by_one(ends: Sequence[int]) -> Iterator[list[Row]]:
    """The prompts, and then each request token by token up to its end."""
    yield prompts()
    for turn in range(LONGEST):
        rows = [Row(request, PROMPTS[request] + turn) for request in range(len(PROMPTS))]
        rows = [row for row in rows if row.start < ends[row.request]]
        if rows:
            yield rows


def check(single: Engine, drafted: Engine, seed: int, *, folds: bool) -> None:
    """With `folds` the last pending tokens are folded alone, else by a token more of each request."""
    torch.manual_seed(seed)
    x = [single.inputs(LONGEST) for _ in PROMPTS]
    *steps, last = drafting(seed, 9)
    ends = [row.start + (not folds) for row in last]
    expected = outputs(single, one_by_one(ends), x)
    found = outputs(drafted, iter([prompts(), *steps, *([] if folds else [last])]), x)
    if folds:
        pending = [row for row in last if row.num_folded]
        drafted.fold([SLOTS[row.request] for row in pending], [row.num_folded for row in pending])
    for request, slot in enumerate(SLOTS):
        assert found[request].keys() == expected[request].keys() == set(range(ends[request]))
        for position, out in expected[request].items():
            assert torch.equal(found[request][position], out), (request, position)
        for got, wanted in zip(drafted.slot(slot), single.slot(slot), strict=True):
            assert torch.equal(got, wanted) and bool(wanted.isfinite().all())
    assert all(bool(part.isnan().all()) for part in drafted.slot(1)), "the slot of no request was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_torch_gives_the_bits_of_single_steps(dtype: torch.dtype, seed: int) -> None:
    spec = [delta_spec((2, 4), 16, 16), delta_spec((1, 2), 24, 40), delta_spec((2, 2), 32, 32, taps=2)][seed % 3]
    check(TorchEngine(spec, dtype), TorchEngine(spec, dtype), seed, folds=seed % 2 == 0)


@needs_kernels
@levels
@pytest.mark.parametrize("seed", range(4))
def test_the_kernels_give_the_bits_of_single_steps(level: str, seed: int) -> None:
    shapes = [
        DeltaShape(2, 4, 32, 48, 4), DeltaShape(1, 3, 80, 112, 2), DeltaShape(2, 2, 128, 128, 4),
        DeltaShape(1, 2, 16, 16, 1),
    ]  # fmt: skip
    torch.manual_seed(seed)
    layer = Layer.of(shapes[seed])
    check(NativeEngine(layer, level, 1), NativeEngine(layer, level, 1 + seed % 3), seed, folds=seed % 2 == 0)


@needs_kernels
@levels
def test_a_row_of_several_known_tokens_folds_first(level: str) -> None:
    """As a chunk that is computed beside pending tokens would; no plan has such a row, and the kernel takes it."""
    torch.manual_seed(1)
    layer = Layer.of(DeltaShape(2, 4, 32, 48, 4))
    single, drafted = NativeEngine(layer, level, 1), NativeEngine(layer, level, 2)
    x = [single.inputs(LONGEST) for _ in PROMPTS]
    expected = outputs(single, one_by_one([76, 1, 3]), x)
    found = outputs(drafted, iter([prompts(), [Row(0, 70, 3, 2)]]), x)
    host = dataclasses.replace(host_rows([Row(0, 73, num_folded=3)]), ends=np.array([76]))
    batch = dataclasses.replace(stated([(73, 76)], []), host=host)
    program, source, out = drafted._program  # noqa: SLF001
    got = run(program, source, out, batch, x[0][73:76])
    assert torch.equal(found[0][72], expected[0][72])
    assert all(torch.equal(got[i], expected[0][73 + i]) for i in range(3))


def test_a_row_with_more_drafts_than_the_layers_keep_is_refused() -> None:
    spec = delta_spec((1, 1), 16, 16)
    with pytest.raises(ConfigError, match="32 drafts of a row are more than the 31 that recurrent layers keep") as refused:
        StateSlots(state_pool(spec, 1, torch.float32), CPU, MAX_PENDING)
    assert refused.value.field == "speculative_num_draft_tokens"
    engine = TorchEngine(spec, torch.float32)
    with pytest.raises(AssertionError, match="more drafts than the layer keeps"):
        engine.step([Row(0, 70, MAX_DRAFTS + 1)], engine.inputs(MAX_DRAFTS + 2))


def test_the_bytes_of_pending_tokens_are_those_allocated() -> None:
    pool = state_pool(delta_spec((2, 4), 16, 32), 5, torch.bfloat16)
    for drafts in (0, 1, 7):
        tensors = [x for layer in pending_tokens(pool, drafts) if layer for x in vars(layer).values()]
        assert sum(x.nbytes for x in tensors) == pending_bytes(pool.group, drafts) * (pool.num_pages + 1)
