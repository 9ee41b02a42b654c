"""What do long prompts do to the streams beside them? ITL of decoding streams while prompts arrive, monolith and 1P1D.

    python -m benchmarks.bench_interference [--rounds 3] [--write]

Real servers: a monolith with `--threads` threads, and `launch_local` with one prefill and one decode server that have
half of them each. Both are up for the whole run and work in turn. Each turn has two parts with the same `--streams`
streams: alone, and while a prompt of `--prompt-len` tokens arrives every `--every` seconds. ITL is taken over
the gaps of all streams, in the second part from the first such prompt on.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench_serving, report
from benchmarks.bench_serving import Job, Result, percentile
from benchmarks.servers import local_pair, monolith

SYSTEMS = ("monolith", "1P1D")
METRICS = (
    ("itl_p50_ms", "ITL p50, ms", 1),
    ("itl_p99_ms", "ITL p99, ms", 1),
    ("itl_max_ms", "ITL max, ms", 0),
    ("stream_tok_s", "streams' tok/s", 1),
    ("ttft_p50_ms", "prompts' TTFT p50, ms", 0),
    ("ttft_max_ms", "max, ms", 0),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a turn: gaps of the streams, times to the first token of the prompts, all in seconds."""

    gaps_s: list[float]
    ttfts_s: list[float]
    duration_s: float

    def metrics(self) -> dict[str, float | None]:
        """The table's numbers; None where there were no prompts."""
        return {
            "itl_p50_ms": percentile(self.gaps_s, 50) * 1e3,
            "itl_p99_ms": percentile(self.gaps_s, 99) * 1e3,
            "itl_max_ms": max(self.gaps_s) * 1e3,
            "stream_tok_s": len(self.gaps_s) / self.duration_s,
            "ttft_p50_ms": percentile(self.ttfts_s, 50) * 1e3 if self.ttfts_s else None,
            "ttft_max_ms": max(self.ttfts_s) * 1e3 if self.ttfts_s else None,
            "num_gaps": len(self.gaps_s),
            "num_prompts": len(self.ttfts_s),
        }


MOST_PROMPTS = 2
"""None arrives while so many are unfinished: a server that cannot keep up would never get through with them."""
Rounds = dict[tuple[str, bool], list[dict[str, float | None]]]
"""For each system, without (False) and with prompts, the metrics of each round."""


async def play(args: argparse.Namespace, url: str, seed: int, *, prompts: bool) -> Part:
    """One part on one server.

    Raises:
        RuntimeError: a request failed, or the streams did not run at the same time.
    """
    return part_of(*await send_all(args, url, seed, prompts=prompts))


