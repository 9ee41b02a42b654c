"""Whether something has become slower: ratios measured anew, against those stored in `regressions-<level>.json`.

    python -m benchmarks.regressions             # exit status 1 when a ratio fell by more than its stored spread
    python -m benchmarks.regressions --write     # store what is measured, on quiet cores

Kernels stand against the bytes and products that the machine does in the same rounds (`kernels`), decode steps against
torch's (`bench_cpu_step`), servers against bare steps of as many rows or the products that a prompt takes, int8 against
bf16, and 1P1D against a monolith of as many threads. The model is SmolLM2-135M. `--only kernels,steps,servers` measures
a part, and compares that part; `--cases` measures some kernels. Each instruction-set level has ratios of its own: they
are of other processors.

Everything is measured in several passes, all of it in each, and of a ratio the medians of the passes are kept: they
spread as much as the median of another run may, and less than single rounds do.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import bench_cpu_step, kernels, ratio_table, report
from benchmarks.report import Run, Spread, busy_note, ratios, spread_of
from benchmarks.servers import monolith, monolith_and_pair
from pdserve.base.native import best_level
from pdserve.model.native.resources import Threads

PARTS = ("kernels", "steps", "servers")
STEP_BATCHES = (1, 16)
CONTEXT = 256
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 64
STEPS_A_ROUND = 32
LONG_PROMPT = 512
NUM_WEIGHTS = 106_168_320
"""Of SmolLM2-135M's layers: those that every token of a prompt is multiplied with."""


def kernel_ratios(threads: int, rounds: int, clock: Callable[[], float], wanted: str = "") -> dict[str, Spread]:
    """Each kernel's share of its limit. `wanted`: a regular expression that finds the names of cases."""
    cases = [case for case in kernels.all_cases(Threads(threads)) if re.search(wanted, case.name)]
    results = kernels.measure(cases, rounds, clock).cases
    return {f"kernel: {case.name}, share of the limit": share for case, (_, share) in zip(cases, results, strict=True)}


def step_ratios(rounds: int, clock: Callable[[], float]) -> dict[str, Spread]:
    """Decode steps of the executor, times as fast as torch's."""
    found = {}
    for batch in STEP_BATCHES:
        steps = {kind: bench_cpu_step.step_of(kind, batch, CONTEXT) for kind in bench_cpu_step.KINDS}
        times = bench_cpu_step.measure(steps, rounds, clock)
        slow = times.pop(bench_cpu_step.TORCH)
        for kind, own in times.items():
            found[f"step: {kind}, batch {batch}, times as fast as torch bf16"] = ratios(slow, own)
    return found


def answer_s(url: str, prompt: Sequence[int], num_tokens: int) -> float:
    """Seconds until a server has answered `prompt` with so many tokens."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": list(prompt), "sampling_params": params}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert len(json.load(answer)["output_ids"]) == num_tokens
    return time.perf_counter() - began


def tokens_per_s(url: str) -> float:
    """What `STREAMS` clients together get of one server."""
    prompts = [range(100 + PROMPT_TOKENS * n, 100 + PROMPT_TOKENS * (n + 1)) for n in range(STREAMS)]
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda prompt: answer_s(url, prompt, OUTPUT_TOKENS), prompts))
    return STREAMS * OUTPUT_TOKENS / (time.perf_counter() - began)


def server_ratios(threads: int, rounds: int) -> dict[str, Spread]:
    """Servers against bare steps and products, and against each other, in turns; the first round warms up."""
    step = bench_cpu_step.step_of("native bf16", STREAMS, PROMPT_TOKENS + OUTPUT_TOKENS // 2)
    x, y = (torch.randn(kernels.LIMIT_SIZE, kernels.LIMIT_SIZE).bfloat16() for _ in range(2))
    chance = random.Random(0)

    def bare_tokens_per_s() -> float:
        began = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            step()
        return STREAMS * STEPS_A_ROUND / (time.perf_counter() - began)

    def products_s() -> float:
        """Of all weights with a long prompt, at the rate of one large product."""
        began = time.perf_counter()
        x @ y
        return (time.perf_counter() - began) * LONG_PROMPT * NUM_WEIGHTS / kernels.LIMIT_SIZE**3

    found: dict[str, list[float]] = {}
    with (
        monolith_and_pair("smollm2", "bfloat16", threads=threads) as urls,
        monolith("smollm2", "bfloat16", threads=threads, flags=("--quantization", "int8")) as int8_url,
    ):
        for turn in range(rounds + 1):
            prompt = [chance.randrange(100, 40_000) for _ in range(LONG_PROMPT)]  # in no cache
            now = {f"{name} tokens/s": tokens_per_s(url) for name, url in (*urls.items(), ("int8", int8_url))}
            now |= {f"{name} prompt": 1 / answer_s(url, prompt, 1) for name, url in urls.items()}
            now |= {"bare tokens/s": bare_tokens_per_s(), "bare prompt": 1 / products_s()}
            for name, value in now.items() if turn else ():
                found.setdefault(name, []).append(value)
    return {
        f"server: {what}": ratios(found[own], found[other])
        for what, own, other in (
            (f"monolith, {STREAMS} streams, tokens/s against bare steps", "monolith tokens/s", "bare tokens/s"),
            (f"1P1D, {STREAMS} streams, tokens/s against the monolith", "1P1D tokens/s", "monolith tokens/s"),
            (f"int8, {STREAMS} streams, tokens/s against bf16", "int8 tokens/s", "monolith tokens/s"),
            (f"monolith, prompt of {LONG_PROMPT}, speed against bare products", "monolith prompt", "bare prompt"),
            (f"1P1D, prompt of {LONG_PROMPT}, speed against the monolith", "1P1D prompt", "monolith prompt"),
        )
    }


def measure(
    parts: Sequence[str], threads: int, rounds: int, clock: Callable[[], float], wanted: str = ""
) -> dict[str, Spread]:
    """All ratios of `parts`, in one pass. `wanted`: see `kernel_ratios`."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    measures: dict[str, Callable[[], dict[str, Spread]]] = {
        "kernels": lambda: kernel_ratios(threads, rounds, clock, wanted),
        "steps": lambda: step_ratios(rounds, clock),
        "servers": lambda: server_ratios(threads, rounds),
    }
    found: dict[str, Spread] = {}
    for part in parts:
        print(f"measuring {part} ...", flush=True)
        found |= measures[part]()
    return found


