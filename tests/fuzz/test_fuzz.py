"""A small share of what `python -m tests.fuzz` plays, in the default tests; more of it with the slow ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import files, frames, guided, http, snapshots
from tests.fuzz.watch import Growth, LoopWatch

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What is refused is logged, which takes longer than to refuse it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=SLOW)])
def test_no_control_frame_breaks_a_manager_or_grows_it(count: int) -> None:
    report = frames.run(count, seed=1)
    assert report.num_frames == count
    assert report.num_taken > count / 10 and report.num_refused > count / 10, str(report)
    for name in ("handshakes_refused", "hellos_refused", "peers_lost", "transfers_done"):
        assert report.counters[name], str(report)


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=SLOW)])
async def test_no_body_is_a_server_error_or_holds_up_the_event_loop(count: int) -> None:
    report = await http.run(count, seed=1)
    assert report.num_bodies == count
    assert report.statuses[200] and report.statuses[400], str(report)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=SLOW)])
async def test_no_snapshot_is_a_server_error(count: int) -> None:
    statuses = await snapshots.run(count, seed=1)
    assert statuses.total() == count
    assert statuses[200] and statuses[400], str(statuses)


@pytest.mark.parametrize("count", [pytest.param(3000, marks=SLOW)])
def test_no_checkpoint_is_more_than_an_error(count: int, tmp_path: Path) -> None:
    report = files.run(tmp_path, count, seed=1)
    assert report.num_files == count
    assert not report.failures, "\n".join([str(report), *report.failures])
    assert all(report.outcomes[f"{kind} ModelError"] for kind in files.KINDS), str(report)


def test_no_config_is_more_than_an_error() -> None:
    import json
    import random

    from pdserve.errors import ModelError
    from pdserve.model.config import spec_from_config
    from tests.unit.model.test_config import BASE

    rng, refused = random.Random(1), 0
    for _ in range(500):
        config = files.change_config(dict(BASE), rng)
        try:
            json.dumps(spec_from_config(config, {}, where="fuzz").digest())
        except ModelError:
            refused += 1
    assert 100 < refused < 500


async def test_a_loop_that_stands_still_is_seen_even_when_the_watch_has_no_turn_after() -> None:
    async with LoopWatch() as watch:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
    assert watch.worst_s > 0.03


def test_growth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((100.0, 105.0, 111.0))
    monkeypatch.setattr("tests.fuzz.watch.rss_mb", lambda: next(sizes))
    growth = Growth(10.0, warm_up=2)
    for _ in range(5):
        growth.look()
    with pytest.raises(AssertionError, match="11 MiB after 6 inputs"):
        growth.look()


def test_guided_targets_time_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without atheris: the targets are called with their own first inputs."""
    with guided.frames(1) as (one, first):
        for data in first[::20]:
            one(data)
    with guided.http(1) as (one, first):
        for data in first:
            one(data)
    with guided.files(1) as (one, first):
        for data in first:
            one(data)
    monkeypatch.setattr(frames, "MAX_HANDLE_S", -1.0)
    monkeypatch.setattr(http, "MAX_STALL_S", -1.0)
    monkeypatch.setattr(files, "MAX_CASE_S", -1.0)
    with guided.frames(1) as (one, first), pytest.raises(AssertionError, match="for one frame"):
        one(first[0])
    with guided.http(1) as (one, first), pytest.raises(AssertionError, match="stood still"):
        one(first[0])
    with guided.files(1) as (one, first), pytest.raises(AssertionError, match="for one file"):
        one(first[0])


def test_guided_files_are_read_by_their_headers(tmp_path: Path) -> None:
    from pdserve.errors import ModelError

    files.make_sound(tmp_path / "sound")
    for kind in files.KINDS:
        header = files.sound_header(tmp_path, kind)
        assert len(header) < guided.MAX_INPUT
        files.read_case(files.with_header(tmp_path, kind, header), kind)
        with pytest.raises(ModelError):
            files.read_case(files.with_header(tmp_path, kind, header[: len(header) // 2]), kind)
