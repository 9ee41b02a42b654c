"""`pdserve bench` from its command line against a made-up service: results, sweeps, comparison, search, mistakes."""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdserve.bench import flags
from pdserve.bench.campaign import BenchPlan, BenchService, Campaign, LoadPoint, wait_serving
from pdserve.bench.client import BenchClient, BenchRecord, BenchTarget
from pdserve.bench.load import run_load, single
from pdserve.bench.metrics import METRICS, Slo
from pdserve.cli import bench
from pdserve.errors import ConfigError
from tests.unit.bench.kit import FakeService, Json, SteppedClock, event, piece, plain, serving, usage

KINDS = ("mean", "median", "p90", "p95", "p99")


def parsed(*words: str) -> argparse.Namespace:
    args = bench.make_parser().parse_args(words)
    flags.check(args)
    return args


async def run(service: FakeService, *words: str) -> Json:
    small = ("--random-input-len", "7", "--random-output-len", "3")
    args = parsed("--base-url", service.url, *(small if "--dataset-name" not in words else ()), *words)
    bench.check_outputs(args)
    report = await bench.run(args)
    bench.show(args, report)
    bench.save(args, report)
    return report


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_a_run_has_the_fields_of_vllm(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as service:
        out = tmp_path / "deep" / "out.json"
        words = ["--endpoint", endpoint, "--num-prompts", "5", "--max-concurrency", "2", "--api-key", "secret-7"]
        words += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "each"), "--output-json", str(out)]
        await run(service, *words, "--goodput", "ttft:60000", "--metadata", "build=x")
        assert len(service.bodies) == 6 and set(service.paths) == {endpoint}, "one of them warms up"
    (result,) = json.loads(out.read_text())["results"]
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (5, 0, 15)
    assert result["total_input_tokens"] == 35
    assert (result["request_rate"], result["max_concurrency"], result["build"]) == ("inf", 2, "x")
    assert result["model_id"] == "tiny" and result["goodput_share"] == 1.0
    for name in ("ttft", "ttst", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p95", "p99")} <= set(result)
    (file,) = (tmp_path / "each").iterdir()
    assert json.loads(file.read_text()) == result and len(result["ttfts"]) == 5
    text = capsys.readouterr().out
    assert "Successful requests:                      5" in text and "P99 ITL (ms):" in text
    assert "secret-7" not in text + out.read_text()


async def test_a_password_in_the_address_is_in_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as one, serving(FakeService(plain)) as other:
        for service in (one, other):
            service.url = service.url.replace("http://", "http://user:secret-9@")
        out = tmp_path / "out.json"
        words = ["--compare", other.url, "--num-prompts", "1", "--output-json", str(out)]
        await run(one, *words, "--output-html", str(tmp_path / "out.html"))
        assert len(one.bodies) == len(other.bodies) == 2
        with pytest.raises(ConfigError) as raised:
            parsed("--base-url", "ftp://user:secret-9@a")
    told = capsys.readouterr()
    written = out.read_text() + (tmp_path / "out.html").read_text()
    assert "127.0.0.1" in written and "secret-9" not in written + told.out + told.err + str(raised.value)


async def test_warm_ups_are_single_requests() -> None:
    async with serving(FakeService(plain)) as service:
        words = ["--dataset-name", "conversations", "--conversation-turns", "4", "--num-prompts", "4"]
        await run(service, *words, "--num-warmups", "2", "--random-input-len", "4", "--random-output-len", "2")
        assert len(service.bodies) == 2 + 4


async def test_a_sweep_has_a_run_for_each_rate_and_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as service:
        words = [
            "--num-prompts",
            "3",
            "--num-warmups",
            "0",
            "--request-rate",
            "500",
            "inf",
            "--max-concurrency",
            "1",
            "4",
        ]
        report = await run(service, *words)
        sent = [json.dumps(body["prompt"]) for body in service.bodies]
    loads = [(result["request_rate"], result["max_concurrency"]) for result in report["results"]]
    assert loads == [(500, 1), (500, 4), ("inf", 1), ("inf", 4)]
    assert len(set(sent)) == 12, "no run finds the prompts of another one in a cache"
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["service"] + ["openai"] * 4 + ["Latencies"]


async def test_two_services_get_the_same_requests_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as one, serving(FakeService(plain)) as other:
        words = [
            "--compare",
            other.url,
            "--label",
            "pair",
            "--num-rounds",
            "3",
            "--num-prompts",
            "2",
            "--num-warmups",
            "0",
        ]
        report = await run(one, *words)
        host = other.url.partition("://")[2]
    order = [(result["label"], result["round"]) for result in report["results"]]
    assert order == [("pair", 0), (host, 0), (host, 1), ("pair", 1), ("pair", 2), (host, 2)]
    assert f"{host} / pair:" in capsys.readouterr().out
    sent = [sorted(json.dumps(body["prompt"]) for body in service.bodies) for service in (one, other)]
    assert sent[0] == sent[1] and len(set(sent[0])) == 6


async def test_a_conversation_has_the_answers_before_its_next_turn() -> None:
    async with serving(FakeService(plain)) as service:
        words = [
            "--dataset-name",
            "conversations",
            "--conversation-turns",
            "3",
            "--num-prompts",
            "3",
            "--num-warmups",
            "0",
        ]
        words += ["--random-input-len", "4", "--random-output-len", "2", "--random-prefix-len", "2"]
        await run(service, *words, "--endpoint", "/v1/chat/completions")
        roles = [[message["role"] for message in body["messages"]] for body in service.bodies]
        last = service.bodies[-1]["messages"]
        service.bodies.clear()
        await run(service, *words)
    assert roles[0] == ["system", "user"] and roles[2] == ["system", *["user", "assistant"] * 2, "user"]
    assert [message["content"] for message in last if message["role"] == "assistant"] == [" w0 w1"] * 2
    texts = [body["prompt"] for body in service.bodies]
    assert texts[1].startswith(texts[0] + "  w0 w1 ")


def scripted(clock: SteppedClock, per_token_s: float) -> Any:
    def answer(body: Json, path: str) -> list[tuple[float, bytes]]:
        return [(per_token_s, piece(" a")), (0.0, usage(1, 1))]

    return FakeService(answer, clock)


async def test_a_request_waits_for_its_time_and_for_its_place() -> None:
    clock = SteppedClock()
    async with serving(scripted(clock, 0.5)) as service:
        async with BenchClient(BenchTarget(base_url=service.url), clock) as client:
            outcome = await run_load(
                client, single([[1], [2]], 1), arrivals_s=[2.0, 2.0], max_concurrency=1, clock=clock, sleep=clock.sleep
            )
    assert min(record.start_s for record in outcome.records) >= 2.0
    assert [record.ttft_s for record in outcome.records] == pytest.approx([0.5, 0.5]), "not the time in the queue"


async def test_the_search_ends_at_the_highest_rate_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    async def measured(self: Campaign, service: Any, point: LoadPoint, round_index: int, seed: int) -> Json:
        rates.append(point.rate)
        share = 1.0 if point.rate <= limit else 0.5
        return {"request_rate": point.rate, "goodput_share": share, "max_concurrent_requests": in_flight}

    monkeypatch.setattr(Campaign, "_run_one", measured)
    in_flight = 2
    client = BenchClient(BenchTarget(base_url="http://a"))
    plan = BenchPlan(sessions=lambda seed, point: [], slo=Slo.parse(["ttft:1"]))
    campaign = Campaign(plan, [service := BenchService(label="x", client=client)])
    for limit, first in ((5.3, 1.0), (0.4, 8.0), (5.3, 5.0)):
        rates.clear()
        best, results = await campaign.search(service, first, LoadPoint())
        assert limit / 1.12 < best["max_rate_within_slo"] <= limit < best["lowest_rate_beyond_slo"], rates
        assert len(results) == len(rates) <= 12
    for all_or_none, expected in ((math.inf, 2048.0), (0.0, None)):
        limit = all_or_none
        best, results = await campaign.search(service, 1.0, LoadPoint())
        assert best["max_rate_within_slo"] == expected and len(results) == 12
    in_flight = 1
    best, results = await campaign.search(service, 1.0, LoadPoint())
    assert best["max_rate_within_slo"] is None and len(results) == 1, "a lower rate is no better"


async def test_a_search_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as service:
        words = ["--num-prompts", "2", "--goodput", "ttft:0.0001", "--search-goodput", "--request-rate", "4000"]
        report = await run(service, *words)
    assert report["goodput_search"][0]["max_rate_within_slo"] is None
    assert "the highest rate that keeps 90% within the limits: no rate, down to " in capsys.readouterr().out


async def test_a_failed_warm_up_says_why() -> None:
    def answer(body: Json, path: str) -> list[tuple[float, bytes]]:
        return [(0.0, event({"error": {"message": "no such model"}}))]

    async with serving(FakeService(answer)) as service:
        with pytest.raises(ConfigError, match="the warm-up failed: error_event: no such model"):
            await run(service, "--num-prompts", "1")


async def test_a_service_that_is_starting_is_waited_for() -> None:
    refused = [web.json_response({"error": {"message": "starting"}}, status=503) for _ in range(2)]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with serving(FakeService(lambda body, path: refused.pop() if refused else plain(body, path))) as service:
        async with BenchClient(BenchTarget(base_url=service.url, model="tiny")) as client:
            await wait_serving(client, 60.0, sleep)
            assert len(service.bodies) == 3 and len(slept) == 2
            refused.append(web.json_response({}, status=400))
            await wait_serving(client, 60.0, sleep)
            refused.append(web.json_response({}, status=503))
            await wait_serving(client, 0.0, sleep)
            assert len(service.bodies) == 5 and len(slept) == 2, "another error, and no time left"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--num-prompts 0", "num_prompts"),
        ("--request-rate 1 0", "request_rate"),
        ("--request-rate nan", "request_rate"),
        ("--max-concurrency 0", "max_concurrency"),
        ("--burstiness 0", "burstiness"),
        ("--random-range-ratio 1", "random_range_ratio"),
        ("--dataset-name mooncake", "dataset_path"),
        ("--dataset-path x", "dataset_path"),
        ("--search-goodput", "search_goodput"),
        ("--goodput itl:3", "goodput"),
        ("--metric-percentiles 50,x", "metric_percentiles"),
        ("--percentile-metrics ttft,foo", "percentile_metrics"),
        ("--base-url localhost:8000", "base_url"),
        ("--base-url http://", "base_url"),
        ("--base-url http://a:99999", "base_url"),
        ("--endpoint v1/completions", "endpoint"),
        ("--compare ftp://a", "compare"),
        ("--metadata x", "metadata"),
        ("--goodput-target 0", "goodput_target"),
        ("--vocab-size 10", "vocab_size"),
        ("--num-warmups -1", "num_warmups"),
        ("--goodput ttft:1 --search-goodput --request-rate 1 2", "search_goodput"),
        ("--goodput ttft:1 --search-goodput --num-rounds 2", "search_goodput"),
        ("--result-dir x", "result_dir"),
        ("--compare-label b", "compare_label"),
        ("--compare http://a --label b --compare-label b", "compare_label"),
        ("--compare http://127.0.0.1:8000", "compare_label"),
    ],
)
def test_a_wrong_flag_is_named(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(*words.split())
    assert raised.value.field == field and f"--{field.replace('_', '-')}" in str(raised.value)


async def test_a_file_with_times_has_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5000 + 10 * index, "input_length": 20, "output_length": 3} for index in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset-name", "mooncake", "--dataset-path", str(path)]
    async with serving(FakeService(plain)) as service:
        report = await run(service, *words)
        for more, field in (
            (["--request-rate", "3"], "request_rate"),
            (["--goodput", "ttft:9", "--search-goodput"], "search_goodput"),
        ):
            with pytest.raises(ConfigError, match="times of its own") as raised:
                await run(service, *words, *more)
            assert raised.value.field == field
    assert report["results"][0]["request_rate"] == "trace" and report["results"][0]["completed"] == 3


