"""The part of `bench_interference` beside busy processes: they run and end, and rounds are compared with each other."""

from __future__ import annotations

import psutil

from benchmarks import bench_interference, foreign
from benchmarks.foreign import PAIR_EQUAL, BesideForeign
from benchmarks.servers import read_local_ready


def test_busy_processes_run_until_the_block_ends() -> None:
    before = set(psutil.Process().children())
    with foreign.busy_processes(2):
        busy = set(psutil.Process().children()) - before
        assert len(busy) == 2 and all(one.is_running() for one in busy)
    assert not any(one.is_running() for one in busy)


def test_pairs_are_compared_within_a_round() -> None:
    one = BesideForeign.of("1P1D", [0.3, 0.1, 0.2], [0.5, 0.7], [0.02] * 50 + [0.04], 2.0)
    assert (one.idle_ttft_ms, one.ttft_ms, one.stream_tok_s) == (200.0, 600.0, 25.5)
    found = [
        BesideForeign("1P1D", 200.0, 600.0, 20.0, 100.0),
        BesideForeign(PAIR_EQUAL, 100.0, 400.0, 40.0, 80.0),
        BesideForeign("1P1D", 600.0, 500.0, 20.0, 100.0),
        BesideForeign(PAIR_EQUAL, 500.0, 250.0, 10.0, 100.0),
    ]
    *_, ratio = foreign.table(found, "1P1D").splitlines()
    cells = [cell.strip() for cell in ratio.strip("|").split("|")]
    assert cells[:3] == [f"1P1D / {PAIR_EQUAL}", "1.60x (1.20-2.00)", "1.75x (1.50-2.00)"]
    assert foreign.section([], "1P1D", 0) == "" and "2 busy processes" in foreign.section(found, "1P1D", 2)
    assert foreign.facts(found)[0]["ttft_ms"] == 600.0


def test_it_is_off_unless_asked_for() -> None:
    assert bench_interference.parse_flags([]).foreign == 0
    assert bench_interference.parse_flags(["--foreign", "2"]).foreign == 2


def test_the_url_is_in_the_last_line_of_the_start() -> None:
    ready = read_local_ready("ready: OPENAI_BASE_URL=http://127.0.0.1:5/v1 OPENAI_API_KEY=none")
    assert ready is not None and ready.url == "http://127.0.0.1:5"
    assert read_local_ready("router     http://127.0.0.1:5  pid 7") is None
