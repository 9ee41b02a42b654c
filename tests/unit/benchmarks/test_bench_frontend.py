"""The front end's benchmark, small: real API process, stand-in for the scheduler, every endpoint read to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_frontend


@pytest.mark.slow
def test_every_endpoint_streams_to_its_end(tmp_path: Path) -> None:
    argv = ["--streams", "3", "--tokens", "8", "--rate", "2000", "--rounds", "1"]
    assert bench_frontend.main([*argv, "--write", "--results", str(tmp_path)]) == 0
    (facts,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-frontend.json"))
    for rounds in (facts["paced"], facts["flat_out"]):
        assert set(rounds) == {"/generate", "completions", "chat"}
        for (found,) in rounds.values():
            assert found["num_tokens"] == 24 and found["num_bytes"] > 24 and found["cpu_s"] > 0.0
