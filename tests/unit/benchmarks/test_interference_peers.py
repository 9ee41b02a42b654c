"""`bench_interference --peers`: what it refuses, which systems it compares, and how it reads their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import answers, bench_interference, interference_peers
from benchmarks.answers import Answer
from benchmarks.interference_report import METRICS
from benchmarks.peers import KINDS, Kind


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers count as installed."""
    for name in interference_peers.PEERS:
        monkeypatch.setitem(KINDS, name, Kind("bf16", None, KINDS[name].start))


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit):
        bench_interference.parse_flags(["--peers", "vllm", *flags])
    return capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(KINDS, "vllm", Kind("bf16", tmp_path / "nowhere", KINDS["vllm"].start))
    assert "not installed: vllm; scripts/setup_peers.sh" in refusal(capsys)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model", "/m"), "neither --model"),
        (("--dtype", "float32"), "neither --model nor --dtype"),
        (("--", "--page-size", "64"), "flags of servers"),
        (("--peer-chunk", "16"), "--peer-chunk must be 0, or at least 64"),
    ],
)
def test_what_peers_cannot_have_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    assert told in refusal(capsys, *flags)


@pytest.mark.usefixtures("installed")
def test_all_peers_are_compared_and_single_servers_also_with_chunks() -> None:
    def names(*flags: str) -> list[str]:
        args = bench_interference.parse_flags(["--peers", *flags])
        return [system.name for system in interference_peers.systems_of(args)]

    assert names("--peer-chunk", "0") == ["pdserve 1P1D", "pdserve", "vllm", "llama bf16"]
    assert names()[4:] == ["pdserve, chunks of 64", "vllm, chunks of 64", "llama bf16, chunks of 64"]
    assert names("vllm", "--peer-chunk", "128")[2:] == ["vllm", "pdserve, chunks of 128", "vllm, chunks of 128"]


@pytest.mark.usefixtures("installed")
def test_rounds_count_from_the_second_on_and_are_compared_with_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference_peers, "wait_for_quiet", lambda _: False)
    args = bench_interference.parse_flags(["--peers", "--rounds", "2", "--peer-chunk", "0"])
    asked: list[tuple[str, int]] = []
    counts = {"num_gaps": 900.0, "num_prompts": 3.0, "num_prompts_through": 2.0}

    def measure(url: str, seed: int) -> dict[str, float | None]:
        asked.append((url, seed))
        value = 10.0 if url == "u/pdserve 1P1D" else 40.0
        return {**{name: value * (seed + 1) for name, _, _ in METRICS}, **counts}

    urls = {system.name: f"u/{system.name}" for system in interference_peers.systems_of(args)}
    rounds, num_loud = interference_peers.run_rounds(args, urls, measure)
    assert [seed for _, seed in asked] == [0] * 4 + [1] * 4 + [2] * 4 and num_loud == 12
    assert len(set(asked)) == 12, "each system once a round"
    assert [found["itl_p99_ms"] for found in rounds["pdserve 1P1D", True]] == [20.0, 30.0]
    lines = interference_peers.ratio_table(rounds).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        "pdserve 1P1D / pdserve", "pdserve 1P1D / vllm", "pdserve 1P1D / llama bf16"
    ]  # fmt: skip
    assert all("0.25x" in line for line in lines)
    machine = {"cpu_model": "c", "cpus": 2, "platform": "p", "load_1m": 0.1}
    facts = {"date": "d", "machine": machine, "load_after": 2.0, "revision": "r", "duration_s": 1.0, "command": "c"}
    text = interference_peers.document(args, facts, rounds, num_loud)
    assert "900 to 900 gaps, 3 to 3 prompts sent and 2 to 2 through" in text
    assert "| llama bf16   | with prompts | 100.0 (80.0-120.0) |" in text
    assert "12 measurements were begun while something else computed" in text


def event(text: str, finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]})


def read(events: Sequence[str], status: int = 200) -> Answer:
    """What `read_completion` makes of a server's events."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["prompt"] == [5, 6]
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        return response

    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        found = Answer()
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            await answers.read_completion(session, str(server.make_url("")).rstrip("/"), [5, 6], 3, found)
        return found

    return asyncio.run(run())


def test_completions_count_events_with_text() -> None:
    pieces = [event("a"), event(""), event("b"), event("", "length")]
    found = read([*pieces, '{"choices": [], "usage": {}}', "[DONE]"])
    assert len(found.came_s) == 2 and found.ttft_s > 0


@pytest.mark.parametrize(
    ("events", "status", "told"),
    [
        (['{"error": {"message": "no memory"}}'], 200, "no memory"),
        ([event("a", "stop"), "[DONE]"], 200, "ended with stop"),
        ([event("a")], 200, "ended with None"),
        ([event("", "length"), "[DONE]"], 200, "without text"),
        ([], 503, "status 503"),
    ],
)
def test_a_completion_that_is_not_whole_is_an_error(events: Sequence[str], status: int, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        read(events, status)
