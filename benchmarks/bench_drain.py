"""What a drained decode server costs its streams: by migration, and by killing it and recomputing.

    python -m benchmarks.bench_drain [--streams 32] [--write]

One prefill and two decode servers of one thread each stand behind a router with `--drain-migrate --retry-streams 1`.
All streams begin at the first decode server. Four runs of the same greedy requests:

    steady    nothing happens
    drain     the second decode server takes requests again, and the first is drained: all streams move
    kill      the same, but the first is killed: all streams are computed again at the second
    (a warm-up before them)

The exit status is 1 for a token that differs from the steady run's in the drain, a gap of a stream there that is longer
than the steady run's p99 ITL and a second, or a stream that ran when the server was drained and did not move.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.servers import GRACE_S, Server, server_flags
from pdserve.base.process import end_all
from pdserve.bench.metrics import percentile

MOST_EXTRA_S = 1.0
"""Seconds that a gap of a drained stream may be longer than the steady p99 ITL."""
STREAM_S = 180.0


@dataclasses.dataclass
class Stream:
    """One stream: when its events came, in seconds, and its tokens. `error`: how it ended early; None: it is whole."""

    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None

    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    def longest_gap_s(self, since_s: float) -> float:
        """The longest gap that ends after `since_s`; 0.0 without one."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((b - a for a, b in pairs if b > since_s), default=0.0)


@dataclasses.dataclass(frozen=True)
class Summary:
    """One run. `wrong`: streams with other tokens than the steady run's. `pauses_s`: the longest gap of each stream.

    `running`: streams that had begun and not ended when the event of the run happened.
    """

    name: str
    running: int
    wrong: int
    failed: int
    itl_p50_s: float
    itl_p99_s: float
    pauses_s: list[float]
    took_s: float

    @classmethod
    def of(cls, name: str, streams: Sequence[Stream], expected: Sequence[Stream], since_s: float) -> Summary:
        """`since_s`: when the event of the run happened."""
        gaps = [gap for stream in streams for gap in stream.gaps()]
        pairs = zip(streams, expected, strict=True)
        return cls(
            name,
            sum(bool(one.arrivals_s) and one.arrivals_s[0] <= since_s < one.arrivals_s[-1] for one in streams),
            sum(one.error is None and one.token_ids != other.token_ids for one, other in pairs),
            sum(stream.error is not None for stream in streams),
            percentile(gaps, 50),
            percentile(gaps, 99),
            [stream.longest_gap_s(since_s) for stream in streams],
            max(stream.arrivals_s[-1] for stream in streams) - min(stream.arrivals_s[0] for stream in streams),
        )


class Deployment:
    """One prefill and two decode servers, and the router before them."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._children: list[Any] = []
        stack.callback(lambda: end_all(self._children, GRACE_S))
        flags = {mode: [*server_flags(args.model, args.dtype, mode, 1), *FLAGS] for mode in ("prefill", "decode")}
        started = [self._start(f"decode-{number}", "launch_server", flags["decode"]) for number in range(2)]
        self.prefill = self._start("prefill", "launch_server", flags["prefill"]).wait()
        self.pids = [server.child.pid for server in started]
        self.decodes = [server.wait() for server in started]
        argv = ["--pd-disaggregation", "--port", "0", "--drain-migrate", "--retry-streams", "1"]
        argv += ["--policy", "round_robin", "--prefill", self.prefill.url, str(self.prefill.bootstrap_port)]
        for decode in self.decodes:
            argv += ["--decode", decode.url]
        self.url = self._start("router", "launch_router", argv).wait().url

    def _start(self, name: str, module: str, flags: Sequence[str]) -> Server:
        server = Server(name, f"pdserve.{module}", flags, 1)
        self._children.append(server.child)
        return server

    async def drain(self, session: aiohttp.ClientSession, number: int, *, draining: bool) -> None:
        """Drain a decode server, or let it serve again."""
        url = f"{self.url}/workers/{self.decodes[number].url}"
        async with session.put(url, json={"draining": draining}) as response:
            response.raise_for_status()

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """The router's counters of migrations, by their result."""
        async with session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            line.rsplit(" ", 1)[0].removeprefix("pdserve_router_"): float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(("pdserve_router_migra", "pdserve_router_stream_retries_total"))
            and "created" not in line
        }


FLAGS = ("--disaggregation-transfer-backend", "shm", "--incremental-streaming-output", "--max-running-requests", "64")


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """The token ids of each stream's prompt."""
    rng = random.Random(args.seed)
    return [[rng.randrange(10, args.vocab_size) for _ in range(args.input_len)] for _ in range(args.streams)]


async def read_stream(session: aiohttp.ClientSession, url: str, input_ids: list[int], num_tokens: int) -> Stream:
    """Read one stream to its end."""
    found = Stream()
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": params, "stream": True}
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    found.error = str(event["error"])
                    break
                found.arrivals_s.append(time.perf_counter())
                found.token_ids += event["output_ids"]
    except (aiohttp.ClientError, TimeoutError) as error:
        found.error = repr(error)
    if found.error is None and len(found.token_ids) != num_tokens:
        found.error = f"{len(found.token_ids)} of {num_tokens} tokens"
    return found


