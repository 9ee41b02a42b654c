"""What a step may cost: counts of what it looks at, never times (`benchmarks/bench_scheduler.py` has those)."""

from __future__ import annotations

from tests.unit.scheduler.kit import Mono


def test_a_flood_of_short_prompts_fills_the_steps_budget() -> None:
    """However many start: only those that are passed over are limited."""
    mono = Mono(num_pages=400, num_rows=100, chunk=500, width=4)
    for index in range(100):
        mono.post(f"r{index}", [3, index, 7, 8, 9])
    assert len(mono.step()) == 100
    mono.run()
    assert mono.all_free()
