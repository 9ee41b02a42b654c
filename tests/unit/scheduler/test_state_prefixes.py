"""Cached tokens of hybrid models, for workloads on which other servers reuse nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest

from pdserve.base.clock import ManualClock
from pdserve.executor.interface import BatchPlan, BatchRow, StepHandle
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import SimNode, monolith_tokens
from pdserve.sim.shape import Prompt, Shape, request

GRID = 64


def serve(shape: Shape, prompts: Sequence[Prompt]) -> Iterator[float]:
    """Run prompts one after the other; yield the cached tokens of each."""
    node = SimNode("null", shape, SimNet(0, ManualClock(), Faults()), "mono", "mono")
    expected = monolith_tokens(shape, prompts)
    for index, prompt in enumerate(prompts):
        before = node.scheduler.context.counters["cached_tokens"]
        node.mailbox.post(request(f"r{index}", prompt, None))
        for _ in range(500):
            if not node.scheduler.step() and node.idle:
                break
        assert node.halves[f"r{index}"].tokens == expected[index]
        yield node.scheduler.context.counters["cached_tokens"] - before
    assert not node.leaks()


def shape_of(chunk: int | None, num_slots: int = 16) -> Shape:
    return Shape(
        page_tokens=16, num_pages=256, num_rows=4, chunk_tokens=chunk, has_state=True, num_slots=num_slots,
        state_grid_pages=GRID // 16,
    )  # fmt: skip


def tokens(count: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


@pytest.mark.parametrize("chunk", [None, 4096, 256, 100])
def test_a_prompt_and_the_same_with_a_suffix(chunk: int | None) -> None:
    """One prompt after the other, not at the same time."""
    first = tokens(561, 1)
    prompts = [Prompt(first, 1), Prompt((*first, *tokens(20, 5000)), 1)]
    assert list(serve(shape_of(chunk), prompts)) == [0, 561 // GRID * GRID]


@pytest.mark.parametrize(("num_shared", "num_own"), [(300, 140), (310, 130), (128, 128), (330, 3)])
def test_a_shared_prefix_is_reused_wherever_the_prompts_end(num_shared: int, num_own: int) -> None:
    """Also where the last multiple of the grid of each prompt lies in tokens of its own."""
    shared = tokens(num_shared, 1)
    prompts = [Prompt((*shared, *tokens(num_own, 1000 * (i + 1))), 1) for i in range(5)]
    junction = num_shared // GRID * GRID
    first_hit = junction if (num_shared + num_own - 1) // GRID * GRID == junction else 0
    assert list(serve(shape_of(None), prompts)) == [0, first_hit, junction, junction, junction]


def test_states_of_a_long_prompt_do_not_displace_those_of_junctions() -> None:
    """States at the ends of other chunks are kept only in free slots."""
    shared = tokens(130, 1)
    prompts = [Prompt((*shared, *tokens(70, 1000 * (i + 1))), 1) for i in range(2)]
    prompts += [Prompt(tokens(1000, 20_000), 1), Prompt((*shared, *tokens(70, 9000)), 1)]
    assert list(serve(shape_of(64, num_slots=5), prompts)) == [0, 128, 0, 128]


@pytest.mark.parametrize(
    ("chunk", "mixed"), [(512, None), (512, 128), (200, None), (2 * GRID, None), (100, None), (40, 7)]
)
def test_cut_prompts_end_on_the_grid_of_states(chunk: int, mixed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes at least two grid lengths of prompts; smaller steps also cut elsewhere. All prompts end."""
    shape = dataclasses.replace(shape_of(chunk, num_slots=64), num_pages=1024, num_rows=16, mixed_chunk_tokens=mixed)
    rng = random.Random(chunk)
    lengths = [rng.choice((rng.randrange(1, 100), rng.randrange(100, 700))) for _ in range(16)]
    prompts = [Prompt(tokens(length, 2000 * i), rng.randrange(1, 9)) for i, length in enumerate(lengths)]
    node = SimNode("null", shape, SimNet(0, ManualClock(), Faults()), "mono", "mono")
    rows: list[BatchRow] = []
    launch = node.executor.launch

    def recorded(plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        rows.extend(plan.rows)
        return launch(plan, layer_events=layer_events)

    monkeypatch.setattr(node.executor, "launch", recorded)
    for index, prompt in enumerate(prompts):
        node.mailbox.post(request(f"r{index}", prompt, None))
        for _ in range(rng.randrange(3)):
            node.step()
    for _ in range(5000):
        node.step()
        if node.idle:
            break
    assert node.idle and len(rows) > len(prompts)
    cuts = {row.end % GRID for row in rows if not row.sample}
    assert cuts and (cuts == {0}) == ((mixed or chunk) >= 2 * GRID), cuts
