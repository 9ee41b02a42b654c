"""What do long prompts do to the streams beside them? ITL of decoding streams while prompts arrive, monolith and 1P1D.

    python -m benchmarks.bench_interference [--rounds 7] [--chunks 0 64 32 16 8 4] [--write]

Real servers: a monolith with `--threads` threads for each of `--chunks` (its `--chunked-prefill-size`; 0: whole
prompts), and `launch_local` with one prefill and one decode server that have half of the threads each. All are up for
the whole run and work in turn, each round in another order, after one that does not count. A turn has `--streams`
streams, alone (the first monolith and 1P1D) and beside a client that sends prompts of `--prompt-len` tokens, each as
soon as it has the answer to the one before. ITL is taken over the gaps of all streams in `--seconds` from the first
such prompt on, or until the answer to that prompt where this takes longer. Streams start anew in each turn and go on
until the client has its last answer.

Each round ends with `--idle-prompts` such prompts one by one to idle servers, of which one more is a monolith with half
of the threads, as the prefill server has: what 1P1D's prompts wait longer than that one's is what the split costs.
With `--foreign N` each round ends with N busy processes beside the pair (`foreign`).
`first_token` says which parts a first token's time has. Streams and idle prompts of a round are the same for all
systems, and so should be their tokens: the report says how many are. `readme_charts` has the same load on other
projects' servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import foreign, report
from benchmarks.answers import INCREMENTAL, Answer, read_answer
from benchmarks.first_token import first_token_of
from benchmarks.interference_report import (
    METRICS,
    PAIR,
    Found,
    cell,
    document,
    half_name,
    monolith_name,
)
from benchmarks.load import PROMPT_KINDS, PROMPTS_HELP, make_prompt
from benchmarks.servers import local_pair, monolith
from pdserve.bench.metrics import percentile

POOL_TOKENS = 32768
"""Of each server's KV pool: all of them, full of prefixes, must go into memory together."""
PAUSE_S = 1.5
"""Between two turns: what servers do behind requests is over then."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a turn: what came of streams and prompts, and in which time gaps count, as `time.perf_counter`."""

    streams: list[Answer]
    prompts: list[Answer]
    since_s: float
    until_s: float

    def gaps_s(self) -> list[float]:
        """Seconds between two events of a stream, all within the time that counts."""
        pairs = (pair for stream in self.streams for pair in itertools.pairwise(stream.came_s))
        return [b - a for a, b in pairs if self.since_s <= a and b <= self.until_s]

    def metrics(self) -> dict[str, float | None]:
        """The table's numbers; None where there were no prompts.

        Raises:
            RuntimeError: prompts were sent and none of them was answered while gaps counted.
        """
        gaps_s, ttfts_s = self.gaps_s(), [prompt.ttft_s for prompt in self.prompts]
        through = sum(prompt.came_s[-1] <= self.until_s for prompt in self.prompts)
        if ttfts_s and not through:
            raise RuntimeError("no prompt was through while gaps counted; raise --seconds")
        return {
            "itl_p50_ms": percentile(gaps_s, 50) * 1e3,
            "itl_p99_ms": percentile(gaps_s, 99) * 1e3,
            "itl_max_ms": max(gaps_s) * 1e3,
            "stream_tok_s": len(gaps_s) / (self.until_s - self.since_s),
            "ttft_p50_ms": percentile(ttfts_s, 50) * 1e3 if ttfts_s else None,
            "ttft_max_ms": max(ttfts_s) * 1e3 if ttfts_s else None,
            "num_gaps": len(gaps_s),
            "num_prompts": len(ttfts_s),
            "num_prompts_through": through,
        }