async def run(
    args: argparse.Namespace,
    session: aiohttp.ClientSession,
    farm: Deployment,
    happen: Callable[[], Awaitable[None]] | None = None,
) -> tuple[list[Stream], float]:
    """All streams, which begin at the first decode server; `happen` in their middle. Returns them, and when it was."""
    await farm.drain(session, 0, draining=False)
    await farm.drain(session, 1, draining=True)
    tasks = [
        asyncio.create_task(read_stream(session, farm.url, input_ids, args.output_len)) for input_ids in prompts(args)
    ]
    while not all(task.done() for task in tasks):  # until all run at the first server
        async with session.get(f"{farm.decodes[0].url}/get_load") as response:
            load = (await response.json())[0]
        if load["num_running_reqs"] >= args.streams:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(args.after_s)
    at_s = time.perf_counter()
    if happen is not None:
        await farm.drain(session, 1, draining=False)
        await happen()
    return list(await asyncio.gather(*tasks)), at_s


async def measure(args: argparse.Namespace, farm: Deployment) -> tuple[list[Summary], dict[str, float]]:
    """The runs, and the router's counters behind the drain."""
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await run(args, session, farm)
        steady, at_s = await run(args, session, farm)
        found = [Summary.of("steady", steady, steady, at_s)]
        drained, at_s = await run(args, session, farm, lambda: farm.drain(session, 0, draining=True))
        found.append(Summary.of("drain by migration", drained, steady, at_s))
        counters = await farm.metrics(session)

        async def kill() -> None:
            os.kill(farm.pids[0], signal.SIGKILL)

        killed, at_s = await run(args, session, farm, kill)
        found.append(Summary.of("kill, computed again", killed, steady, at_s))
    return found, counters


MOVED = 'migrations_total{result="moved"}'
"""The router's counter of streams that have moved, see `Deployment.metrics`."""


def faults(args: argparse.Namespace, found: Sequence[Summary], counters: Mapping[str, float]) -> Iterator[str]:
    """Yield what the drain did wrong. `counters`: the router's behind the drain."""
    steady, drained = found[0], found[1]
    if drained.running != args.streams:
        yield f"{drained.running} of {args.streams} streams ran at the drain"
    if counters.get(MOVED, 0) < drained.running:
        yield f"{drained.running - counters.get(MOVED, 0):.0f} of {drained.running} running streams did not move"
    if steady.failed or drained.failed:
        yield f"{steady.failed + drained.failed} streams failed"
    if drained.wrong:
        yield f"{drained.wrong} streams have other tokens"
    most_s = steady.itl_p99_s + MOST_EXTRA_S
    if max(drained.pauses_s) > most_s:
        yield f"a gap of {max(drained.pauses_s):.3f} s, more than {most_s:.3f} s"


def document(args: argparse.Namespace, facts: dict[str, Any], found: Sequence[Summary]) -> str:
    """The report in Markdown."""
    rows = [
        [
            one.name, str(one.running), str(one.failed), str(one.wrong),
            f"{1e3 * one.itl_p50_s:.0f}", f"{1e3 * one.itl_p99_s:.0f}",
            f"{1e3 * percentile(one.pauses_s, 50):.0f}", f"{1e3 * max(one.pauses_s):.0f}", f"{one.took_s:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    header = ["run", "running then", "failed", "other tokens", "ITL p50", "ITL p99"]
    header += ["longest gap p50", "longest gap", "took, s"]
    wrong = list(faults(args, found, facts["counters"]))
    verdict = "The drain meets its limit." if not wrong else f"The drain misses its limit: {'; '.join(wrong)}."
    counters = ", ".join(f"{name} {value:.0f}" for name, value in facts["counters"].items())
    return f"""# A drained decode server, {facts["date"]}

{args.model}, {args.dtype}: {args.streams} streams of {args.output_len} tokens, prompts of {args.input_len}, all at \
one of two decode servers. In the middle that server is drained, or killed. Gaps and ITL in milliseconds; the longest \
gap of each stream from then on. In the killed run the answer so far is computed again in chunks, which may change \
last bits.

{report.markdown_table(header, rows)}

{verdict} Limit: every stream runs at the drain and moves, no other token, no failed stream, and no gap longer than \
the steady p99 ITL and 1 s. The router's counters behind the drain: {counters}.

{report.footer(facts, own_load=2)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--streams", type=int, default=32)
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=256, help="tokens of a stream; it must run at the drain")
    add("--after-s", type=float, default=1.0, help="seconds from when all streams run to the drain")
    report.add_write_flags(parser, "drain")
    args = parser.parse_args(argv)
    if args.streams < 1 or args.output_len < 2:
        parser.error("--streams must be at least 1, --output-len 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; 1 when the drain misses its limit."""
    args = parse_flags(argv)
    bench = report.Run("drain", argv)
    with contextlib.ExitStack() as stack:
        found, counters = asyncio.run(measure(args, Deployment(args, stack)))
    facts = bench.facts(runs=[dataclasses.asdict(one) for one in found], counters=counters)
    bench.publish(args, document(args, facts, found), facts)
    return 1 if any(faults(args, found, counters)) else 0


if __name__ == "__main__":
    sys.exit(main())
