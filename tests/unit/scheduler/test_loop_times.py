"""Where the loop's time goes: stages add up, and steps that overlap are counted once."""

from __future__ import annotations

from pdserve.base.clock import ManualClock
from pdserve.scheduler.loop_times import FORWARD_SECONDS, STAGE_SECONDS, LoopTimes


def test_the_stages_add_up_to_the_time_of_the_loop() -> None:
    clock = ManualClock(5.0)
    times = LoopTimes(clock.now, lambda: 7.0)
    for stage, seconds in (("idle", 4.0), ("get_next_batch_to_run", 1.0), ("run_batch", 8.0), ("idle", 2.0)):
        times.enter(stage)  # type: ignore[arg-type]
        clock.advance(seconds)
    counted = times.counters()
    stages = {name.partition(".")[2]: s for name, s in counted.items() if name.startswith(STAGE_SECONDS)}
    assert sum(stages.values()) == 15.0
    assert {name: s for name, s in stages.items() if s} == {"idle": 6.0, "get_next_batch_to_run": 1.0, "run_batch": 8.0}
    assert (counted["scheduler_idle_seconds"], counted["scheduler_process_cpu_seconds"]) == (6.0, 7.0)
    clock.advance(1.0)
    assert times.counters()["scheduler_idle_seconds"] == 7.0, "the current stage counts, too"


def test_a_step_that_another_one_overlaps_counts_from_the_end_of_that() -> None:
    clock = ManualClock()
    times = LoopTimes(clock.now)
    times.launch("extend")
    clock.advance(1.0)
    times.launch("decode")
    clock.advance(2.0)
    times.resolve()
    clock.advance(4.0)
    times.resolve()
    times.launch(None)
    clock.advance(8.0)
    times.resolve()
    counted = times.counters()
    assert [counted[f"{FORWARD_SECONDS}.{kind}"] for kind in ("extend", "decode", "mixed")] == [3.0, 4.0, 0.0]
