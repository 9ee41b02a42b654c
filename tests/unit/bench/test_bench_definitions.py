"""`pdserve bench` beside the request functions of `vllm bench serve` and SGLang's bench_serving on the same streams.

Their times are exact: each chunk moves the clock. `docs/benchmarking.md` tells where the three differ.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_bench import SGLANG
from benchmarks.peers import VLLM
from pdserve.bench.client import BenchClient, BenchTarget
from tests.unit.bench.kit import event, piece, usage
from tests.unit.bench.peer_clients import BROKEN, ScriptedClock, ScriptedStream

Json = dict[str, Any]
Chunks = list[tuple[float, str]]
TIMEOUT_S = 300.0


def texts(*gaps_s: float, chat: bool = False) -> Chunks:
    return [(gap, piece(" a", chat=chat).decode()) for gap in gaps_s]


def end(tokens: int) -> Chunks:
    return [(0.0, usage(3, tokens).decode())]


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).decode()
ERROR = event({"error": {"message": "decode died"}}).decode() + event(None).decode()
LAST = event({"choices": [{"text": " b", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}).decode()
CASES: dict[str, tuple[bool, int, Chunks]] = {
    # name: chat, tokens that are asked for, chunks
    "a token in each event": (False, 4, [*texts(0.3, 0.1, 0.05, 0.2), *end(4)]),
    "several tokens in one event": (False, 8, [*texts(0.3, 0.4, 0.2), *end(8)]),
    "all tokens in one event": (False, 8, [*texts(0.3), *end(8)]),
    "two events in one packet": (False, 3, [*texts(0.3), (0.2, piece(" a").decode() * 2), *end(3)]),
    "usage with the last token": (False, 3, [*texts(0.3, 0.1), (0.1, LAST + event(None).decode())]),
    "no usage": (False, 2, [*texts(0.3, 0.1), (0.0, event(None).decode())]),
    "chat": (True, 3, [(0.2, ROLE), *texts(0.1, 0.1, 0.3, chat=True), *end(3)]),
    "tokens without text": (False, 3, [(0.2, piece("").decode()), (0.1, piece("").decode()), *end(3)]),
    "a connection that breaks": (False, 3, [*texts(0.3, 0.1), (0.1, BROKEN)]),
    "an error in the stream": (False, 3, [*texts(0.3, 0.1), (0.1, ERROR)]),
    "an error in a chat": (True, 3, [(0.2, ROLE), *texts(0.1, chat=True), (0.1, ERROR)]),
    "no end": (False, 3, texts(0.3, 0.1)),
}


async def ours(chat: bool, output_len: int, chunks: Chunks) -> Json:
    clock = ScriptedClock()
    target = BenchTarget(base_url="http://a", backend="openai-chat" if chat else "openai")
    client = BenchClient(target, clock)
    client._session = ScriptedStream(chunks, clock)  # type: ignore[assignment]
    record = await client.send("a", output_len)
    return {
        "success": record.whole, "ttft": record.ttft_s, "itl": record.itls_s, "e2el": record.end_s,
        "tokens": record.output_tokens, "tpot": record.tpot_s,
    }  # fmt: skip


def theirs(tool: str, python: Path, chunks_of: Callable[[bool, Chunks], Chunks]) -> dict[str, Json]:
    """Return what a client measured of each case."""
    cases = [
        {"chat": chat, "output_len": count, "chunks": chunks_of(chat, chunks)} for chat, count, chunks in CASES.values()
    ]
    script = Path(__file__).with_name("peer_clients.py")
    done = subprocess.run(
        [str(python), str(script), tool], input=json.dumps(cases), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


def as_asked_by_sglang(chat: bool, chunks: Chunks) -> Chunks:
    """Its request at `/v1/completions` asks for no usage, and it cannot read an event without a choice there."""
    return [(gap, event(None).decode() if '"choices":[]' in text and not chat else text) for gap, text in chunks]


def tpot(found: Json) -> float | None:
    """Both tools compute it so, from requests with more than one token."""
    return (found["e2el"] - found["ttft"]) / (found["tokens"] - 1) if found["tokens"] > 1 else None


async def test_exact_figures_of_a_stream_with_several_tokens_in_one_event() -> None:
    found = await ours(*CASES["several tokens in one event"])
    assert found["ttft"] == pytest.approx(0.3) and found["itl"] == pytest.approx([0.4, 0.2])
    assert found["tpot"] == pytest.approx(0.6 / 7) and found["e2el"] == pytest.approx(0.9)


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="scripts/setup_peers.sh vllm")
async def test_the_figures_are_those_of_vllm_bench_serve() -> None:
    found = theirs("vllm", VLLM, lambda chat, chunks: chunks)
    for name, case in CASES.items():
        mine, other = await ours(*case), found[name]
        if name in ("an error in the stream", "an error in a chat", "no end"):
            assert (mine["success"], other["success"]) == (False, True), name
            continue
        assert mine["success"] is other["success"], name
        if not mine["success"]:
            continue
        if name == "chat":  # the event with the role is vLLM's first token
            assert other["ttft"] == pytest.approx(0.2) and mine["ttft"] == pytest.approx(0.3)
            assert other["itl"][1:] == pytest.approx(mine["itl"]) and other["e2el"] == pytest.approx(mine["e2el"])
            continue
        for field in ("ttft", "itl", "e2el"):
            assert mine[field] == pytest.approx(other[field]), (name, field)
        if name not in ("usage with the last token", "no usage"):  # there vLLM counts by its tokenizer
            assert mine["tokens"] == other["tokens"] and mine["tpot"] == pytest.approx(tpot(other)), name


@pytest.mark.slow
@pytest.mark.skipif(not SGLANG.exists(), reason="scripts/setup_peers.sh sglang_bench")
async def test_the_figures_are_those_of_sglangs_bench_serving() -> None:
    found = theirs("sglang", SGLANG, as_asked_by_sglang)
    for name, case in CASES.items():
        mine, other = await ours(*case), found[name]
        if name in ("an error in a chat", "no end"):
            assert (mine["success"], other["success"]) == (False, True), name
            continue
        if name == "tokens without text":
            assert other["ttft"] == 0.0 and other["success"], "SGLang takes no first token here"
            continue
        assert mine["success"] is other["success"], name
        if mine["success"]:
            for field in ("ttft", "itl", "e2el", "tokens"):
                assert mine[field] == pytest.approx(other[field]), (name, field)
            assert mine["tpot"] == pytest.approx(tpot(other)), name
