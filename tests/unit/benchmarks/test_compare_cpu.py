"""The comparison with peers: what it counts, and who takes part."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from benchmarks import compare_cpu
from benchmarks.peers import VLLM, Kind, Outcome
from pdserve.bench.client import BenchRecord
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path


def stream(first_s: float, step_s: float, count: int, num_tokens: int | None = None) -> BenchRecord:
    """`count` events, `step_s` apart."""
    arrivals = [first_s + step_s * index for index in range(count)]
    return BenchRecord(arrivals_s=arrivals, end_s=arrivals[-1], output_tokens=num_tokens or count)


def test_decode_is_counted_while_all_streams_run() -> None:
    early, late = stream(0.0, 0.1, 21), stream(1.0, 0.1, 21)
    assert compare_cpu.decode_rate([early, late]) == pytest.approx(20.0), "from 1.0 s to 2.0 s both bring ten a second"
    assert compare_cpu.decode_rate([early]) == pytest.approx(10.0)


def test_events_that_bring_several_tokens_count_as_these() -> None:
    halves = stream(0.0, 0.2, 11, num_tokens=21)
    assert compare_cpu.decode_rate([halves]) == pytest.approx(10.0)


def test_streams_that_never_run_together_have_no_rate() -> None:
    assert compare_cpu.decode_rate([stream(0.0, 0.1, 3), stream(5.0, 0.1, 3)]) == 0.0


def test_prompts_are_different_pieces_of_prose_whole_in_their_tokens() -> None:
    prompts = compare_cpu.load_of(3, 200, 8, seed=5).prompts()
    assert all(len(prompt) == 200 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts == compare_cpu.load_of(3, 200, 8, seed=5).prompts()
    file = resolve_tokenizer_path(resolve_model_path("smollm2")) / "tokenizer.json"
    text = Tokenizer.from_file(str(file)).decode(prompts[0])
    assert sum(map(str.isascii, text)) > 0.98 * len(text), "English, not fragments of characters"
    assert len(text.split()) > 60


def test_the_measurement_with_the_fewest_events_is_told() -> None:
    whole, halves = (
        compare_cpu.decode_metrics(Outcome([stream(0.0, 0.1, count, num_tokens=21)], 2.0, 0.0)) for count in (21, 7)
    )
    assert compare_cpu.fewest_events({("a", 1): [whole, halves], ("b", 1): [whole]}) == pytest.approx(1 / 3)


def test_a_measurement_waits_for_quiet_cores() -> None:
    busy = iter([55.0, 30.0, 2.0, 90.0])
    assert compare_cpu.wait_for_quiet(lambda _: next(busy))
    assert next(busy) == 90.0, "it looked until they were quiet, and no longer"


def test_cores_that_stay_busy_are_told() -> None:
    times = iter(range(0, 1000, 10))
    assert not compare_cpu.wait_for_quiet(lambda _: 55.0, lambda: next(times))
    assert next(times) == 40, "after some patience"
    assert compare_cpu.loud_notes(0) == [] and "2 measurements" in compare_cpu.loud_notes(2)[0]


def test_every_system_is_first_in_turn() -> None:
    names = ["a", "b", "c"]
    assert [compare_cpu.order_of(names, index)[0] for index in range(4)] == ["a", "b", "c", "a"]
    assert all(sorted(compare_cpu.order_of(names, index)) == names for index in range(4))


def test_ratios_are_of_equal_precision_and_above_1_where_ours_is_better() -> None:
    rounds = {
        (name, 4): [{"decode_tok_s": speed, "itl_p99_ms": 1000 / speed}]
        for name, speed in (("pdserve", 100.0), ("pdserve int8", 150.0), ("vllm", 50.0), ("llama q4_0", 75.0))
    }
    metrics = [one for one in compare_cpu.DECODE if one.key in ("decode_tok_s", "itl_p99_ms")]
    lines = compare_cpu.ratio_table(rounds, metrics, "streams").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["pdserve beside", "precision", "streams", "decode tok/s", "ITL p99"]
    assert rows[2:] == [["vllm", "bf16", "4", "2.00x", "2.00x"], ["llama q4_0", "4 bit", "4", "2.00x", "2.00x"]]


def test_a_table_has_every_system_and_metric() -> None:
    rounds = {("pdserve", 128): [{"prefill_tok_s": 1000.0, "ttft_ms": 128.0}] * 2}
    (row,) = compare_cpu.table(rounds, compare_cpu.PREFILL, "tokens").splitlines()[2:]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["pdserve", "bf16", "128", "1000", "128"]


def test_streams_that_never_ran_together_have_no_rate_and_no_ratio() -> None:
    rounds = {("pdserve", 64): [{"decode_tok_s": 9.0}] * 2, ("pdserve 1P1D", 64): [{"decode_tok_s": x} for x in (0, 3)]}
    for table in (compare_cpu.table, compare_cpu.ratio_table):
        last = table(rounds, compare_cpu.DECODE[:1], "streams").splitlines()[-1]
        assert [cell.strip() for cell in last.strip("|").split("|")] == ["pdserve 1P1D", "bf16", "64", "none"]


def test_who_is_not_installed_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = compare_cpu.KINDS["vllm"]
    kinds = {**compare_cpu.KINDS, "vllm": Kind(gone.precision, VLLM / "nowhere", gone.start)}
    monkeypatch.setattr(compare_cpu, "KINDS", kinds)
    with pytest.raises(SystemExit):
        compare_cpu.main(["--systems", "vllm"])
    assert "not installed: vllm" in capsys.readouterr().err