def test_files_that_cannot_be_written_are_told_before_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flag, path in (("--output-json", tmp_path), ("--output-html", tmp_path / "file" / "a.html")):
        with pytest.raises(ConfigError, match=f"{flag} .*cannot be written"):
            bench.main(["--base-url", "http://127.0.0.1:9", flag, str(path)])


def test_an_interrupted_sweep_shows_and_keeps_the_runs_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    async def interrupted(args: argparse.Namespace, progress: bench.BarProgress) -> Json:
        progress.begin("a run", 1)
        progress.end(ended)
        progress.begin("another run", 1)
        raise KeyboardInterrupt

    ended: Json = {"label": "a", "request_rate": 1.0, "completed": 1, "failed": 0, "error_kinds": {}}
    ended |= {"duration": 2.0, "output_throughput": 3.0}
    ended |= {"error_messages": [], **{f"{kind}_{name}_ms": 1.0 for name in METRICS for kind in KINDS}}
    monkeypatch.setattr(bench, "run", interrupted)
    assert bench.main(["--output-json", str(out)]) == bench.INTERRUPTED
    assert json.loads(out.read_text())["results"] == [ended]
    shown = capsys.readouterr()
    assert "Successful requests:                      1" in shown.out
    assert "a run: 1 answers, 0 failed, 2.0 s, 3.0 tok/s" in shown.err


