"""The transfer benchmark: what counts as missed, tables, and tiny runs whose bytes are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_transfer as bench
from benchmarks.bench_transfer import Case, OnePage, Turns
from pdserve.transfer.transports import nixl_engine
from tests.share import rest_slow


def turns(path: float) -> Turns:
    """Two turns, in which the raw engine has 10 and 20 GB/s, and twice that with two threads."""
    return Turns(
        path=[10 * path, 20 * path], alone=[5.0, 10.0], raw=[10.0, 20.0], raw_threads=[20.0, 40.0], writing=[0.9, 1.0]
    )


def test_only_long_prompts_can_miss_the_mark() -> None:
    found = [
        (Case("shm", "tiny", "fresh", 100), turns(0.1)),
        (Case("shm", "tiny", "fresh", 1000), turns(0.95)),
        (Case("shm", "tiny", "fresh", 4000), turns(0.5)),
    ]
    assert bench.missed(found) == [Case("shm", "tiny", "fresh", 4000)]
    lines = bench.speed_table(found, 16).splitlines()
    assert len(lines) == 5 and "0.95x" in lines[3] and "0.50x" in lines[3], "path and alone, within turns"


def test_the_control_plane_is_what_the_engine_alone_does_not_take() -> None:
    assert "700" in bench.one_page_table([OnePage("shm", "tiny", alone_us=750.0, many_us=300.0, raw_us=50.0)])


@pytest.mark.parametrize("backend", rest_slow(["mooncake", "shm", "nixl"]))
def test_a_tiny_run_moves_the_bytes_and_writes(backend: str, tmp_path: Path) -> None:
    if backend == "nixl" and not nixl_engine.is_installed():
        pytest.skip("nixl is not installed; scripts/setup.sh says how")
    argv = ["--backends", backend, "--layouts", "tiny", "--tokens", "40", "--rounds", "1", "--requests", "6"]
    argv += ["--singles", "10"]
    assert bench.main([*argv, "--write", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-transfer.json")
    facts = json.loads(path.read_text())
    assert [one["pages"] for one in facts["gigabytes_per_s"]] == ["fresh", "scattered"]
    assert all(min(one["path"] + one["raw"]) > 0 for one in facts["gigabytes_per_s"])
    assert facts["one_page"][0]["alone_us"] > 0