def over_passes(passes: Sequence[Mapping[str, Spread]]) -> dict[str, Spread]:
    """Of the medians of all passes."""
    return {name: spread_of([one[name].median for one in passes]) for name in passes[0]}


def of_parts(table: dict[str, Spread], parts: Sequence[str]) -> dict[str, Spread]:
    """The ratios of some parts."""
    kinds = tuple(f"{part.removesuffix('s')}:" for part in parts)
    return {name: spread for name, spread in table.items() if name.startswith(kinds)}


def stored_of(level: str) -> Path:
    """Where the ratios of an instruction-set level are stored."""
    return Path(__file__).with_name(f"regressions-{level}.json")


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags. Raises SystemExit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cpu-threads", type=int, default=torch.get_num_threads())
    add("--passes", type=int, default=4)
    add("--rounds", type=int, default=5, help="of a pass")
    add("--clock", choices=list(kernels.CLOCKS), default="wall", help="cpu: on a machine that others use; not servers")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"some of {','.join(PARTS)}")
    add("--cases", default="", metavar="REGEX", help="kernels whose names have it, such as 'linear.*bf16'")
    add("--write", action="store_true", help="store what is measured, instead of comparing")
    add("--table", type=Path, help="the stored ratios (default: those of this machine's instruction-set level)")
    args = parser.parse_args(argv)
    args.table = args.table or stored_of(best_level())
    args.parts = args.only.split(",")
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--only is {args.only}, but must be some of {','.join(PARTS)}")
    if args.write and (set(args.parts) != set(PARTS) or args.cases):
        parser.error("--write stores a whole table; leave --only and --cases out")
    if not args.write and not args.table.is_file():
        parser.error(f"{args.table} does not exist; make it with --write")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then compare or write."""
    args = parse_flags(argv)
    run = Run("regressions", argv, module="regressions")
    clock = kernels.CLOCKS[args.clock]
    passes, memory = [], []
    for _ in range(args.passes):
        passes.append(measure(args.parts, args.cpu_threads, args.rounds, clock, args.cases))
        memory.append(kernels.memory_gbytes_per_s(clock))
    found = over_passes(passes)
    facts, host = run.facts(), run.machine
    now = ratio_table.Table(
        date=facts["date"], revision=facts["revision"], command=facts["command"], cpu_model=host["cpu_model"],
        cpus=host["cpus"], threads=args.cpu_threads, level=best_level(), load_1m=host["load_1m"],
        note=busy_note(host["load_1m"]).strip("*"), ratios=found,
        memory_gbytes_per_s=spread_of([round(rate, 1) for rate in memory]),
    )  # fmt: skip
    if args.write:
        ratio_table.write(args.table, now)
        print(f"wrote {args.table}")
        return 0
    stored = ratio_table.read(args.table)
    before = of_parts(stored.ratios, args.parts)
    if args.cases:
        before = {name: spread for name, spread in before.items() if name in found}
    lines = ratio_table.compare(before, found)
    print("\n" + ratio_table.report_of(lines, ratio_table.doubts(stored, now)))
    return int(ratio_table.is_worse(lines))


if __name__ == "__main__":
    report.restart_without_spinning("regressions")
    sys.exit(main())
