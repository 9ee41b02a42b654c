"""A scheduler that is told what its leader hears comes to what its leader comes to, whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.sim.network import Faults
from pdserve.sim.world import monolith_tokens
from tests.share import rest_slow
from tests.world.shadow import ShadowWorld
from tests.world.workload import workload

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "nothing": Faults(),
    "lost": Faults(lost=0.2),
    "aborts": Faults(abort=0.05, lost=0.05),
    "copies": Faults(copy_failed=0.1, abort=0.02),
    "kills": Faults(kill=0.005, lost=0.05, abort=0.01),
    "late": Faults(lands_late=True, note_lost=0.05),
}


def play(seed: int, faults: Faults) -> ShadowWorld:
    """The shadow's log raises where a plan or a page differs; the books are compared in the end."""
    shape, prompts = workload(seed)
    expected = monolith_tokens(shape, prompts)
    world = ShadowWorld(seed, shape, faults)
    for index, half in enumerate(world.run(prompts, num_rooms=6)):
        if half is not None and half.finish is not None and half.finish.type != "abort":
            assert half.tokens == expected[index]
    world.assert_alike()
    return world


@pytest.mark.parametrize("name", rest_slow(FAULTS, keep=2))
def test_a_shadow_comes_to_the_same(name: str) -> None:
    turns = aborts = kills = 0
    for seed in range(14):
        world = play(seed, FAULTS[name])
        turns += sum(node.num_turns for node in world.nodes)
        aborts, kills = aborts + world.num_aborts, kills + world.num_kills
    assert turns > 1000
    assert (aborts > 0, kills > 0) == (FAULTS[name].abort > 0, FAULTS[name].kill > 0)


@pytest.mark.slow
def test_nothing_hangs_on_the_order_of_a_set() -> None:
    """Ranks are processes with hash seeds of their own: the same world has the same log with any."""
    digests = set()
    for seed in ("0", "42"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.world.hash_seed_process"]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr
        digests.add(run.stdout.split()[-1])
    assert len(digests) == 1, digests
