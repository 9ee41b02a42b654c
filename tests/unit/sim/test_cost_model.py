"""The executor that computes nothing: what steps cost, when they end, and a scheduler that runs on it."""

from __future__ import annotations

import pytest

from pdserve.base.clock import ManualClock
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.sim.cost_model import FIRST_TOKEN, CostModel, CostModelExecutor
from pdserve.sim.hash_lm import hash_layout
from tests.ahead import written_within

COSTS = CostModel(step_s=1.0, prefill_token_s=0.1, decode_row_s=0.01, kv_token_s=0.001, copy_byte_s=0.5)
PROMPT = BatchRow("a", 0, 0, 10, sample=True)
DECODE = BatchRow("b", 1, 20, 21, sample=True)


def make(clock: ManualClock) -> CostModelExecutor:
    return CostModelExecutor(hash_layout(4, num_layers=1), 8, COSTS, clock)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((), 1.0), ((PROMPT,), 1.0 + 1.0 + 0.010), ((DECODE,), 1.0 + 0.01 + 0.021), ((PROMPT, DECODE), 2.041)],
)
def test_a_step_costs_the_sum_of_its_parts(rows: tuple[BatchRow, ...], seconds: float) -> None:
    clock = ManualClock(5.0)
    executor = make(clock)
    run(executor, BatchPlan(1, rows))
    assert clock.now() == pytest.approx(5.0 + seconds)
    assert executor.busy_s == pytest.approx(seconds)


def test_a_row_with_drafts_samples_the_tokens_of_single_steps_and_costs_a_row_for_each() -> None:
    clock = ManualClock()
    executor = make(clock)
    plain = [run(executor, BatchPlan(i, (BatchRow("b", 1, 19 + i, 20 + i, sample=True),))) for i in (1, 2, 3)]
    tokens = [result.sampled(0)[0] for result in plain]
    before = clock.now()
    drafts = (tokens[0].token_id, tokens[1].token_id, 0)
    result = run(executor, BatchPlan(4, (BatchRow("b", 1, 20, 24, sample=True, drafts=drafts), DECODE)))
    assert result.sampled(0) == tuple(tokens) and result.sampled(1) == (tokens[0],)
    assert clock.now() - before == pytest.approx(1.0 + 4 * 0.01 + 0.024 + 0.01 + 0.021)


def test_a_step_launched_ahead_begins_when_the_device_is_free() -> None:
    clock = ManualClock()
    executor = make(clock)
    first, second = (executor.launch(BatchPlan(step, (DECODE,)), layer_events=True) for step in (1, 2))
    assert clock.now() == 0.0 and first.layer_events is not None
    assert not written_within(first.layer_events, 1, 0.0)
    executor.resolve(first)
    assert clock.now() == pytest.approx(1.031) and written_within(first.layer_events, 1, 0.0)
    clock.advance(0.5)  # the scheduler works while the device does
    executor.resolve(second)
    assert clock.now() == pytest.approx(2.062)


def test_a_late_scheduler_leaves_the_device_idle() -> None:
    clock = ManualClock()
    executor = make(clock)
    run(executor, BatchPlan(1, (DECODE,)))
    clock.advance(3.0)
    run(executor, BatchPlan(2, (DECODE,)))
    assert clock.now() == pytest.approx(5.062) and executor.busy_s == pytest.approx(2.062)


def test_only_rows_that_sample_get_tokens_and_these_are_ordinary() -> None:
    executor = make(ManualClock())
    result = run(executor, BatchPlan(1, (BatchRow("a", 0, 0, 8, sample=False), DECODE)))
    assert result.tokens[0] is None
    assert result.tokens[1] is not None and FIRST_TOKEN <= result.tokens[1].token_id < 50_000


def test_pages_go_to_the_host_and_back_at_the_cost_of_their_bytes() -> None:
    clock = ManualClock()
    executor = make(clock)
    page_bytes = executor.layout.groups[0].page_bytes
    saved = executor.offload([[3, 5]])
    assert saved.num_bytes == 2 * page_bytes and clock.now() == pytest.approx(page_bytes)
    executor.restore(saved, [[0, 1]])
    assert clock.now() == pytest.approx(2 * page_bytes)
    with pytest.raises(AssertionError):
        executor.restore(saved, [[0]])


def test_the_pool_is_memory_of_the_layouts_size() -> None:
    executor = make(ManualClock())
    ((address, num_bytes),) = executor.buffers
    assert address > 0 and num_bytes == 8 * executor.layout.groups[0].page_bytes
