"""The serving benchmark and the demo, run as programs against a made-up OpenAI server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.unit.router.answers import begin_stream

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
REPO = Path(__file__).parents[3]
TIMING = {
    "queue_s": 0.001,
    "bootstrap_s": 0.002,
    "prefill_s": 0.03,
    "transfer_s": 0.004,
    "first_decode_step_s": 0.005,
    "kv_bytes": 46080,
    "kv_pages": 2,
    "kv_transfer_s": 0.001,
}


def openai_stream(broken: Callable[[dict[str, Any]], bool] = lambda body: False) -> Any:
    """Streams `max_tokens` pieces, two in one write; `broken` requests end with an error event."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        response = await begin_stream(request)
        head = {"id": "1", "created": 1, "model": "d", "object": "chat.completion.chunk" if chat else "text_completion"}
        events: list[dict[str, Any]] = []
        if chat:
            events.append({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for index in range(body["max_tokens"]):
            piece = f" w{index}"
            fields = {"delta": {"content": piece}} if chat else {"text": piece}
            events.append({"index": 0, "finish_reason": None, **fields})
        packed = [b"data: " + orjson.dumps(head | {"choices": [choice], "usage": None}) + b"\n\n" for choice in events]
        if broken(body):
            packed = [*packed[:1], b'data: {"error": {"message": "decode died"}}\n\n']
        else:
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"], "total_tokens": 0}
            extra = {"pdserve": TIMING} if body.get("return_meta_info") else {}
            packed.append(b"data: " + orjson.dumps(head | {"choices": [], "usage": usage} | extra) + b"\n\n")
            packed.append(b"data: [DONE]\n\n")
        for first in range(0, len(packed), 2):
            await response.write(b"".join(packed[first : first + 2]))
        return response

    return answer


async def run_program(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPO,
    )
    try:
        out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def bench(world: Any, server: Any, out: Path, *flags: str) -> Coroutine[Any, Any, tuple[int, str, str]]:
    argv = ["benchmarks/bench_serving.py", "--base-url", server.url, "--output-json", str(out)]
    return run_program(*argv, "--num-warmup", "0", *flags)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_benchmark_counts_tokens_by_usage(run_world: RunWorld, tmp_path: Path, endpoint: str) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream())
        out = tmp_path / "out.json"
        flags = "--num-prompts 10 --concurrency 3 --input-len 7 --output-len 5 --ignore-eos"
        code, text, err = await bench(world, server, out, "--endpoint", endpoint, *flags.split())
        assert code == 0, err
        found = json.loads(out.read_text())
        assert (found["num_completed"], found["num_errors"]) == (10, 0)
        assert (found["prompt_tokens"], found["output_tokens"]) == (70, 50)
        assert found["output_tokens_per_s"] == pytest.approx(50 / found["duration_s"])
        assert found["total_tokens_per_s"] == pytest.approx(120 / found["duration_s"])
        assert 0 < found["ttft"]["p50_ms"] <= found["ttft"]["p99_ms"] <= found["latency"]["p99_ms"]
        assert found["itl"]["p50_ms"] <= found["itl"]["p99_ms"]
        assert all(body["ignore_eos"] and body["model"] == "d" for body in server.bodies)
        assert "num_completed          10" in text

    run_world(scenario)


def test_the_benchmark_reports_errors_and_goes_on(run_world: RunWorld, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        async def refused(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "busy"}}, status=503)

        server = await world.worker("d", openai_stream(lambda body: True), refused, openai_stream())
        out = tmp_path / "out.json"
        code, _, err = await bench(
            world, server, out, "--num-prompts", "6", "--output-len", "3", "--request-rate", "999"
        )
        assert code == 0, err
        found = json.loads(out.read_text())
        assert (found["num_completed"], found["num_errors"], found["output_tokens"]) == (4, 2, 12)
        assert "decode died" in found["errors"][0] and "status 503" in found["errors"][1]

    run_world(scenario)


def test_the_same_seed_sends_the_same_prompts(run_world: RunWorld, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        sent = []
        for seed in ("1", "1", "2"):
            server = await world.worker("d", openai_stream())
            await bench(world, server, tmp_path / "o.json", "--num-prompts", "4", "--output-len", "1", "--seed", seed)
            sent.append(sorted(json.dumps(body["prompt"]) for body in server.bodies))
        assert sent[0] == sent[1] != sent[2]

    run_world(scenario)


def test_a_trace_gives_scaled_lengths_and_shared_prefixes(run_world: RunWorld, tmp_path: Path) -> None:
    async def scenario(world: Any) -> None:
        rows = [
            {"timestamp": 1000, "input_length": 1000, "output_length": 40, "hash_ids": [1, 2]},
            {"timestamp": 1000, "input_length": 1400, "output_length": 20, "hash_ids": [1, 3, 4]},
            {"timestamp": 1500, "input_length": 100, "output_length": 1},
        ]
        trace = tmp_path / "trace.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        server = await world.worker("d", openai_stream())
        out = tmp_path / "out.json"
        flags = ["--trace", str(trace), "--length-scale", "0.1", "--time-scale", "0.1", "--num-prompts", "3"]
        code, _, err = await bench(world, server, out, *flags)
        assert code == 0, err
        found = json.loads(out.read_text())
        assert (found["prompt_tokens"], found["output_tokens"]) == (100 + 140 + 10, 4 + 2 + 1)
        first, second = sorted((body["prompt"] for body in server.bodies if len(body["prompt"]) > 10), key=len)
        assert first[:51] == second[:51] and first[51:100] != second[51:100]

    run_world(scenario)


def test_the_demo_shows_what_happened(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream())
        argv = ["scripts/demo.py", "--base-url", server.url + "/v1", "--question", "a b c", "--max-tokens", "6"]
        code, out, err = await run_program(*argv, "--once")
        assert code == 0, err
        assert " w0 w1 w2 w3 w4 w5\n" in out
        assert "prompt 3 tokens, answer 6 tokens" in out
        assert "46,080 bytes in 2 pages, 1.0 ms, 0.05 GB/s" in out
        assert (
            "37.0 ms = queue 1.0 + bootstrap 2.0 + prefill 30.0 + transfer 4.0; then the first decode step 5.0" in out
        )
        assert "TTFT at the client" in out and "ITL mean" in out and "p99" in out

    run_world(scenario)


def test_the_demo_keeps_the_conversation(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream())
        argv = ["scripts/demo.py", "--base-url", server.url + "/v1", "--question", "one", "--max-tokens", "2"]
        code, _, err = await run_program(*argv, stdin=b"\ntwo\n")
        assert code == 0, err
        roles = [message["role"] for message in server.bodies[1]["messages"]]
        contents = [message["content"] for message in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "user"] and contents == ["one", " w0 w1", "two"]

    run_world(scenario)


def test_the_demo_says_when_the_service_refuses(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        server = await world.worker("d", openai_stream(lambda body: True))
        code, _, err = await run_program("scripts/demo.py", "--base-url", server.url + "/v1", "--once")
        assert code == 1 and "decode died" in err

    run_world(scenario)
