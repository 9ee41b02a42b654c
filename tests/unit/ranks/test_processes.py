"""A replica of real processes, with a real model and gloo: its tokens are those of one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.share import rest_slow
from tests.tiny import Family
from tests.unit.ranks.rank_process import generate, server_config

SCRIPT = Path(__file__).with_name("rank_process.py")
ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def ranks(
    directory: Path, models: list[Path], tp_size: int, pp_size: int, *flags: str, script: Path = SCRIPT
) -> Iterator[list[subprocess.Popen[str]]]:
    """All ranks of a replica; `models` has one path for each. Those that live at the end are killed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, (script, f"file://{directory}/store", rank, model, tp_size, pp_size, *flags))],
            cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, model in enumerate(models)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its status, and what it said on stdout and stderr."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "overlap"), rest_slow([(2, 1, True), (1, 2, False), (2, 1, False), (1, 2, True)], keep=2)
)
def test_its_tokens_are_those_of_one_process(
    tp_size: int, pp_size: int, overlap: bool, tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    model = tiny_checkpoint("qwen3")
    expected = generate(server_config(str(model), 1, 1, overlap=False), None)
    assert [len(tokens) for tokens in expected.values()] == [12, 12, 6]
    with ranks(tmp_path, [model, model], tp_size, pp_size, *(["overlap"] if overlap else [])) as processes:
        outcomes = [ended(process) for process in processes]
    assert [status for status, _, _ in outcomes] == [0, 0], outcomes
    assert json.loads(outcomes[0][1]) == expected


@pytest.mark.slow
def test_all_ranks_change_their_role_or_none(tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Rank 1 cannot take the first role; the engine then goes through all roles, and has the same KV cache."""
    model = tiny_checkpoint("qwen3")
    with ranks(tmp_path, [model, model], 2, 1, script=SCRIPT.with_name("role_process.py")) as processes:
        outcomes = [ended(process) for process in processes]
    assert [status for status, _, _ in outcomes] == [0, 0], outcomes
    replies, roles, (first, last) = json.loads(outcomes[0][1])
    assert replies == [[False, "rank 1: this rank has no NIC"], [True, "ok"], [True, "ok"], [True, "ok"]]
    assert roles == ["null", "null", "prefill", "decode", "null"], "the role in which each command leaves it"
    assert first == last and len(first) == 12


def test_a_rank_that_cannot_start_ends_all_with_its_own_words(
    tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    with ranks(tmp_path, [tiny_checkpoint("qwen3"), tmp_path / "nothing"], 2, 1) as processes:
        for process in processes:
            status, out, err = ended(process)
            assert status == 2 and not out, err
            assert "nothing" in err


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all(tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint("qwen3")
    with ranks(tmp_path, [model, model], 2, 1, "wait") as (leader, follower):
        assert leader.stdout is not None and json.loads(leader.stdout.readline())
        follower.kill()
        leader.wait(60)
        status, _, err = ended(leader)
        assert status == 1 and f"pid {follower.pid}, is gone" in err, err
