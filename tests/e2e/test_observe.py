"""One real pair that tells everything: one trace through all of it, KV that agrees on both sides, metrics, health."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.observe.compare_kv import compare, read_lines
from tests.e2e.harness import (
    Pair,
    assert_idle,
    running,
    running_monolith,
    running_pair,
    start_router,
    start_server,
    until,
)
from tests.tiny import Family, make_tiny
from tests.unit.observe.collector import Collector, Seen, assert_one_connected_trace

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPANS = {
    "router.request",
    "router.prefill",
    "router.decode",
    "prefill.request",
    "prefill.intake",
    "prefill.bootstrap",
    "prefill.queue",
    "prefill.compute",
    "prefill.chunk",
    "prefill.transfer",
    "decode.request",
    "decode.intake",
    "decode.bootstrap",
    "decode.transfer",
    "decode.generate",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Callable[[Family], Path], collector: Collector, logs: Path) -> Iterator[Pair]:
    """With everything on that can be."""
    model = str(tiny_checkpoint("llama"))
    trace = ("--enable-trace", "--otlp-traces-endpoint", collector.endpoint)
    flags = [*trace, "--dtype", "float32", "--chunked-prefill-size", "32", "--max-total-tokens", "2048"]
    flags += ["--log-kv-target", str(logs), "--disaggregation-enable-kv-checksum"]
    flags += ["--log-requests", "--log-requests-target", str(logs)]
    prefill = start_server(model, "prefill", *flags)
    decode = start_server(model, "decode", *flags, "--disaggregation-heartbeat-interval-s", "0.5")
    with running(prefill, decode):
        router = start_router([prefill], [decode], *trace)
        with running(router):
            yield Pair(prefill, decode, router)


def ask(pair: Pair, num_tokens: int = 100, **headers: str) -> None:
    body = {"input_ids": list(range(2, 2 + num_tokens)), "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    answer = requests.post(f"{pair.url}/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["output_ids"]) == 4


def test_one_request_is_one_connected_trace(pair: Pair, collector: Collector) -> None:
    ask(pair, traceparent=f"00-{TRACE}-{CLIENT}-01")

    def mine(spans: list[Seen]) -> list[Seen]:
        return [span for span in spans if span.trace == TRACE]

    spans = mine(collector.wait(lambda spans: {span.name for span in mine(spans)} >= SPANS))
    assert_one_connected_trace(spans, TRACE, CLIENT)
    assert {span.name for span in spans} == SPANS
    chunks = sorted((span for span in spans if span.name == "prefill.chunk"), key=lambda span: span.start)
    assert [span.attributes["pdserve.tokens_computed"] for span in chunks] == [32, 64, 96, 100]
    by_name = {span.name: span for span in spans}
    assert by_name["prefill.request"].parent == by_name["router.prefill"].span
    assert by_name["decode.request"].parent == by_name["router.decode"].span
    assert by_name["prefill.transfer"].attributes["pdserve.kv_bytes"] > 0


def test_what_decode_got_is_what_prefill_sent(pair: Pair, logs: Path) -> None:
    for num_tokens in (1, 16, 17, 70):
        ask(pair, num_tokens)
    until(lambda: compare(read_lines([logs])).num_equal >= 4, 20, "both sides' lines")
    report = compare(read_lines([logs]))
    assert report.differences == ()
    ended = [line for line in read_lines([logs]) if line["event"] == "request.finished"]
    assert ended and all(sum(line["ttft_parts"].values()) == pytest.approx(line["ttft_s"]) for line in ended)


def test_submissions_and_decode_steps_of_a_request_are_found_by_its_id(pair: Pair, logs: Path) -> None:
    ask(pair, 40, **{"X-Request-Id": "traced-1"})

    def found() -> tuple[list[Any], list[Any], list[Any]]:
        lines = list(read_lines([logs]))
        sent = [line for line in lines if line["event"] == "kv.sent" and line["request_id"] == "traced-1"]
        keys = {line["key"] for line in sent}
        copies = [line for line in lines if line["event"] == "kv.submission" and line["key"] in keys]
        steps = [line for line in lines if line["event"] == "decode.step"]
        return sent, copies, [row for step in steps for row in step["rows"] if row["request_id"] == "traced-1"]

    until(lambda: all(found()) and found()[2][-1]["finish_reason"], 20, "the lines of both sides")
    sent, copies, rows = found()
    assert len(sent) == 1
    assert sum(line["bytes"] for line in copies) >= sent[0]["bytes"]
    assert all(line["error"] is None and line["latency_s"] >= 0 and line["num_buffers"] for line in copies)
    assert [row["position"] for row in rows] == [40, 41, 42]
    assert [row["last_token"] for row in rows[1:]] == [row["next_token"] for row in rows[:-1]]
    assert [row["finish_reason"] for row in rows] == [None, None, "length"]
    assert len({row["kv_index"] for row in rows}) == 3


def test_all_processes_log_dated_lines_and_no_line_of_an_engine(pair: Pair) -> None:
    ask(pair, 20)
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING) (?P<role>[a-z ]+)\[\d+\] pdserve\.\S+: ")
    for server, roles in (
        (pair.prefill, {"prefill", "prefill scheduler"}),
        (pair.decode, {"decode", "decode scheduler"}),
        (pair.router, {"router"}),
    ):
        matches = [dated.match(line) for line in server.lines]
        assert all(matches), list(server.lines)
        assert {match["role"] for match in matches if match is not None} == roles
    kept = requests.get(f"{pair.url}/logs", timeout=30).json()
    answers = [kept, *kept["workers"].values()]
    names = [{one["name"] for one in answer["processes"] if one["lines"]} for answer in answers]
    assert names == [{"router"}, {"prefill", "prefill scheduler"}, {"decode", "decode scheduler"}]
    assert all(dated.match(line) for answer in answers for one in answer["processes"] for line in one["lines"])


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [("1", "2"), ("2", "1")])
def test_it_compares_however_the_two_are_split(
    prefill: str, decode: str, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--log-kv-target", str(tmp_path), "--disaggregation-enable-kv-checksum")
    sides = {"prefill_flags": ("--tp-size", prefill), "decode_flags": ("--tp-size", decode)}
    with running_pair(str(tiny_checkpoint("llama")), *flags, "--max-total-tokens", "2048", **sides) as split:
        for num_tokens in (1, 17, 70):
            ask(split, num_tokens)
        until(lambda: compare(read_lines([tmp_path])).num_equal >= 3, 20, "both sides' lines")
    report = compare(read_lines([tmp_path]))
    assert report.differences == ()
    sizes = {line["event"]: len(line["ranks"]) for line in read_lines([tmp_path]) if "ranks" in line}
    submitting = {line["rank"] for line in read_lines([tmp_path]) if line["event"] == "kv.submission"}
    assert submitting == set(range(int(prefill))), "each rank has a log of its own"
    assert sizes == {"kv.sent": int(prefill), "kv.received": int(decode)}


def test_both_sides_see_the_same_flow(pair: Pair) -> None:
    ask(pair)

    def edges() -> list[dict[str, object]]:
        return [edge for server in pair.workers for edge in server_edges(server.url)]

    until(lambda: len({(edge["bytes"], edge["transfers"]) for edge in edges()}) == 1, 20, "both say the same")
    seen = edges()
    assert len(seen) == 2 and len({(edge["from"], edge["to"]) for edge in seen}) == 1
    assert all(edge["peer_state"] == "ready" and edge["failures"] == 0 for edge in seen)
    found = requests.get(f"{pair.decode.url}/observe", timeout=10).json()["requests"][0]
    assert sum(found["ttft_parts"].values()) == pytest.approx(found["ttft_s"])
    assert found["ttft_parts"]["prefill"] > 0


TRAFFIC = (
    "sglang:num_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:time_to_first_token_seconds_count",
    "sglang:e2e_request_latency_seconds_count",
    "pdserve:requests_total",
    "pdserve:prompt_tokens_total",
    "pdserve:generation_tokens_total",
    "pdserve:transfers_done_total",
)


def traffic(pair: Pair) -> list[dict[str, float]]:
    """What each side has counted of requests."""
    seen = [server.metrics() for server in pair.workers]
    return [{name: metrics.get(name, 0.0) for name in TRAFFIC} for metrics in seen]


def test_probes_are_no_traffic(pair: Pair) -> None:
    ask(pair)
    before = traffic(pair)
    for url in (pair.url, pair.prefill.url, pair.decode.url):
        assert requests.get(f"{url}/health_generate", timeout=30).status_code == 200
    assert traffic(pair) == before
    for server in pair.workers:
        until(lambda server=server: server.metrics()["pdserve:health_probes_total"] >= 2, 10, "they are counted")


def test_a_prompt_that_is_only_read_is_counted_on_both_sides(pair: Pair) -> None:
    ask(pair, 40)
    before = traffic(pair)
    body = {"prompt": list(range(2, 42)), "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = requests.post(f"{pair.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 0
    for old, new in zip(before, traffic(pair), strict=True):
        grown = {name: new[name] - old[name] for name in TRAFFIC if name.startswith("sglang:")}
        once = dict.fromkeys(grown, 1.0)
        assert grown == once | {"sglang:prompt_tokens_total": 40, "sglang:generation_tokens_total": 0}


def test_the_rid_of_a_batch_aborts_it_on_both_sides(pair: Pair) -> None:
    sampling = {"max_new_tokens": 800, "ignore_eos": True}
    body = {"input_ids": [[5] * 20, [6] * 20], "sampling_params": sampling, "rid": "batch"}
    with ThreadPoolExecutor(max_workers=1) as pool:
        call = pool.submit(requests.post, f"{pair.url}/generate", json=body, timeout=60)
        until(lambda: pair.decode.metrics()["sglang:num_running_reqs"] == 2, 20, "both run")
        assert requests.post(f"{pair.url}/abort_request", json={"rid": "bat"}, timeout=30).status_code == 200
        assert pair.decode.metrics()["sglang:num_running_reqs"] == 2, "that is nobody's name"
        assert requests.post(f"{pair.url}/abort_request", json={"rid": "batch"}, timeout=30).status_code == 200
        parts = call.result(60).json()
    assert [part["meta_info"]["finish_reason"]["type"] for part in parts] == ["abort", "abort"]
    assert_idle(*pair.workers)


def server_edges(url: str) -> list[dict[str, object]]:
    return list(requests.get(f"{url}/observe", timeout=10).json()["edges"])


@pytest.mark.slow
def test_a_stopped_scheduler_is_ill_and_well_again(pair: Pair) -> None:
    """Last, since the other side takes the stopped one for silent. The rest of the server runs on."""
    ask(pair)
    scheduler = next(child for child in children(pair.prefill.child.pid) if "spawn_main" in child[1])[0]
    paths = ("/health", "/ready")
    assert [requests.get(f"{pair.prefill.url}{path}", timeout=30).status_code for path in paths] == [200, 200]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        started = time.monotonic()
        until(lambda: requests.get(f"{pair.prefill.url}/health", timeout=30).status_code == 503, 40, "it is noticed")
        assert time.monotonic() - started > 5, "a scheduler may be slow for a while"
        for path in ("/ready", "/health_generate"):
            assert requests.get(f"{pair.prefill.url}{path}", timeout=30).status_code == 503
        told = requests.get(f"{pair.prefill.url}/get_server_info", timeout=30).json()["replica_health"]
        assert told[0]["silent"] is True
        until(lambda: requests.get(f"{pair.decode.url}/ready", timeout=30).status_code == 503, 40, "decode misses it")
        assert requests.get(f"{pair.decode.url}/health", timeout=30).status_code == 200
    finally:
        os.kill(scheduler, signal.SIGCONT)
    for server in pair.workers:
        for path in ("/health", "/ready", "/health_generate"):
            until(lambda url=server.url + path: requests.get(url, timeout=30).status_code == 200, 30, path)
    until(lambda: requests.get(f"{pair.url}/health", timeout=30).status_code == 200, 30, "the router has a pair again")
    ask(pair)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["-1", "2048"])
def test_a_server_is_healthy_under_a_prompt_of_30000_tokens(chunk: str, tmp_path: Path) -> None:
    """In one step, or in chunks: what is long is not stuck."""
    model = make_tiny("llama", tmp_path, max_position_embeddings=32768, num_hidden_layers=2)
    sizes = ("--max-total-tokens", "40000", "--chunked-prefill-size", chunk, "--max-prefill-tokens", "40000")
    with running_monolith(str(model), *sizes) as server, ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [5] * 30000, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
        answer = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300)
        until(lambda: server.state()["replica_health"][0]["turn_s"] is not None, 60, "it has begun")
        num_checks = 0
        while not answer.done():
            for path in ("/health", "/ready", "/health_generate"):
                found = requests.get(f"{server.url}{path}", timeout=60)
                assert found.status_code == 200, (path, found.text)
                num_checks += not answer.done()
        assert answer.result().status_code == 200, answer.result().text
        assert num_checks >= 2


def children(pid: int) -> list[tuple[int, str]]:
    import psutil

    return [(child.pid, " ".join(child.cmdline())) for child in psutil.Process(pid).children(recursive=True)]
