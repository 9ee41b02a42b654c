"""`pdserve bench`, `vllm bench serve` and SGLang's bench_serving in turns on the same server: do their figures agree?

    python -m benchmarks.compare_bench [--servers steady monolith pair] [--rounds 3] [--write]
    python -m benchmarks.compare_bench --base-url http://HOST:PORT --model NAME --tokenizer DIRECTORY

`steady` answers by a timetable, so differences there come from the tools' definitions; a real server adds its noise.
Each run is a process of its own and has prompts of its own, so no prefix cache holds them. One file of prompts has the
fields that each of the three reads. Figures agree where the ranges of the rounds meet, or the medians are within 2 %.

`scripts/setup_peers.sh vllm sglang_bench` installs the other two; one that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report, servers
from benchmarks.peers import HOME, VLLM
from benchmarks.steady_server import steady_server
from pdserve.bench.prompts import PromptMaker, open_tokenizer
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

Json = dict[str, Any]
SGLANG = HOME / "sglang_bench/bin/python"
OURS = "pdserve bench"
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The subcommand without `vllm`'s own main, which looks for a package named vllm; the CPU build has another name."""
METRICS = (
    ("median_ttft_ms", "TTFT p50, ms", 1), ("p99_ttft_ms", "TTFT p99, ms", 1),
    ("median_tpot_ms", "TPOT p50, ms", 2), ("p99_tpot_ms", "TPOT p99, ms", 2),
    ("median_itl_ms", "ITL p50, ms", 2), ("p99_itl_ms", "ITL p99, ms", 1),
    ("output_throughput", "output tok/s", 1),
)  # fmt: skip
"""Fields that the results of all three have, by one name; their headings and digits."""
TOTALS = ("completed", "total_input_tokens", "total_output_tokens")
SERVERS = ("steady", "monolith", "pair")
TOLERANCE = 0.02
RUN_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchJob:
    """One run of a tool: the endpoint, the prompts, and where the result goes.

    `tokenizer`: directory for tools that count tokens themselves; lengths are in tokens.
    """

    base_url: str
    model: str
    tokenizer: Path
    prompts: Path
    result: Path
    num_prompts: int
    output_len: int
    concurrency: int

    def shared(self) -> list[str]:
        """Return the flags that the three have by one name."""
        return [
            "--base-url", self.base_url, "--model", self.model, "--tokenizer", str(self.tokenizer),
            "--dataset-name", "custom", "--dataset-path", str(self.prompts), "--num-prompts", str(self.num_prompts),
            "--max-concurrency", str(self.concurrency), "--disable-tqdm",
        ]  # fmt: skip


def pdserve_command(job: BenchJob) -> list[str]:
    """Return the command of `pdserve bench`."""
    own = ["--custom-output-len", str(job.output_len), "--ignore-eos", "--output-json", str(job.result)]
    return [sys.executable, "-m", "pdserve", "bench", *job.shared(), *own]


def vllm_command(job: BenchJob) -> list[str]:
    """Return the command of `vllm bench serve`."""
    own = [
        "--backend", "openai", "--endpoint", "/v1/completions", "--temperature", "0", "--ignore-eos",
        "--custom-output-len", str(job.output_len), "--skip-chat-template", "--disable-shuffle",
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--num-warmups", "0",
        "--save-result", "--result-dir", str(job.result.parent), "--result-filename", job.result.name,
    ]  # fmt: skip
    return [str(VLLM), "-c", VLLM_BENCH_SERVE, *job.shared(), *own]


def sglang_command(job: BenchJob) -> list[str]:
    """Return the command of SGLang's bench_serving at `/v1/completions`; it ignores the end token by itself."""
    own = ["--backend", "sglang-oai", "--sharegpt-output-len", str(job.output_len), "--output-file", str(job.result)]
    return [str(SGLANG), "-m", "sglang.benchmark.serving", *job.shared(), *own]


def read_pdserve(text: str) -> Json:
    """Return the run of a file of `--output-json`."""
    return dict(json.loads(text)["results"][0])


def read_vllm(text: str) -> Json:
    """Return the run of a file of `--save-result`, which is one object."""
    return dict(json.loads(text))