async def send_all(
    args: argparse.Namespace, url: str, seed: int, *, prompts: bool
) -> tuple[list[list[float]], list[float], float]:
    """When each stream's tokens came, the TTFT of each prompt, and when the first of these was sent.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(seed)
    model = ["--prompts", args.prompts, "--tokenizer", args.model, "--vocab-size", str(args.vocab_size)]
    flags = bench_serving.parse_flags(["--base-url", url, "--ignore-eos", *model])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(flags.root + "/v1/models") as response:
            flags.model = (await response.json())["data"][0]["id"]

        async def send(num_tokens: int, output_len: int) -> tuple[float, Result]:
            began = time.perf_counter()
            prompt = bench_serving.make_prompt(flags, rng, num_tokens)
            job = Job(prompt=prompt, output_len=output_len, at_s=0.0)
            result = await bench_serving.run_one(session, flags, job)
            if result.error is not None:
                raise RuntimeError(f"{url}: {result.error}")
            return began, result

        streams = [asyncio.create_task(send(args.stream_prompt_len, args.output_len)) for _ in range(args.streams)]
        arrivals: list[asyncio.Task[tuple[float, Result]]] = []
        since = 0.0
        if prompts:
            await asyncio.sleep(args.every)
            since = time.perf_counter()
            while not any(stream.done() for stream in streams):
                if sum(not arrival.done() for arrival in arrivals) < MOST_PROMPTS:
                    arrivals.append(asyncio.create_task(send(args.prompt_len, args.prompt_output_len)))
                await asyncio.wait(streams, timeout=args.every, return_when=asyncio.FIRST_COMPLETED)
        times = [[began + at for at in result.arrivals_s] for began, result in await asyncio.gather(*streams)]
        ttfts = [result.arrivals_s[0] for _, result in await asyncio.gather(*arrivals) if result.arrivals_s]
    return times, ttfts, since


def part_of(times: Sequence[Sequence[float]], ttfts_s: list[float], since: float) -> Part:
    """Gaps that began at `since` or later, and while all streams ran: once one has ended, steps are cheaper.

    Raises:
        RuntimeError: there are none.
    """
    since = max(since, max(stream[0] for stream in times))
    until = min(stream[-1] for stream in times)
    pairs = [pair for stream in times for pair in itertools.pairwise(stream)]
    gaps = [b - a for a, b in pairs if since <= a and b <= until]
    if not gaps:
        raise RuntimeError("the streams were over before the first prompt came; raise --output-len or lower --every")
    return Part(gaps, ttfts_s, until - since)


def run_rounds(args: argparse.Namespace, urls: dict[str, str]) -> Rounds:
    """Warm up, then both systems in turn, the first one in turn, too."""
    for url in urls.values():
        for num_streams, num_tokens in ((args.streams, args.stream_prompt_len), (1, args.prompt_len)):
            warm = {"streams": num_streams, "stream_prompt_len": num_tokens, "output_len": 64}
            asyncio.run(send_all(argparse.Namespace(**vars(args) | warm), url, 0, prompts=False))
    rounds: Rounds = {(system, prompts): [] for prompts in (False, True) for system in SYSTEMS}
    for index in range(args.rounds):
        for system in SYSTEMS if index % 2 == 0 else reversed(SYSTEMS):
            for prompts in (False, True):
                found = asyncio.run(play(args, urls[system], args.seed + index + 1, prompts=prompts)).metrics()
                rounds[system, prompts].append(found)
                text = "  ".join(f"{label} {cell(found[name], digits)}" for name, label, digits in METRICS)
                print(f"round {index} {system:<8} {'with prompts' if prompts else 'alone':<12} {text}", flush=True)
    return rounds


def cell(value: float | None, digits: int) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def values(found: Sequence[dict[str, float | None]], name: str) -> list[float]:
    """One metric over the rounds that have it."""
    return [value for one in found if (value := one[name]) is not None]


def absolute_table(rounds: Rounds) -> str:
    """Medians with their range."""
    rows = []
    for (system, prompts), found in rounds.items():
        columns = [(values(found, name), digits) for name, _, digits in METRICS]
        cells = [report.spread_of(column).show(digits) if column else "" for column, digits in columns]
        rows.append([system, "with prompts" if prompts else "alone", *cells])
    return report.markdown_table(["system", "streams", *(label for _, label, _ in METRICS)], rows, num_text=2)


def ratio_table(rounds: Rounds) -> str:
    """What the prompts do to each system's streams, and the systems against each other while prompts arrive."""
    pairs = [(f"{system}: with prompts / alone", rounds[system, True], rounds[system, False]) for system in SYSTEMS]
    pairs.append(("with prompts: 1P1D / monolith", rounds["1P1D", True], rounds["monolith", True]))
    rows = []
    for name, ours, theirs in pairs:
        cells = []
        for metric, _, _ in METRICS:
            mine, peer = values(ours, metric), values(theirs, metric)
            cells.append(report.ratios(mine, peer).show(2, "x") if len(mine) == len(peer) else "")
        rows.append([name, *cells])
    return report.markdown_table(["ratio", *(label.partition(",")[0] for _, label, _ in METRICS)], rows)


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: Rounds) -> str:
    """The whole report in Markdown."""
    notes = [
        f"Threads: monolith {args.threads}, prefill and decode {args.threads // 2} each; router and load generator "
        f"share these cores. More flags of all servers: `{' '.join(args.server_flags) or 'none'}`."
    ]
    num_prompts = sum(int(one["num_prompts"] or 0) for system in SYSTEMS for one in rounds[system, True])
    return f"""# Long prompts beside decoding streams, {facts["date"]}

{args.model}, {args.dtype}: {args.streams} streams of {args.output_len} tokens (prompts of {args.stream_prompt_len}); \
prompts of {args.prompt_len} tokens, {args.prompt_output_len} out, every {args.every:g} s, {num_prompts} in \
all. Median of {args.rounds} interleaved rounds (least-most).

{absolute_table(rounds)}

Ratios of the same round (ITL and TTFT: lower is better):

{ratio_table(rounds)}

{report.footer(facts, notes, own_load=2)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags; what follows `--` goes to all servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--prompts", choices=("prose", "ids"), default="prose", help=bench_serving.PROMPTS_HELP)
    add("--streams", type=int, default=8)
    add("--stream-prompt-len", type=int, default=32)
    add("--output-len", type=int, default=500, help="tokens of each stream")
    add("--prompt-len", type=int, default=1500)
    add("--prompt-output-len", type=int, default=4)
    add("--every", type=float, default=2.0, help="seconds between prompts; the first comes after as many")
    add("--threads", type=int, default=2, help="torch threads in all; each server of the pair has half")
    add("--rounds", type=int, default=3)
    report.add_write_flags(parser, "interference")
    add("server_flags", nargs="*", default=[], help="after --: more flags of the servers")
    args = parser.parse_args(argv)
    if min(args.streams, args.rounds, args.output_len - 1) < 1 or args.threads < 2 or args.threads % 2:
        parser.error("--streams and --rounds must be at least 1, --output-len 2, --threads even")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("interference", argv)
    print(bench.machine, flush=True)
    with monolith(args.model, args.dtype, threads=args.threads, flags=args.server_flags) as mono:
        with local_pair(args.model, args.dtype, threads=args.threads // 2, flags=args.server_flags) as pair:
            rounds = run_rounds(args, {"monolith": mono, "1P1D": pair})
    facts = bench.facts(
        rounds=[{"system": s, "prompts": prompts, "rounds": found} for (s, prompts), found in rounds.items()],
    )
    text = document(args, facts, rounds)
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
