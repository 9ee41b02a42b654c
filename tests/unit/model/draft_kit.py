"""Steps with drafts for layers with a recurrent state, and what they must leave: the bits of single decode steps.

One script of steps drives each arithmetic. Its rows have different numbers of drafts and of accepted ones, some have
none, and some requests rest for a step with their tokens pending. The same tokens one by one give what is expected: the
outputs of the accepted tokens, and what the slots hold at the end.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.model.attention.state_slots import StateSlots, fold_rows, state_rows
from pdserve.model.forward_batch import HostRows
from pdserve.model.gated_delta_net import DeltaInputs, DeltaKernels
from pdserve.model.layer_spec import GatedDeltaSpec
from tests.unit.model.delta_kit import num_decays, planes_of, state_pool

PROMPTS = (70, 1, 3)
SLOTS = (3, 0, 2)
NUM_SLOTS = 4
MAX_DRAFTS = 5
LONGEST = 140
Same = Callable[[Tensor, Tensor], bool]


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
    """The prompts, one of them beside rows with drafts, and steps; at last a row without drafts of each request."""
    chance = random.Random(seed)
    yield [Row(0, 0), Row(1, 0)]
    yield [Row(1, 1, 2, 2), Row(2, 0), Row(0, 70, 3, 1)]
    at, pending = [72, 4, 3], [2, 3, 0]
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


def host_rows(rows: Sequence[Row]) -> HostRows:
    """The rows for both kinds of layer."""
    lengths = np.array([row.num_tokens for row in rows])
    starts = np.array([row.start for row in rows])
    drafts, folded = (np.array([getattr(row, name) for row in rows]) for name in ("num_drafts", "num_folded"))
    return HostRows(
        starts, starts + lengths, lengths.cumsum() - lengths, np.array([PROMPTS[row.request] for row in rows]),
        np.zeros((len(rows), 1), dtype=np.int32), slots=np.array([SLOTS[row.request] for row in rows], dtype=np.int32),
        num_drafts=drafts if drafts.any() else None, num_folded=folded if folded.any() else None,
    )  # fmt: skip


class DeltaEngine:
    """Implements `Engine` by `DeltaKernels` on `device`; memory that was not written is NaN."""

    def __init__(self, spec: GatedDeltaSpec, dtype: torch.dtype, kernels: DeltaKernels, device: str = "cpu") -> None:
        self._spec, self._dtype, self._kernels, self._device = spec, dtype, kernels, torch.device(device)
        generator = torch.Generator().manual_seed(7)
        channels, heads, decays = 2 * spec.key_width + spec.value_width, spec.num_value_heads, num_decays(spec)
        self._weight = torch.randn(channels, spec.conv_kernel, generator=generator).to(device, dtype)
        self._decay, self._bias = (torch.randn(count, generator=generator).to(device) for count in (heads, decays))
        self._pool = state_pool(spec, NUM_SLOTS, dtype)
        self._states = StateSlots(self._pool, self._device, MAX_DRAFTS, channel_decay=spec.channel_decay)
        self._widths = [channels, heads, decays]

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, sum(self._widths)).to(self._device, self._dtype)

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        spec = self._spec
        inputs = DeltaInputs(
            *x.split(self._widths, 1), self._weight, self._decay, self._bias,
            spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim,
        )  # fmt: skip
        found: Tensor = self._kernels.mix(
            inputs, self._states.begin(state_rows(host_rows(rows), self._device)).states(1)
        )
        return found.cpu()

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._states.fold(fold_rows(np.array(slots), np.array(counts)))

    def slot(self, slot: int) -> list[Tensor]:
        return [plane[slot].clone().cpu() for plane in planes_of(self._pool, 1)]


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


def check_drafts(
    single: Engine, drafted: Engine, seed: int, *, folds: bool, num_steps: int = 9, same: Same = torch.equal
) -> None:
    """With `folds` the last pending tokens are folded alone, else by a token more of each request."""
    torch.manual_seed(seed)
    x = [single.inputs(LONGEST) for _ in PROMPTS]
    *steps, last = drafting(seed, num_steps)
    ends = [row.start + (not folds) for row in last]
    expected = outputs(single, one_by_one(ends), x)
    found = outputs(drafted, iter(steps if folds else [*steps, last]), x)
    if folds:
        pending = [row for row in last if row.num_folded]
        drafted.fold([SLOTS[row.request] for row in pending], [row.num_folded for row in pending])
    for request, slot in enumerate(SLOTS):
        assert found[request].keys() == expected[request].keys() == set(range(ends[request]))
        for position, out in expected[request].items():
            assert same(found[request][position], out), (request, position)
        for got, wanted in zip(drafted.slot(slot), single.slot(slot), strict=True):
            assert same(got, wanted) and bool(wanted.isfinite().all())
    assert all(bool(part.isnan().all()) for part in drafted.slot(1)), "the slot of no request was written"
