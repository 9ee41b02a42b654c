"""A server of the fork server is as one of a new interpreter. One pair is started as users start it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import harness
from tests.e2e.harness import Server, assert_idle, ranks_of, running, running_pair, start_server
from tests.tiny import Family

FLAGS = ("--max-total-tokens", "2048", "--tp-size", "2")


@pytest.fixture
def server(tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    if harness.fork_server is None:
        pytest.skip("servers are new interpreters here")
    monkeypatch.setenv("PDSERVE_API_KEY", "a-key")
    started = start_server(str(tiny_checkpoint("llama")), "null", *FLAGS)
    started.headers = {"Authorization": "Bearer a-key"}
    with running(started):
        yield started


def test_parent_group_command_line_environment_and_ranks_are_as_after_an_exec(server: Server) -> None:
    process = psutil.Process(server.child.pid)
    assert process.ppid() == os.getpid() and os.getpgid(process.pid) == process.pid
    assert process.cmdline()[:3] == [sys.executable, "-m", "pdserve.launch_server"]
    assert server.state()["disaggregation_mode"] == "null", "it has the key of the environment"
    ranks = ranks_of(server)
    assert [rank.ppid() for rank in ranks] == [process.pid] * 2
    told = {use["pid"] for name, use in server.state()["processes"].items()}
    assert told == {process.pid, *(rank.pid for rank in ranks)}
    server.child.ask_to_end()
    assert server.child.wait_exit(30.0) and server.child.end(1.0) == 0
    assert not any(rank.is_running() for rank in ranks)


def test_its_ranks_end_with_it(server: Server) -> None:
    ranks = ranks_of(server)
    assert len(ranks) == 2
    server.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30.0)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []
    assert server.child.end(1.0) == -signal.SIGKILL


@pytest.mark.slow
def test_a_pair_of_new_interpreters_answers(
    tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users start it: the imports of every process run, and ranks are new interpreters, too."""
    body = {"input_ids": list(range(7, 60)), "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    model, answers = str(tiny_checkpoint("llama")), []
    for fork_server in (harness.fork_server, None):
        monkeypatch.setattr(harness, "fork_server", fork_server)
        with running_pair(model, "--dtype", "float32", "--max-total-tokens", "2048", prefill_flags=FLAGS[2:]) as pair:
            answers.append(pair.generate(**body)["output_ids"])
            assert len(ranks_of(pair.prefill)) == 2
            assert_idle(*pair.workers)
    assert len(answers[0]) == 8 and answers[0] == answers[1]
