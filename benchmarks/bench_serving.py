"""Load on any OpenAI-compatible endpoint, and what its clients see: TTFT, ITL, tokens/s, errors.

    python benchmarks/bench_serving.py --base-url http://127.0.0.1:8000 --num-prompts 64 --concurrency 8 \\
        --input-len 256 --output-len 64 --ignore-eos --output-json out.json

Arrivals: all at once up to `--concurrency`; a Poisson process of `--request-rate` per second (seeded); or the times in
`--trace` (JSON lines with `input_length`, `output_length`, `timestamp` in ms, and optionally `hash_ids`, where equal
ids mean equal prompt pieces). Times are the client's own, tokens are those of the server's `usage`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

if __package__ in (None, ""):  # run by its path: `benchmarks` lies in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORDS = "the of and to in is that for it was on are as with his they at be this from have or by one had not but what"
PROMPTS_HELP = "random token ids or those of English prose (exact lengths), or words; chat has words"
TRACE_BLOCK_TOKENS = 512
PERCENTILES = (50, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request: prompt (text or token ids), output length in tokens, arrival in seconds after the start."""

    prompt: str | list[int]
    output_len: int
    at_s: float


@dataclasses.dataclass(kw_only=True)
class Result:
    """What one request got; times in seconds since it was sent. `error` None means a whole answer."""

    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    latency_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", required=True, help="root of the server, with or without /v1")
    add("--model", help="the first of /v1/models when absent")
    add("--api-key", default="none")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--prompts", choices=("ids", "prose", "text"), default="ids", help=PROMPTS_HELP)
    add("--tokenizer", default="smollm2", help="prose as this model's token ids: what servers take as --model-path")
    add("--vocab-size", type=int, default=1000, help="random token ids are 10 to this")
    add("--num-prompts", type=int, default=64)
    add("--num-warmup", type=int, default=1, help="requests before the clock starts")
    add("--concurrency", type=int, help="requests in flight at most")
    add("--request-rate", type=float, default=math.inf, help="requests per second, Poisson")
    add("--input-len", type=int, default=256, help="tokens (ids) or words (text) per prompt")
    add("--output-len", type=int, default=64, help="max_tokens")
    add("--trace", type=Path, help="take lengths and arrivals from this file")
    add("--length-scale", type=float, default=1.0, help="the trace's lengths times this")
    add("--time-scale", type=float, default=1.0, help="the trace's times times this")
    add("--ignore-eos", action="store_true", help="always generate the whole output length")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--request-timeout", type=float, default=3600.0, help="seconds")
    add("--output-json", type=Path)
    args = parser.parse_args(argv)
    if min(args.num_prompts, args.input_len, args.output_len) < 1 or args.vocab_size <= 10:
        parser.error("--num-prompts, --input-len and --output-len must be at least 1, --vocab-size above 10")
    if not args.request_rate > 0 or (args.concurrency is not None and args.concurrency < 1):
        parser.error("--request-rate must be above 0 and --concurrency at least 1")
    if args.endpoint == "chat":
        args.prompts = "text"
    args.root = args.base_url.rstrip("/").removesuffix("/v1")
    return args


def make_prompt(args: argparse.Namespace, rng: random.Random, length: int) -> str | list[int]:
    """A random prompt of `length` token ids or words, or a random piece of prose."""
    if args.prompts == "ids":
        return [rng.randrange(10, args.vocab_size) for _ in range(length)]
    if args.prompts == "prose":
        from benchmarks.prose import prose_ids  # pdserve: not where this script is on its own

        ids = prose_ids(args.tokenizer)
        start = rng.randrange(len(ids))
        return [ids[(start + i) % len(ids)] for i in range(length)]
    return " ".join(rng.choices(WORDS.split(), k=length))


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """The same jobs for the same flags and seed."""
    rng = random.Random(args.seed)
    if args.trace is not None:
        return trace_jobs(args)
    jobs, at_s = [], 0.0
    for _ in range(args.num_prompts):
        jobs.append(Job(prompt=make_prompt(args, rng, args.input_len), output_len=args.output_len, at_s=at_s))
        at_s += rng.expovariate(args.request_rate) if math.isfinite(args.request_rate) else 0.0
    return jobs


def trace_jobs(args: argparse.Namespace) -> list[Job]:
    """The first `num_prompts` lines of the trace, scaled."""
    with args.trace.open() as file:
        rows = [json.loads(line) for _, line in zip(range(args.num_prompts), file, strict=False)]
    jobs = []
    for index, row in enumerate(rows):
        length = max(1, round(row["input_length"] * args.length_scale))
        output_len = max(1, round(row["output_length"] * args.length_scale))
        at_s = (row["timestamp"] - rows[0]["timestamp"]) / 1e3 * args.time_scale
        prompt = trace_prompt(args, row.get("hash_ids", []), length, index)
        jobs.append(Job(prompt=prompt, output_len=output_len, at_s=at_s))
    return jobs


