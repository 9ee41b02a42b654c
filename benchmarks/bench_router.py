"""What the router itself costs: CPU time a request, requests a second on one core, latency added to a worker's own.

    python -m benchmarks.bench_router [--write] [--cases plain stream ...] [--peer sglang_router]

Workers that answer at once (`router_worker`) stand behind the router; pairs, so that each request is two to workers.
The router has one core to itself where there are two. Requests a second are the closed loop of `--concurrency`
connections; CPU time is the router process's own, so that what else the machine does matters less. Latency is of one
connection alone, asked through the router and directly in turns; the fastest tenth of it says what the router does, the
median what the machine did meanwhile. `--peer sglang_router` measures the Rust router the
same way, if that package is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.router_worker import Client
from pdserve.base.process import Child
from pdserve.bench.metrics import percentile

OURS, PEER = "pdserve", "sglang_router"
READY_S = 60.0
NUM_PAIRS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """What is asked: `events` 0 is a plain answer; `policy` under the name that both routers know."""

    name: str
    events: int
    prompt_chars: int
    policy: str = "random"


CASES = {
    case.name: case
    for case in (
        Case("plain", 0, 200),
        Case("stream of 64", 64, 200),
        Case("long prompt", 0, 32_000),
        Case("long prompt, cache_aware", 0, 32_000, "cache_aware"),
        Case("plain, power_of_two", 0, 200, "power_of_two"),
    )
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One router in one case; times in milliseconds of a request."""

    router: str
    case: Case
    per_second: float
    cpu_ms: float
    direct_p10_ms: float
    through_p10_ms: float
    direct_p50_ms: float
    through_p50_ms: float

    @property
    def added_ms(self) -> float:
        """Latency through the router less that of the worker alone, of the fastest tenth of each."""
        return self.through_p10_ms - self.direct_p10_ms