def test_flags_that_meet_in_the_request_are_checked_too() -> None:
    for words, field in (
        ("--extra-body [1]", "extra_body"),
        ("--extra-body {", "extra_body"),
        ("--header x", "header"),
    ):
        args = parsed(*words.split())
        with pytest.raises(ConfigError) as raised:
            flags.target_of(args, args.base_url)
        assert raised.value.field == field
    with pytest.raises(ConfigError, match="--prompt-type must be text for chat"):
        flags.maker_of(parsed("--prompt-type", "ids"), "openai-chat")
    with pytest.raises(ConfigError, match="--tokenizer"):
        flags.maker_of(parsed("--tokenizer", "/no/such/model"), "openai")


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests, tokens a second and failures; it is closed also after an interrupted run."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = bench.BarProgress(disabled=False)
    progress.begin("rate 2", 3)
    for record in (BenchRecord(output_tokens=5), BenchRecord(error_kind="timeout"), BenchRecord(output_tokens=5)):
        progress.done(record)
    progress.end({"completed": 2, "failed": 1})
    progress.begin("rate 4", 2)
    progress.done(BenchRecord(output_tokens=5))
    progress.end(None)
    shown = terminal.getvalue()
    assert progress.results == [{"completed": 2, "failed": 1}], "the second run was interrupted"
    first, second = shown.rindex("rate 2"), shown.rindex("rate 4")
    assert "100%" in shown[first:second] and "3/3" in shown[first:second] and "req" in shown[first:second]
    assert "tok/s, 1 failed" in shown[first:second] and "1/2" in shown[second:] and "failed" not in shown[second:]
    assert "answers" not in shown, "a bar instead of lines"
    for disabled in (True, False):
        plain_text = io.StringIO()
        monkeypatch.setattr("sys.stderr", Terminal() if disabled else plain_text)
        quiet = bench.BarProgress(disabled=disabled)
        quiet.begin("rate 2", 1)
        quiet.done(BenchRecord(output_tokens=5))
        quiet.end({"completed": 1, "failed": 0, "duration": 2.0, "output_throughput": 2.5})
        line = "" if disabled else "rate 2: 1 answers, 0 failed, 2.0 s, 2.5 tok/s\n"
        assert plain_text.getvalue() == line
