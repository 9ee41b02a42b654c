"""The benchmark of `--mamba-full-memory-ratio`: workloads, one tiny run by hand, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_state_ratio as bench
from benchmarks import state_workloads
from benchmarks.state_workloads import Turn, Workload

MODEL = "Qwen3.5-0.8B"


def tokens(first: int, count: int) -> list[int]:
    return list(range(state_workloads.FIRST_OWN_TOKEN + first, state_workloads.FIRST_OWN_TOKEN + first + count))


def played(workload: Workload, pools: bench.Pools) -> bench.Played:
    return bench.Player(workload, bench.layout_of(MODEL), pools).play(MODEL, 1000, 0.9, pools)


def test_the_counts_of_a_session_add_up() -> None:
    """The second turn continues from the state behind the first prompt's last multiple of 64."""
    workload = Workload("two turns", [[Turn(tokens(0, 200), 10), Turn(tokens(1000, 200), 5, think_s=2.0)]], 1)
    found = played(workload, bench.Pools(num_pages=20, num_slots=4))
    assert found.num_requests == workload.num_requests == 2
    assert found.prompt_tokens == 200 + (200 + 10 + 200)
    assert found.generation_tokens == 10 + 5
    assert found.cached_tokens == 192
    assert (found.states_kept, found.states_evicted, found.states_cached) == (2, 0, 2)
    assert (found.retractions, found.most_running, found.differences) == (0, 1, ())
    assert 2.0 < found.duration_s < 3.0 and 0.0 < found.mean_running < 1.0


def test_states_that_no_slot_is_left_for_are_evicted_and_cost_the_cache() -> None:
    """Three users in turn, with one slot beside the running request's."""
    sessions = [[Turn(tokens(5000 * i, 200), 4), Turn(tokens(5000 * i + 1000, 100), 4, think_s=9.0)] for i in range(3)]
    workload = Workload("three users", sessions, 3)
    few = played(workload, bench.Pools(num_pages=100, num_slots=2))
    many = played(workload, bench.Pools(num_pages=100, num_slots=12))
    assert few.num_requests == many.num_requests == 6
    assert few.prompt_tokens == many.prompt_tokens
    assert few.states_evicted > 0 and many.states_evicted == 0
    assert few.cached_tokens < many.cached_tokens == 3 * 192
    assert few.states_kept - few.states_evicted == few.states_cached
    assert few.most_running <= 2


def test_the_same_arguments_give_the_same_numbers() -> None:
    workload = state_workloads.chats(4, 3, seed=7)
    assert state_workloads.chats(4, 3, seed=7) == workload != state_workloads.chats(4, 3, seed=8)
    pools = bench.Pools(num_pages=200, num_slots=5)
    assert played(workload, pools) == played(workload, pools)


def test_without_a_prefix_cache_nothing_is_cached() -> None:
    found = played(state_workloads.answers(4, 2), bench.Pools(num_pages=100, num_slots=2))
    assert (found.cached_tokens, found.states_kept, found.num_requests) == (0, 0, 4)


def test_the_ratio_divides_the_memory() -> None:
    layout = bench.layout_of(MODEL)
    num_bytes = layout.token_bytes * 100_000
    pools = bench.Pools.sized(layout, num_bytes, 0.25)
    state_bytes = bench.state_tokens(layout) * layout.token_bytes * pools.num_slots
    assert 0.9 * num_bytes * 0.2 < state_bytes <= num_bytes * 0.2
    assert num_bytes - layout.page_bytes < state_bytes + pools.num_pages * layout.page_bytes <= num_bytes


def test_a_trace_keeps_shared_blocks_and_leaves_out_long_prompts(tmp_path: Path) -> None:
    path = tmp_path / "some_trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 2]},
        {"timestamp": 5, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 9, "input_length": 5000, "output_length": 4, "hash_ids": [0, 1, *range(5, 14)]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    workload = state_workloads.trace(path, 2, every=1, most_prompt_tokens=4000, most_requests=10)
    (first,), (second,), (third,) = workload.sessions
    assert (workload.name, workload.most_tokens) == ("some_trace", 1028)
    assert [len(turn.new_ids) for turn in (first, second, third)] == [700, 600, 1024]
    assert first.new_ids == third.new_ids[:700] and second.new_ids[:512] == first.new_ids[:512]
    assert second.new_ids[512] != first.new_ids[512] and second.max_new_tokens == 1
    assert state_workloads.trace(path, 2, every=2, most_prompt_tokens=4000, most_requests=1).num_requests == 1
    with pytest.raises(ValueError, match="no request"):
        state_workloads.trace(path, 2, every=1, most_prompt_tokens=10, most_requests=1)


def test_requests_that_cannot_fit_are_an_error() -> None:
    workload = Workload("too long", [[Turn(tokens(0, 500), 4)]], 1)
    with pytest.raises(RuntimeError, match="KV memory"):
        played(workload, bench.Pools(num_pages=2, num_slots=2))


@pytest.mark.parametrize("flags", [["--ratios", "0"], ["--sessions", "0"], ["--trace-every", "0"], ["--models", "x"]])
def test_flags_that_cannot_be_measured_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_flags(flags)


def test_a_tiny_run_writes_a_report_to_which_another_adds(tmp_path: Path) -> None:
    argv = ["--ratios", "0.5", "2", "--sessions", "3", "--budget-tokens", "100000", "--results", str(tmp_path)]
    assert bench.main([*argv, "--models", MODEL, "--write"]) == 0
    (path,) = tmp_path.glob("*-state-ratio.json")
    assert bench.main([*argv, "--models", "Qwen3-Next-8-layers", "--write", "--add-to", str(path)]) == 0
    facts = json.loads(path.read_text())
    found = [bench.Played.from_json(entry) for entry in facts["played"]]
    assert len(found) == 2 * 3 * 3 and len(facts["commands"]) == 2
    assert [len(group) for group in bench.cases(found)] == [2] * 6
    shares = bench.relative_to_best(found, lambda one: one.requests_per_s, max)
    assert all(max(of_ratio) <= 1.0 for of_ratio in shares.values())
    (table,) = tmp_path.glob("*-state-ratio.md")
    assert "**Qwen3-Next-8-layers, long chats**, memory of 100,000 tokens" in table.read_text()
    assert str(tmp_path) not in table.read_text(), "directories of one machine"