def request_bytes(case: Case, number: int) -> bytes:
    """A whole `/generate` request; prompts differ from their first character on."""
    prompt = f"{number:08x}" * (case.prompt_chars // 8)
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 8}, "stream": case.events > 0}
    raw = json.dumps(body | ({"max_tokens": case.events} if case.events else {}), separators=(",", ":")).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[int]]:
    """Ports of `count` workers in processes of their own."""
    argv = [sys.executable, "-m", "benchmarks.router_worker"]
    started = [subprocess.Popen(argv, cwd=report.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [int(one.stdout.readline()) for one in started if one.stdout is not None]
    finally:
        for one in started:
            one.kill()
            one.wait()


@contextlib.contextmanager
def ours(ports: Sequence[int], policy: str) -> Iterator[tuple[int, int]]:
    """Our router before these workers, half of them prefill: its port and pid."""
    argv = [sys.executable, "-m", "pdserve.launch_router", "--port", "0", "--log-level", "warning"]
    child = Child("router", [*argv, *_worker_flags(ports), "--policy", policy])
    try:
        yield int(child.wait_ready(READY_S).url.rsplit(":", 1)[1]), child.pid
    finally:
        child.end(READY_S)


@contextlib.contextmanager
def peer(ports: Sequence[int], policy: str) -> Iterator[tuple[int, int]]:
    """sglang-router before these workers."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, metrics = (each.getsockname()[1] for each in (one, two))
    argv = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prometheus-port", str(metrics), "--log-level", "error", "--policy", policy, *_worker_flags(ports)]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port, child.pid
    finally:
        child.kill()
        child.wait()


def _worker_flags(ports: Sequence[int]) -> list[str]:
    half = len(ports) // 2
    flags = ["--pd-disaggregation"]
    for port in ports[:half]:
        flags += ["--prefill", f"http://127.0.0.1:{port}", "none"]
    for port in ports[half:]:
        flags += ["--decode", f"http://127.0.0.1:{port}"]
    return flags


async def until_ready(port: int) -> None:
    """Wait until the router has found its workers: it answers a request."""
    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://127.0.0.1:{port}/generate", json={"text": "a"}) as response:
                    if response.status == 200:
                        return
            assert time.monotonic() < deadline, "the router finds no workers"
            await asyncio.sleep(0.05)


async def closed_loop(port: int, case: Case, concurrency: int, seconds: float) -> tuple[int, float]:
    """As many requests as `concurrency` connections get answered in turn: their number, and the time it took."""
    number, count = 0, 0
    end = time.perf_counter() + seconds

    async def one() -> None:
        nonlocal number, count
        client = await Client.open(port)
        while time.perf_counter() < end:
            number += 1
            await client.ask(request_bytes(case, number))
            count += 1
        client.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    return count, time.perf_counter() - begun


async def latencies(through: int, direct: int, case: Case, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of requests through the router and directly to a worker, in turns, one at a time."""
    clients = [await Client.open(through), await Client.open(direct)]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(count):
        for client, times in zip(clients, found, strict=True):
            data = request_bytes(case, number)
            begun = time.perf_counter()
            await client.ask(data)
            times.append((time.perf_counter() - begun) * 1e3)
    for client in clients:
        client.close()
    return found


async def measure(name: str, port: int, pid: int, direct: int, case: Case, args: argparse.Namespace) -> Measured:
    """One router that runs, in one case."""
    await until_ready(port)
    process = psutil.Process(pid)
    if len(os.sched_getaffinity(0)) > 1:
        process.cpu_affinity([max(os.sched_getaffinity(0))])
    await closed_loop(port, case, args.concurrency, args.seconds / 4)
    before = process.cpu_times()
    count, seconds = await closed_loop(port, case, args.concurrency, args.seconds)
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    through, alone = await latencies(port, direct, case, args.alone)
    return Measured(
        name,
        case,
        count / seconds,
        cpu_s / count * 1e3,
        percentile(alone, 10),
        percentile(through, 10),
        percentile(alone, 50),
        percentile(through, 50),
    )


async def run(args: argparse.Namespace) -> list[Measured]:
    """Every case with every router."""
    found = []
    with workers(2 * NUM_PAIRS) as ports:
        if len(os.sched_getaffinity(0)) > 1:  # the router has the last core to itself
            rest = sorted(os.sched_getaffinity(0))[:-1]
            for process in psutil.Process().children(recursive=True):
                process.cpu_affinity(rest)
        for name in args.cases:
            for router in [OURS, *([PEER] if args.peer else [])]:
                case = CASES[name]
                with (ours if router == OURS else peer)(ports, case.policy) as (port, pid):
                    one = await measure(router, port, pid, ports[-1], case, args)
                found.append(one)
                print(
                    f"{router} {name}: {one.per_second:,.0f}/s, {one.cpu_ms:.2f} ms CPU, +{one.added_ms:.2f} ms",
                    flush=True,
                )
    return found


def document(facts: dict[str, Any], found: Sequence[Measured]) -> str:
    """The whole report in Markdown."""
    header = ["case", "router", "CPU ms / request", "core's limit, req/s", "measured req/s", "worker alone, ms"]
    header += ["through, ms", "added, ms", "median alone", "median through"]
    rows = [
        [one.case.name, one.router, f"{one.cpu_ms:.2f}", f"{1e3 / one.cpu_ms:,.0f}", f"{one.per_second:,.0f}"]
        + [f"{ms:.2f}" for ms in (one.direct_p10_ms, one.through_p10_ms, one.added_ms)]
        + [f"{ms:.2f}" for ms in (one.direct_p50_ms, one.through_p50_ms)]
        for one in found
    ]
    plain = {one.case.name: one for one in found if one.router == OURS}
    notes = [
        "`CPU ms / request` is the router process's CPU time in the closed loop; a core's limit is its inverse.",
        "Every request is two to workers, one to prefill and one to decode; workers answer at once.",
    ]
    if {"plain", "stream of 64"} <= plain.keys():
        each_us = (plain["stream of 64"].cpu_ms - plain["plain"].cpu_ms) / 64 * 1e3
        notes.append(f"An event of a stream costs {each_us:.0f} us of CPU more.")
    return f"""# What the router costs, {facts["date"]}

{facts["concurrency"]} connections in a closed loop for {facts["seconds"]:g} s; latencies are of \
{facts["alone"]} requests on one connection, through the router and to the worker in turns: the fastest tenth (10th \
percentile), and the median.

{report.markdown_table(header, rows, num_text=2)}

{report.footer(facts, notes)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    add("--concurrency", type=int, default=32)
    add("--seconds", type=float, default=4.0, help="of each closed loop")
    add("--alone", type=int, default=300, help="requests on one connection")
    add("--peer", choices=(PEER,), help="measure this router, too")
    report.add_write_flags(parser, "router")
    args = parser.parse_args(argv)
    if min(args.concurrency, args.alone) < 1 or not args.seconds > 0:
        parser.error("--concurrency, --alone and --seconds must be above 0")
    if args.peer and importlib.util.find_spec(PEER) is None:
        parser.error("sglang_router is not installed: pip install sglang-router")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("router", argv)
    found = uvloop.run(run(args))
    facts = bench.facts(
        concurrency=args.concurrency,
        seconds=args.seconds,
        alone=args.alone,
        measured=[dataclasses.asdict(one) | {"added_ms": one.added_ms} for one in found],
    )
    text = document(facts, found)
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