async def play(args: argparse.Namespace, url: str, seed: int, *, prompts: bool) -> Part:
    """One part on one server.

    Raises:
        RuntimeError: a request failed, or a stream was over too soon.
    """
    rng = random.Random(seed)
    asked = [make_ids(args, rng, args.stream_prompt_len) for _ in range(args.streams)]
    streams = [Answer() for _ in asked]
    answers: list[Answer] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        tasks = [
            asyncio.create_task(read_answer(session, url, prompt, args.output_len, stream))
            for prompt, stream in zip(asked, streams, strict=True)
        ]
        try:
            while not all(stream.came_s for stream in streams):
                check_all_run(tasks)
                await asyncio.sleep(0.01)
            await asyncio.sleep(args.lead)
            since_s = time.perf_counter()
            until_s = since_s + args.seconds
            while prompts and time.perf_counter() < until_s:
                answers.append(Answer())
                prompt = make_ids(args, rng, args.prompt_len)
                await read_answer(session, url, prompt, args.prompt_output_len, answers[-1])
            if answers:
                until_s = max(until_s, answers[0].came_s[-1])
            await asyncio.sleep(max(0.0, until_s - time.perf_counter()))
            check_all_run(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return Part(streams, answers, since_s, until_s)


def check_all_run(streams: Sequence[asyncio.Task[None]]) -> None:
    """Raises RuntimeError where one is over, or what it failed with."""
    for stream in streams:
        if stream.done():
            stream.result()
            raise RuntimeError("a stream was over before the last prompt; raise --output-len or lower --seconds")


async def ask_alone(args: argparse.Namespace, url: str, seed: int) -> Answer:
    """One prompt by itself."""
    answer = Answer()
    async with aiohttp.ClientSession() as session:
        prompt = make_ids(args, random.Random(f"{seed}/alone"), args.prompt_len)
        await read_answer(session, url, prompt, args.idle_output_len, answer)
    return answer


def make_ids(args: argparse.Namespace, rng: random.Random, length: int) -> list[int]:
    """A prompt of the flags' kind."""
    prose_of = args.model if args.prompts == "prose" else None
    return make_prompt(rng, length, vocab_size=args.vocab_size, prose_of=prose_of)


def run_rounds(args: argparse.Namespace, urls: dict[str, str]) -> Found:
    """A round that does not count, and then all systems in turn, in each round in another order; prompts to idle
    servers behind them. The monolith with half of the threads gets none but these.
    """
    first, half = monolith_name(args.chunks[0]), half_name(args)
    systems = [*map(monolith_name, args.chunks), PAIR]
    found = Found.of(systems, [first, PAIR], [first, half, PAIR])
    beside = [system for system in (PAIR, foreign.PAIR_EQUAL) if args.foreign]
    for index in range(args.rounds + 1):
        counts = index > 0
        for system in random.Random(f"{args.seed}/{index}").sample(systems, len(systems)):
            for prompts in (False, True) if system in (first, PAIR) else (True,):
                time.sleep(PAUSE_S)
                part = asyncio.run(play(args, urls[system], args.seed + index, prompts=prompts))
                metrics = part.metrics()
                text = "  ".join(f"{label} {cell(metrics[name], digits)}" for name, label, digits in METRICS)
                print(f"round {index} {system:<22} {'with prompts' if prompts else 'alone':<12} {text}", flush=True)
                if counts:
                    found.add(system, metrics, part.streams, [first_token_of(answer) for answer in part.prompts])
        for number in range(args.idle_prompts):
            for system in (first, half, PAIR):
                time.sleep(PAUSE_S)
                answer = asyncio.run(ask_alone(args, urls[system], args.seed + index * args.idle_prompts + number))
                if counts:
                    found.add_idle(system, answer, first_token_of(answer))
        for system in random.Random(f"{args.seed}/{index}/foreign").sample(beside, len(beside)):
            time.sleep(PAUSE_S)
            row = beside_foreign(args, system, urls[system], args.seed + index)
            print(f"round {index} {row}", flush=True)
            if counts:
                found.foreign.append(row)
    return found


NEW_PROMPTS = 1_000_000
"""Added to the seed of prompts that no other part sends."""


def beside_foreign(args: argparse.Namespace, system: str, url: str, seed: int) -> foreign.BesideForeign:
    """Prompts one by one to a pair beside `--foreign` busy processes, then streams with prompts.

    The pair has seen none of the prompts: its prefix cache would answer for it.
    """
    seed += NEW_PROMPTS
    with foreign.busy_processes(args.foreign):
        idle = [asyncio.run(ask_alone(args, url, seed * 1000 + number)) for number in range(args.idle_prompts)]
        part = asyncio.run(play(args, url, seed, prompts=True))
    prompts_s = [prompt.ttft_s for prompt in part.prompts]
    seconds = part.until_s - part.since_s
    return foreign.BesideForeign.of(system, [one.ttft_s for one in idle], prompts_s, part.gaps_s(), seconds)


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags; what follows `--` goes to all servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--prompts", choices=PROMPT_KINDS, default="prose", help=PROMPTS_HELP)
    add("--streams", type=int, default=8)
    add("--stream-prompt-len", type=int, default=32)
    add("--output-len", type=int, default=2000, help="tokens of each stream at most: it must outlast the prompts")
    add("--seconds", type=float, default=6.0, help="in which prompts are sent and gaps count, in each turn")
    add("--lead", type=float, default=0.5, help="seconds from the last stream's first token to the first prompt")
    add("--prompt-len", type=int, default=1500)
    add("--prompt-output-len", type=int, default=4)
    add("--idle-prompts", type=int, default=1, help="prompts by themselves to each system, each round")
    add("--idle-output-len", type=int, default=32, help="tokens out of each of these")
    add("--chunks", type=int, nargs="+", default=[0, 64, 32, 16, 8, 4], help="a monolith for each; 0: whole prompts")
    add("--threads", type=int, default=2, help="torch threads in all; each server of the pair has half")
    add("--rounds", type=int, default=7)
    add(
        "--pin",
        action="store_true",
        help="the servers of the pair have cores of their own, and monoliths all (--cpu-pin)",
    )
    add("--foreign", type=int, default=0, help="busy processes that are not the pair's, in a part of their own")
    report.add_write_flags(parser, "interference")
    add("server_flags", nargs="*", default=[], help="after --: more flags of the servers")
    args = parser.parse_args(argv)
    if min(args.streams, args.rounds, args.idle_prompts, args.output_len - 1) < 1 or args.threads < 2:
        parser.error("--streams, --rounds and --idle-prompts must be at least 1, --output-len and --threads 2")
    if args.threads % 2 or min(args.chunks) < 0 or len(set(args.chunks)) < len(args.chunks):
        parser.error("--threads must be even, --chunks 0 or more and each there once")
    if args.seconds <= 0 or min(args.lead, args.foreign) < 0:
        parser.error("--seconds must be above 0, --lead and --foreign not below")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("interference", argv)
    print(bench.machine, flush=True)
    half = args.threads // 2
    pin = ["--cpu-pin", "auto"] if args.pin else []
    common = [INCREMENTAL, "--max-total-tokens", str(POOL_TOKENS), *args.server_flags]
    with contextlib.ExitStack() as stack:
        urls = {}
        for chunk in args.chunks:
            flags = [*common, *pin, "--chunked-prefill-size", str(chunk or -1)]
            urls[monolith_name(chunk)] = stack.enter_context(
                monolith(args.model, args.dtype, threads=args.threads, flags=flags)
            )
        whole = [*common, *pin, "--chunked-prefill-size", "-1"]
        urls[half_name(args)] = stack.enter_context(monolith(args.model, args.dtype, threads=half, flags=whole))
        cpu_pin = "auto" if args.pin else None
        pairs = {PAIR: common}
        if args.foreign:
            pairs[foreign.PAIR_EQUAL] = [*common, "--prefill-flags=--cpu-nice 0"]
        for name, flags in pairs.items():
            pair = local_pair(args.model, args.dtype, threads=half, flags=flags, cpu_pin=cpu_pin)
            urls[name] = stack.enter_context(pair)
        found = run_rounds(args, urls)
    facts = bench.facts(
        flags={name: value for name, value in vars(args).items() if name not in ("write", "results")},
        **found.facts(),
    )
    bench.publish(args, document(args, facts, found), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
