"""A real server keeps its threads on the cores that `--cpu-pin` gives them, and refuses cores that it has not; those
that compute are as nice as `--cpu-nice` says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.base.process_use import OWN
from tests.e2e.harness import assert_refused, running_monolith
from tests.tiny import Family


def cores_of(pid: int) -> set[frozenset[int]]:
    """The different sets of cores that the threads of a process may use."""
    tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return {frozenset(os.sched_getaffinity(task)) for task in tasks}


def niceness_of(pid: int) -> set[int]:
    """Of the threads of a process."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def generate(url: str) -> Any:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    answer = requests.post(f"{url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_and_api_process_have_cores_of_their_own(tiny_checkpoint: Callable[[Family], Path]) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    path, each = str(tiny_checkpoint("llama")), ("--dtype", "bfloat16", "--max-total-tokens", "2048")
    with running_monolith(path, *each, "--cpu-pin", f"{first},{second}", "--cpu-threads", "1") as server:
        alone = generate(server.url)
        pids = {name: use["pid"] for name, use in server.state()["processes"].items()}
        assert cores_of(pids.pop(OWN)) == {frozenset({second})}, "what is left"
        assert [cores_of(pid) for pid in pids.values()] == [{frozenset({first})}]
    with running_monolith(path, *each, "--cpu-pin", f"{first},{second}", "--tp-size", "2") as server:
        assert generate(server.url) == alone
        pids = {name: use["pid"] for name, use in server.state()["processes"].items()}
        assert frozenset({first, second}) <= next(iter(cores_of(pids.pop(OWN)))), "nothing is left: anywhere"
        assert {core for pid in pids.values() for core in cores_of(pid)} == {frozenset({first}), frozenset({second})}
    with running_monolith(path, *each, "--cpu-pin", f"{second},{first}", "--cpu-threads", "2") as server:
        assert generate(server.url) == alone
        (scheduler,) = (use["pid"] for name, use in server.state()["processes"].items() if name != OWN)
        both, own = frozenset({first, second}), frozenset({second})
        assert cores_of(scheduler) <= {both, own}, "a helper of the kernels has a core of its own"
        assert both in cores_of(scheduler) and own in cores_of(scheduler)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.slow
def test_helpers_stay_apart_where_threads_take_every_core(
    tiny_checkpoint: Callable[[Family], Path], spare: int
) -> None:
    every = frozenset(os.sched_getaffinity(0))
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "2048", "--cpu-threads", str(len(every) - spare))
    with running_monolith(str(tiny_checkpoint("llama")), *flags) as server:
        (scheduler,) = (use["pid"] for name, use in server.state()["processes"].items() if name != OWN)
        helpers = {frozenset({core}) for core in sorted(every)[1:]}
        assert cores_of(scheduler) == ({every} if spare else {every, *helpers})


def test_cores_that_the_server_may_not_use_are_refused(tiny_checkpoint: Callable[[Family], Path]) -> None:
    path = str(tiny_checkpoint("llama"))
    assert_refused(path, ("--cpu-pin", str(max(os.sched_getaffinity(0)) + 1)), "cpu_pin")


def test_only_processes_that_compute_give_way(tiny_checkpoint: Callable[[Family], Path]) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    asked = min(ours + 5, 19)
    with running_monolith(str(tiny_checkpoint("llama")), "--cpu-nice", str(asked - ours), "--tp-size", "2") as server:
        pids = {name: use["pid"] for name, use in server.state()["processes"].items()}
        assert niceness_of(pids.pop(OWN)) == {ours}
        assert len(pids) == 2
        assert all(min(niceness_of(pid)) == asked for pid in pids.values())
