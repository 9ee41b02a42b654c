"""Benchmarks that load real servers: what is counted, the flags of each variant, tables; and tiny runs (slow)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from benchmarks import answers, bench_interference, bench_overcommit, bench_overlap_serving, first_token, report
from benchmarks import interference_report as interference
from benchmarks.answers import Answer
from benchmarks.bench_interference import Part
from benchmarks.first_token import FirstToken
from tests.tiny import VOCAB_SIZE, Family


def answer(sent_s: float, *came_s: float, output_ids: Sequence[int] = ()) -> Answer:
    return Answer(sent_s, list(came_s), list(output_ids))


def test_gaps_count_within_the_time_that_prompts_are_sent_in() -> None:
    streams = [answer(0.0, 1.0, 2.0, 4.0, 7.0, 11.0), answer(0.0, 1.5, 3.0, 6.0, 9.0)]
    part = Part(streams, [], 1.5, 9.0)
    assert sorted(part.gaps_s()) == [1.5, 2.0, 3.0, 3.0, 3.0], (
        "the gap that began before and the one that ended after: no"
    )
    assert part.metrics()["ttft_p50_ms"] is None and part.metrics()["itl_max_ms"] == 3000.0
    prompts = [answer(1.5, 2.0, 8.0), answer(8.0, 9.5, 10.0)]
    found = Part(streams, prompts, 1.5, 9.0).metrics()
    assert (found["ttft_p50_ms"], found["ttft_max_ms"]) == (1000.0, 1500.0), "the last one counts too, without a gap"
    assert (found["num_prompts"], found["num_prompts_through"], found["num_gaps"]) == (2, 1, 5)
    assert found["stream_tok_s"] == 5 / 7.5
    with pytest.raises(RuntimeError, match="no prompt was through"):
        Part(streams, prompts[1:], 1.5, 9.0).metrics()


def test_a_stream_that_is_over_is_an_error() -> None:
    async def check(*streams: Coroutine[None, None, None]) -> None:
        tasks = [asyncio.create_task(stream) for stream in streams]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        try:
            bench_interference.check_all_run(tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def fail() -> None:
        raise RuntimeError("status 500")

    with pytest.raises(RuntimeError, match="raise --output-len"):
        asyncio.run(check(asyncio.sleep(0), asyncio.Event().wait()))
    with pytest.raises(RuntimeError, match="status 500"):
        asyncio.run(check(fail(), asyncio.Event().wait()))


def test_answers_are_equal_as_far_as_both_came() -> None:
    ours = [answer(0.0, output_ids=ids) for ids in ([1, 2, 3], [1, 2], [1, 9, 3])]
    theirs = [answer(0.0, output_ids=ids) for ids in ([1, 2], [1, 2, 3], [1, 2])]
    assert answers.equal_tokens(ours, theirs) == [True, True, False]
    found = interference.Found.of(["monolith", "1P1D"], ["monolith"], ["1P1D"])
    found.streams["1P1D"] += ours
    found.streams["monolith"] += theirs
    assert [(one.system, one.num, one.of) for one in found.equal()] == [("monolith", 2, 3)]
    with pytest.raises(ValueError, match="no tokens"):
        answers.equal_tokens([answer(0.0)], theirs[:1])


def metrics(itl: float, ttft: float | None) -> dict[str, float | None]:
    return {name: ttft if name.startswith("ttft") else itl for name, _, _ in interference.METRICS}


def test_interference_tables_compare_within_a_round() -> None:
    rounds: interference.Rounds = {
        ("monolith", False): [metrics(1.0, None)],
        ("1P1D", False): [metrics(2.0, None)],
        ("monolith", True): [metrics(8.0, 10.0)],
        ("monolith, chunks of 64", True): [metrics(2.0, 60.0)],
        ("1P1D", True): [metrics(4.0, 30.0)],
    }
    lines = interference.ratio_table(rounds).splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert found == [
        ["monolith: with prompts / alone", *["8.00x"] * 4, "", ""],
        ["1P1D: with prompts / alone", *["2.00x"] * 4, "", ""],
        ["with prompts: 1P1D / monolith", *["0.50x"] * 4, "3.00x", "3.00x"],
        ["with prompts: 1P1D / monolith, chunks of 64", *["2.00x"] * 4, "0.50x", "0.50x"],
    ]
    assert interference.absolute_table(rounds).count("\n") == 6


def test_the_best_chunk_is_named_and_whether_smaller_ones_were_tried() -> None:
    found = {0: (90.0, 10.0), 64: (40.0, 20.0), 32: (20.0, 40.0), 16: (30.0, 80.0)}
    rounds: interference.Rounds = {
        (interference.monolith_name(chunk), True): [metrics(*both)] for chunk, both in found.items()
    }
    rounds[interference.PAIR, True] = [metrics(25.0, 30.0)]
    text = interference.best_chunk(rounds, list(found))
    assert "for the streams: monolith, chunks of 32: 20.0 ms, prompts' TTFT 40 ms." in text, "16 is worse, 64 too"
    assert "no longer than 1P1D's: monolith, chunks of 64: 40.0 ms" in text
    assert "chunks of 32: 20.0 ms, prompts' TTFT 40 ms; no smaller" in interference.best_chunk(rounds, [64, 32])
    assert "no longer than 1P1D's: none." in interference.best_chunk(rounds, [32])


def test_parts_of_the_first_token_add_up_to_what_the_client_waited() -> None:
    told = {"queue_s": 0.25, "bootstrap_s": None, "prefill_s": 1.0, "first_decode_step_s": 0.5, "kv_bytes": 7}
    alone = FirstToken(1.5, first_token.parts_of(1.5, told))
    assert alone.parts_s == {"HTTP, router": 0.25, "bootstrap": 0.0, "queue": 0.25, "prefill": 1.0, "transfer": 0.0}
    pair = FirstToken(4.0, first_token.parts_of(4.0, told | {"bootstrap_s": 0.5, "transfer_s": 2.0}))
    assert sum(pair.parts_s.values()) == pair.ttft_s
    found = {"1P1D": [pair], "monolith": [alone, alone]}
    *_, row, difference = first_token.table(found, [("1P1D", "monolith")]).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "monolith", "2", "1500", "1500.0", "250.0", "0.0", "250.0", "1000.0", "0.0"
    ]  # fmt: skip
    assert [cell.strip() for cell in difference.strip("|").split("|")] == [
        "1P1D - monolith", "", "", "+2500.0", "+0.0", "+500.0", "+0.0", "+0.0", "+2000.0"
    ]  # fmt: skip


def test_the_small_pool_is_a_third_of_what_all_need() -> None:
    args = bench_overcommit.parse_flags(["--requests", "10", "--input-len", "40", "--output-len", "60"])
    assert bench_overcommit.tokens_of_all(args) == 10 * 112, "whole pages"

    def pool(variant: str) -> int:
        flags = bench_overcommit.flags_of(args, "monolith", variant)
        return int(flags[flags.index("--max-total-tokens") + 1])

    assert [pool(variant) for variant in bench_overcommit.VARIANTS] == [1120, 384, 384]
    for system, reserved in (("monolith", False), ("1P1D", True)):
        flags = bench_overcommit.flags_of(args, system, "offload")
        assert bench_overcommit.OFFLOAD in flags and ("--num-reserved-decode-tokens" in flags) is reserved


def test_every_error_counts() -> None:
    good = {"errors": 0.0, "audit": 0.0}
    assert bench_overcommit.num_errors({("monolith", "enough"): [good], ("1P1D", "offload"): [good]}) == 0
    assert bench_overcommit.num_errors({("monolith", "enough"): [good, good | {"audit": 2.0}]}) == 2


def test_a_busy_machine_is_named() -> None:
    assert "quiet before" in report.busy_note(0.3) and "repeat" in report.busy_note(0.3, 4.0)


@pytest.mark.slow
def test_tiny_runs_of_all_three_write(tiny_checkpoint: Callable[[Family], Path], tmp_path: Path) -> None:
    model = ["--model", str(tiny_checkpoint("llama")), "--vocab-size", str(VOCAB_SIZE)]
    common = [*model, "--rounds", "1", "--write", "--results", str(tmp_path)]
    short = ["--prompts", "ids", "--streams", "2", "--prompt-len", "40", "--lead", "0", "--seconds", "0.4"]
    streams = ["--output-len", "4000", "--idle-prompts", "1", "--foreign", "1"]
    assert bench_interference.main([*common, *short, *streams, "--chunks", "0", "16"]) == 0
    assert bench_overcommit.main([*common, "--requests", "6", "--input-len", "16", "--output-len", "24"]) == 0
    assert bench_overlap_serving.main([*common, "--streams", "2", "--input-len", "8", "--output-len", "16"]) == 0
    (path,) = tmp_path.glob("*-overcommit.json")
    found = {(entry["system"], entry["variant"]): entry["rounds"] for entry in json.loads(path.read_text())["rounds"]}
    assert all(one["errors"] == one["audit"] == 0 for rounds in found.values() for one in rounds)
    assert len(list(tmp_path.glob("*.md"))) == 3