def read_sglang(text: str) -> Json:
    """Return the last run of a file of `--output-file`, which gets a line from each run."""
    return dict(json.loads(text.strip().splitlines()[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTool:
    """A benchmark client: its program, its command and the reader of its result."""

    program: Path
    command: Callable[[BenchJob], list[str]]
    read: Callable[[str], Json]


TOOLS: dict[str, BenchTool] = {
    OURS: BenchTool(program=Path(sys.executable), command=pdserve_command, read=read_pdserve),
    "vllm bench serve": BenchTool(program=VLLM, command=vllm_command, read=read_vllm),
    "SGLang bench_serving": BenchTool(program=SGLANG, command=sglang_command, read=read_sglang),
}


def figures(tool: str, text: str) -> dict[str, float]:
    """Return `METRICS` and `TOTALS` of a tool's result.

    Raises:
        RuntimeError: the result is not JSON, or lacks a field.
    """
    try:
        found = TOOLS[tool].read(text)
        return {name: float(found[name]) for name in (*(name for name, _, _ in METRICS), *TOTALS)}
    except (ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"{tool}: its result cannot be read: {type(error).__name__}: {error}") from error


def run_tool(tool: str, job: BenchJob) -> dict[str, float]:
    """Run a tool; return its figures.

    Raises:
        RuntimeError: it failed, or not every request has a whole answer.
    """
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = TOOLS[tool].command(job)
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, env=env)
    if done.returncode != 0 or not job.result.exists():
        raise RuntimeError(f"{tool} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    found = figures(tool, job.result.read_text())
    if found["completed"] != job.num_prompts:
        raise RuntimeError(f"{tool}: {found['completed']:g} of {job.num_prompts} requests have a whole answer")
    return found


def write_prompts(path: Path, maker: PromptMaker, seed: int, count: int, input_len: int) -> None:
    """Write a file of prompts that all three read: `prompt`, and `conversations` with an answer that SGLang needs."""
    rng = random.Random(f"{seed}/compare")
    with path.open("w") as file:
        for _ in range(count):
            text = maker.text(rng, input_len)
            said = [{"from": "human", "value": text}, {"from": "gpt", "value": "an answer"}]
            file.write(json.dumps({"prompt": text, "conversations": said}) + "\n")


def disagreements(rounds: report.Rounds) -> list[str]:
    """Return a line for each figure of another tool that lies beyond the spread of `pdserve bench`."""
    found = []
    for tool in rounds:
        for name, heading, digits in METRICS:
            ours, theirs = (report.spread_of([one[name] for one in rounds[side]]) for side in (OURS, tool))
            apart = theirs.low > ours.high or theirs.high < ours.low
            if apart and abs(theirs.median - ours.median) > TOLERANCE * ours.median:
                found.append(f"{tool}: {heading}: {theirs.show(digits)}, {OURS}: {ours.show(digits)}")
    return found


def table(rounds: report.Rounds) -> str:
    """Return the figures of each tool: medians with the least and the most of the rounds."""
    rows = [
        [tool, *(report.spread_of([one[name] for one in found]).show(digits) for name, _, digits in METRICS),
         *(f"{report.spread_of([one[name] for one in found]).median:,.0f}" for name in TOTALS[1:])]
        for tool, found in rounds.items()
    ]  # fmt: skip
    return report.markdown_table(
        ["tool", *(heading for _, heading, _ in METRICS), "prompt tokens", "output tokens"], rows
    )


def document(args: argparse.Namespace, facts: Json, rounds: Mapping[str, report.Rounds]) -> str:
    """Return the whole report in Markdown."""
    parts = [
        f"# Benchmark clients on the same server, {facts['date']}",
        f"{args.num_prompts} requests at /v1/completions, at most {args.concurrency} in flight, {args.input_len} tokens"
        f" in and {args.output_len} out. Each tool in turn; median of the rounds (least-most).",
    ]
    for server, found in rounds.items():
        apart = disagreements(found)
        agreed = (
            "All figures agree." if not apart else "\n".join(["Figures that differ:", "", *(f"- {a}" for a in apart)])
        )
        parts += [f"## {server}, {len(found[OURS])} rounds", table(found), agreed]
    return "\n\n".join([*parts, report.footer(facts)])


@contextlib.contextmanager
def server_url(kind: str, args: argparse.Namespace) -> Iterator[str]:
    """Start a server: `steady`, a `monolith` with all threads, or a `pair` with half of them each. Yields the URL."""
    if kind == "steady":
        with steady_server(args.model) as url:
            yield url
    elif kind == "monolith":
        with servers.monolith(args.model, args.dtype, threads=args.threads) as url:
            yield url
    else:
        with servers.local_pair(args.model, args.dtype, threads=max(1, args.threads // 2)) as url:
            yield url


def measure(args: argparse.Namespace, url: str, model: str, tools: Sequence[str]) -> report.Rounds:
    """Run all tools in turn on one server. The first run of each is a warm-up of the server and not counted."""
    tokenizer = Path(args.tokenizer) if args.tokenizer else resolve_tokenizer_path(resolve_model_path(args.model))
    maker = PromptMaker("text", open_tokenizer(str(tokenizer)))
    with tempfile.TemporaryDirectory(prefix="compare-bench-") as folder:

        def run_once(tool: str, index: int) -> dict[str, float]:
            stem = f"{list(TOOLS).index(tool)}-{index}"
            prompts, result = Path(folder) / f"prompts-{stem}.jsonl", Path(folder) / f"result-{stem}.json"
            seed = args.seed + 100 * index + list(TOOLS).index(tool)
            write_prompts(prompts, maker, seed, args.num_prompts, args.input_len)
            job = BenchJob(
                base_url=url, model=model, tokenizer=tokenizer, prompts=prompts, result=result,
                num_prompts=args.num_prompts, output_len=args.output_len, concurrency=args.concurrency,
            )  # fmt: skip
            return run_tool(tool, job)

        run_once(OURS, -1)
        return rounds_within(tools, args.rounds, args.max_minutes * 60, run_once)


def rounds_within(
    tools: Sequence[str], count: int, budget_s: float, run_once: Callable[[str, int], dict[str, float]]
) -> report.Rounds:
    """Run all tools in turn, at most `count` times; no round begins that would end after `budget_s` seconds."""
    rounds: report.Rounds = {tool: [] for tool in tools}
    began, longest = time.perf_counter(), 0.0
    for index in range(count):
        start = time.perf_counter()
        if index and start - began + longest > budget_s:
            print(f"{index} of {count} rounds fit into {budget_s:g} s", flush=True)
            break
        for tool in tools if index % 2 == 0 else tools[::-1]:
            rounds[tool].append(run_once(tool, index))
            print(f"round {index} {tool:<25} {rounds[tool][-1]}", flush=True)
        longest = max(longest, time.perf_counter() - start)
    return rounds


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="started in turn")
    add("--base-url", help="a running server in their place; --model is the name in its requests")
    add("--tokenizer", help="directory of the tokenizer; by default that of --model")
    add("--tools", nargs="+", choices=tuple(TOOLS), default=list(TOOLS))
    add("--rounds", type=int, default=3)
    add("--max-minutes", type=float, default=10.0, help="of a server's rounds; no round begins that would end later")
    add("--num-prompts", type=int, default=32)
    add("--concurrency", type=int, default=4)
    add("--input-len", type=int, default=256)
    add("--output-len", type=int, default=32)
    add("--threads", type=int, default=2, help="threads of a monolith; the servers of a pair have half of them each")
    report.add_write_flags(parser, "bench-clients")
    args = parser.parse_args(argv)
    if min(args.rounds, args.num_prompts, args.concurrency, args.input_len, args.threads) < 1 or args.output_len < 4:
        parser.error("counts and --input-len must be at least 1, --output-len at least 4")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked. Returns 1 when figures differ."""
    args = parse_flags(argv)
    tools = [tool for tool in args.tools if TOOLS[tool].program.exists()]
    if OURS not in tools or len(tools) < 2:
        print(f"needs {OURS} and another tool: scripts/setup_peers.sh vllm sglang_bench", file=sys.stderr)
        return 2
    bench = report.Run("bench-clients", argv, module="compare_bench")
    rounds: dict[str, report.Rounds] = {}
    if args.base_url is not None:
        rounds[args.base_url] = measure(args, args.base_url, args.model, tools)
    else:
        for kind in args.servers:
            with server_url(kind, args) as url:
                rounds[kind] = measure(args, url, args.model, tools)
    facts = bench.facts(rounds=rounds)
    bench.publish(args, document(args, facts, rounds), facts)
    return int(any(disagreements(found) for found in rounds.values()))


if __name__ == "__main__":
    sys.exit(main())
