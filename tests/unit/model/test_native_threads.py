"""The kernels' threads: they come to every run, awake or asleep, and sleep when there is none."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.model.native_kit import LEVELS_HERE, needs_kernels
from tests.unit.model.native_programs import begin, program, put, taken
from tests.waiting import wait_until

pytestmark = needs_kernels
ROWS, WIDTH, RUNS = 5, 32, 400
PAUSES_S = (0.0, 2e-5, 5e-5, 1e-4, 5e-4)
"""Behind a run threads stay awake for about 50 microseconds."""


def tasks() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def sleeps(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("announced", [False, True])
def test_threads_come_to_each_run_whether_they_are_awake_or_fall_asleep(num_threads: int, announced: bool) -> None:
    """Who misses a run leaves its rows zero, or all wait. `announced`: by a step's beginning."""
    p = program(LEVELS_HERE[-1], num_threads)
    source, out = (p.buffer(WIDTH, kind, of_samples=True) for kind in (torch.float32, torch.bfloat16))
    for _ in range(3):
        p.norm(source, torch.ones(WIDTH), 1e-5, out)
    begin(p, ROWS, of_samples=True)
    chance = np.random.default_rng(0)
    for run in range(RUNS):
        sign = 1.0 if run % 2 else -1.0
        put(p, source, torch.full((ROWS, WIDTH), sign))
        put(p, out, torch.zeros(ROWS, WIDTH))
        for pause_s in chance.choice(PAUSES_S, 2):
            if pause_s:
                time.sleep(pause_s)
            if announced:
                begin(p, ROWS, of_samples=True)
        p.run(0, p.num_ops)
        assert taken(p, out, ROWS).float().allclose(torch.tensor(sign), atol=0.01)


@pytest.mark.parametrize("announced", [False, True])
def test_threads_without_work_sleep(announced: bool) -> None:
    """Also those that were woken for a run that did not come."""
    before = tasks()
    p = program(LEVELS_HERE[-1], 3)
    helpers = tasks() - before
    assert len(helpers) == 2
    source, out = (p.buffer(WIDTH, kind, of_samples=True) for kind in (torch.float32, torch.bfloat16))
    p.norm(source, torch.ones(WIDTH), 1e-5, out)
    begin(p, ROWS, of_samples=True)
    p.run(0, p.num_ops)
    if announced:
        begin(p, ROWS, of_samples=True)
    looks = [0]

    def stay_asleep() -> bool:
        looks[0] = looks[0] + 1 if all(map(sleeps, helpers)) else 0
        return looks[0] == 20

    wait_until(stay_asleep, "threads without work sleep, at 20 looks in a row")
