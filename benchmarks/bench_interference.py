"""What do long prompts do to the streams beside them? ITL of decoding streams while prompts arrive, monolith and 1P1D.

    python -m benchmarks.bench_interference [--rounds 3] [--chunks 0 64 32 16 8] [--write]

Real servers: a monolith with `--threads` threads for each of `--chunks` (its `--chunked-prefill-size`; 0: whole
prompts), and `launch_local` with one prefill and one decode server that have half of the threads each. All are up for
the whole run and work in turn. A turn has `--streams` streams, alone (the first monolith and 1P1D) and while a prompt
of `--prompt-len` tokens arrives every `--every` seconds. ITL is taken over the gaps of all streams, with prompts from
the first such prompt on.

Each round ends with `--idle-prompts` such prompts one by one to idle servers, of which one more is a monolith with half
of the threads, as the prefill server has: what 1P1D's prompts wait longer than that one's is what the split costs.
`first_token` says which parts a first token's time has.
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

from benchmarks import bench_serving, first_token, report
from benchmarks.bench_serving import Job, Result, percentile
from benchmarks.first_token import FirstToken
from benchmarks.interference_report import (
    METRICS,
    MOST_PROMPTS,
    PAIR,
    Firsts,
    Rounds,
    cell,
    document,
    half_name,
    monolith_name,
)
from benchmarks.servers import local_pair, monolith


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a turn: gaps of the streams and how long they were taken, in seconds; the prompts' first tokens."""

    gaps_s: list[float]
    firsts: list[FirstToken]
    duration_s: float

    def metrics(self) -> dict[str, float | None]:
        """The table's numbers; None where there were no prompts."""
        ttfts_s = [first.ttft_s for first in self.firsts]
        return {
            "itl_p50_ms": percentile(self.gaps_s, 50) * 1e3,
            "itl_p99_ms": percentile(self.gaps_s, 99) * 1e3,
            "itl_max_ms": max(self.gaps_s) * 1e3,
            "stream_tok_s": len(self.gaps_s) / self.duration_s,
            "ttft_p50_ms": percentile(ttfts_s, 50) * 1e3 if ttfts_s else None,
            "ttft_max_ms": max(ttfts_s) * 1e3 if ttfts_s else None,
            "num_gaps": len(self.gaps_s),
            "num_prompts": len(ttfts_s),
        }


async def play(args: argparse.Namespace, url: str, seed: int, *, prompts: bool) -> Part:
    """One part on one server.

    Raises:
        RuntimeError: a request failed, or the streams did not run at the same time.
    """
    return part_of(*await send_all(args, url, seed, prompts=prompts))


def prompt_flags(args: argparse.Namespace, url: str) -> argparse.Namespace:
    """What `bench_serving` needs to make prompts and send them."""
    model = ["--prompts", args.prompts, "--tokenizer", args.model, "--vocab-size", str(args.vocab_size)]
    return bench_serving.parse_flags(["--base-url", url, "--ignore-eos", *model])