def trace_prompt(args: argparse.Namespace, hash_ids: Sequence[int], length: int, index: int) -> str | list[int]:
    """A prompt whose pieces are equal where the trace's block ids are; without ids, a prompt of its own."""
    if not hash_ids:
        return make_prompt(args, random.Random(f"{args.seed}/row/{index}"), length)
    size = max(1, round(TRACE_BLOCK_TOKENS * args.length_scale))
    blocks = [make_prompt(args, random.Random(f"{args.seed}/block/{block}"), size) for block in hash_ids]
    ids = [token for block in blocks for token in (block.split() if isinstance(block, str) else block)]
    ids += [ids[-1]] * (length - len(ids))
    return " ".join(str(word) for word in ids[:length]) if args.prompts == "text" else [int(i) for i in ids[:length]]


def request_body(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """The request in OpenAI's form."""
    body: dict[str, Any] = {
        "model": args.model,
        "max_tokens": job.output_len,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": job.prompt}]}
    return body | {"prompt": job.prompt}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as its line is complete."""
    pending = b""
    async for chunk in response.content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def run_one(session: aiohttp.ClientSession, args: argparse.Namespace, job: Job) -> Result:
    """Send one request and read its stream."""
    result = Result()
    path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
    began = time.perf_counter()
    try:
        async with session.post(args.root + path, data=orjson.dumps(request_body(args, job))) as response:
            if response.status != 200:
                result.error = f"status {response.status}: {(await response.text())[:200]}"
            else:
                await read_stream(response, result, began)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.latency_s = time.perf_counter() - began
    return result


async def read_stream(response: aiohttp.ClientResponse, result: Result, began: float) -> None:
    """Fill in the arrivals of text and the usage; a stream without its end is an error."""
    async for data in events(response):
        now = time.perf_counter() - began
        if data == b"[DONE]":
            result.output_tokens = result.output_tokens or len(result.arrivals_s)
            return
        parsed = orjson.loads(data)
        if "error" in parsed:
            result.error = f"error event: {parsed['error']}"
            return
        if any(piece_of(choice) for choice in parsed.get("choices", [])):
            result.arrivals_s.append(now)
        if parsed.get("usage"):
            result.prompt_tokens = parsed["usage"]["prompt_tokens"]
            result.output_tokens = parsed["usage"]["completion_tokens"]
    result.error = "the stream ended without [DONE]"


def piece_of(choice: dict[str, Any]) -> str | None:
    """The text that a streamed choice brings, if any."""
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return text if isinstance(text, str) else None


async def run_all(args: argparse.Namespace) -> tuple[list[Result], float]:
    """Warm up, then run all jobs; returns the results and the seconds they took together."""
    jobs = make_jobs(args)
    gate = asyncio.Semaphore(args.concurrency or len(jobs) or 1)
    timeout = aiohttp.ClientTimeout(total=args.request_timeout)
    headers = {"Authorization": f"Bearer {args.api_key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        if args.model is None:
            async with session.get(args.root + "/v1/models") as response:
                args.model = (await response.json())["data"][0]["id"]
        for job in jobs[: args.num_warmup]:
            await run_one(session, args, job)
        began = time.perf_counter()

        async def arrive(job: Job) -> Result:
            await asyncio.sleep(max(0.0, began + job.at_s - time.perf_counter()))
            async with gate:
                return await run_one(session, args, job)

        results = await asyncio.gather(*(arrive(job) for job in jobs))
        return list(results), time.perf_counter() - began


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; NaN of none."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else math.nan


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not values:
        return {"mean_ms": None, **{f"p{percent}_ms": None for percent in PERCENTILES}}
    found = {"mean_ms": statistics.fmean(values) * 1e3}
    return {**found, **{f"p{percent}_ms": percentile(values, percent) * 1e3 for percent in PERCENTILES}}


def summarize(args: argparse.Namespace, results: Sequence[Result], duration_s: float) -> dict[str, Any]:
    """Every number of the report."""
    good = [result for result in results if result.error is None]
    gaps = [b - a for result in good for a, b in zip(result.arrivals_s, result.arrivals_s[1:], strict=False)]
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    errors = [result.error for result in results if result.error is not None]
    return {
        "flags": {name: str(value) if isinstance(value, Path) else value for name, value in shown(args).items()},
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "num_completed": len(good),
        "num_errors": len(errors),
        "errors": sorted(set(errors))[:10],
        "duration_s": duration_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
        "ttft": spread([result.arrivals_s[0] for result in good if result.arrivals_s]),
        "itl": spread(gaps),
        "latency": spread([result.latency_s for result in good]),
    }


def shown(args: argparse.Namespace) -> dict[str, Any]:
    """The flags for the report: no secret, and no value that JSON does not have."""
    hidden = {"api_key", "output_json", "root"}
    return {
        name: None if value == math.inf else value for name, value in sorted(vars(args).items()) if name not in hidden
    }


def show(summary: dict[str, Any]) -> None:
    """The report as text."""
    for name in ("num_completed", "num_errors", "prompt_tokens", "output_tokens"):
        print(f"{name:<22} {summary[name]}")
    for name in ("duration_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        print(f"{name:<22} {summary[name]:.2f}")
    for name in ("ttft", "itl", "latency"):
        numbers = ((key.removesuffix("_ms"), value) for key, value in summary[name].items() if value is not None)
        print(f"{name + ' (ms)':<22} " + "  ".join(f"{key} {value:.1f}" for key, value in numbers))
    for error in summary["errors"]:
        print(f"error: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when not one request got a whole answer."""
    args = parse_flags(argv)
    summary = summarize(args, *asyncio.run(run_all(args)))
    show(summary)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return 0 if summary["num_completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