async def send_all(
    args: argparse.Namespace, url: str, seed: int, *, prompts: bool
) -> tuple[list[list[float]], list[FirstToken], float]:
    """When each stream's tokens came, the first token of each prompt, and when the first of these was sent.

    Raises:
        RuntimeError: a request failed.
    """
    rng = random.Random(seed)
    flags = prompt_flags(args, url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(flags.root + "/v1/models") as response:
            flags.model = (await response.json())["data"][0]["id"]

        async def stream() -> tuple[float, Result]:
            began = time.perf_counter()
            prompt = bench_serving.make_prompt(flags, rng, args.stream_prompt_len)
            job = Job(prompt=prompt, output_len=args.output_len, at_s=0.0)
            result = await bench_serving.run_one(session, flags, job)
            if result.error is not None:
                raise RuntimeError(f"{url}: {result.error}")
            return began, result

        async def arrive() -> FirstToken:
            return await first_token.ask(session, url, make_ids(flags, rng, args.prompt_len), args.prompt_output_len)

        streams = [asyncio.create_task(stream()) for _ in range(args.streams)]
        arrivals: list[asyncio.Task[FirstToken]] = []
        since = 0.0
        if prompts:
            await asyncio.sleep(args.every)
            since = time.perf_counter()
            while not any(stream.done() for stream in streams):
                if sum(not arrival.done() for arrival in arrivals) < MOST_PROMPTS:
                    arrivals.append(asyncio.create_task(arrive()))
                await asyncio.wait(streams, timeout=args.every, return_when=asyncio.FIRST_COMPLETED)
        times = [[began + at for at in result.arrivals_s] for began, result in await asyncio.gather(*streams)]
        return times, await asyncio.gather(*arrivals), since


async def ask_alone(args: argparse.Namespace, url: str, seed: int) -> FirstToken:
    """One prompt by itself."""
    flags = prompt_flags(args, url)
    async with aiohttp.ClientSession() as session:
        prompt = make_ids(flags, random.Random(f"{seed}/alone"), args.prompt_len)
        return await first_token.ask(session, url, prompt, args.prompt_output_len)


def make_ids(flags: argparse.Namespace, rng: random.Random, length: int) -> list[int]:
    """A prompt as token ids, which all of `--prompts` are here."""
    prompt = bench_serving.make_prompt(flags, rng, length)
    assert isinstance(prompt, list)
    return prompt


def part_of(times: Sequence[Sequence[float]], firsts: list[FirstToken], since: float) -> Part:
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
    return Part(gaps, firsts, until - since)


def run_rounds(args: argparse.Namespace, urls: dict[str, str]) -> tuple[Rounds, Firsts]:
    """Warm up, then all systems in turn, every other round in reverse order, and the prompts to idle servers.

    The monolith with half of the threads gets none but these.
    """
    for url in urls.values():
        for num_streams, num_tokens in ((args.streams, args.stream_prompt_len), (1, args.prompt_len)):
            warm = {"streams": num_streams, "stream_prompt_len": num_tokens, "output_len": 16}
            asyncio.run(send_all(argparse.Namespace(**vars(args) | warm), url, 0, prompts=False))
    first, half = monolith_name(args.chunks[0]), half_name(args)
    systems = [*map(monolith_name, args.chunks), PAIR]
    turns = [*((system, False) for system in (first, PAIR)), *((system, True) for system in systems)]
    rounds: Rounds = {turn: [] for turn in turns}
    firsts: Firsts = {f"idle: {system}": [] for system in (first, half, PAIR)}
    firsts |= {f"streams: {system}": [] for system in systems}
    for index in range(args.rounds):
        for system in systems if index % 2 == 0 else reversed(systems):
            for prompts in (False, True) if system in (first, PAIR) else (True,):
                part = asyncio.run(play(args, urls[system], args.seed + index + 1, prompts=prompts))
                found = part.metrics()
                rounds[system, prompts].append(found)
                if prompts:
                    firsts[f"streams: {system}"] += part.firsts
                text = "  ".join(f"{label} {cell(found[name], digits)}" for name, label, digits in METRICS)
                print(f"round {index} {system:<22} {'with prompts' if prompts else 'alone':<12} {text}", flush=True)
        for number in range(args.idle_prompts):
            for system in (first, half, PAIR):
                seed = args.seed + 1 + index * args.idle_prompts + number
                firsts[f"idle: {system}"].append(asyncio.run(ask_alone(args, urls[system], seed)))
    return rounds, firsts


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags; what follows `--` goes to all servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--prompts", choices=("prose", "ids"), default="prose", help=bench_serving.PROMPTS_HELP)
    add("--streams", type=int, default=8)
    add("--stream-prompt-len", type=int, default=32)
    add("--output-len", type=int, default=300, help="tokens of each stream")
    add("--prompt-len", type=int, default=1500)
    add("--prompt-output-len", type=int, default=4)
    add("--every", type=float, default=2.0, help="seconds between prompts; the first comes after as many")
    add("--idle-prompts", type=int, default=3, help="prompts by themselves to each system, each round")
    add("--chunks", type=int, nargs="+", default=[0, 64, 32, 16, 8], help="a monolith for each; 0: whole prompts")
    add("--threads", type=int, default=2, help="torch threads in all; each server of the pair has half")
    add("--rounds", type=int, default=3)
    add(
        "--pin",
        action="store_true",
        help="the servers of the pair have cores of their own, and monoliths all (--cpu-pin)",
    )
    report.add_write_flags(parser, "interference")
    add("server_flags", nargs="*", default=[], help="after --: more flags of the servers")
    args = parser.parse_args(argv)
    if min(args.streams, args.rounds, args.idle_prompts, args.output_len - 1) < 1 or args.threads < 2:
        parser.error("--streams, --rounds and --idle-prompts must be at least 1, --output-len and --threads 2")
    if args.threads % 2 or min(args.chunks) < 0 or len(set(args.chunks)) < len(args.chunks):
        parser.error("--threads must be even, --chunks 0 or more and each there once")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("interference", argv)
    print(bench.machine, flush=True)
    half = args.threads // 2
    pin = ["--cpu-pin", "auto"] if args.pin else []
    with contextlib.ExitStack() as stack:
        urls = {}
        for chunk in args.chunks:
            flags = [*args.server_flags, *pin, "--chunked-prefill-size", str(chunk or -1)]
            urls[monolith_name(chunk)] = stack.enter_context(
                monolith(args.model, args.dtype, threads=args.threads, flags=flags)
            )
        whole = [*args.server_flags, *pin, "--chunked-prefill-size", "-1"]
        urls[half_name(args)] = stack.enter_context(monolith(args.model, args.dtype, threads=half, flags=whole))
        pair = local_pair(
            args.model, args.dtype, threads=half, flags=args.server_flags, cpu_pin="auto" if args.pin else None
        )
        urls[PAIR] = stack.enter_context(pair)
        rounds, firsts = run_rounds(args, urls)
    facts = bench.facts(
        flags={name: value for name, value in vars(args).items() if name not in ("write", "results")},
        rounds=[{"system": s, "prompts": prompts, "rounds": found} for (s, prompts), found in rounds.items()],
        first_tokens={name: [dataclasses.asdict(one) for one in found] for name, found in firsts.items()},
    )
    bench.publish(args, document(args, facts, rounds, firsts), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
