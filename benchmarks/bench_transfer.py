"""GB/s of the whole transfer path, sender to receiver, against the engine alone on the same bytes in the same run.

    python -m benchmarks.bench_transfer [--write] [--backends shm mooncake nixl] [--layouts smollm2-135m llama-8b]

Two processes, as prefill and decode servers are, joined by real control sockets and a real transport; between rooms
bytes lies all of `pdserve.transfer` (`transfer_side.py`). A request's pages come from an allocator that is `fresh`,
in runs that become one copy, or `scattered` at random, the worst that can be.

- `path` is throughput: `--window` requests under way, as servers under load have, from the first one's pages told to
  the last one's success. All of the control plane is in it.
- `alone` is the latency of one request, with nothing else under way: from the sender's decision to send, its pages
  and the peer's known, to the success at the receiver. Planning, copying and `TransferDone` are in it.
- `raw` is the engine's own call on equal lists of copies, one request after the other (`transfer_raw.py`); where the
  path has several threads that write to a peer, `raw n` is as many of them, with nothing else to do and an engine each.

They take turns, in both orders, and each ratio is taken within a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.transfer_pair import Pair
from benchmarks.transfer_raw import WRITERS
from benchmarks.transfer_side import GROUPS, layout_of
from pdserve.memory.layout import pages_for
from pdserve.transfer.transports import nixl_engine

MARK, MARK_TOKENS = 0.9, 1000
TURN_S = 0.12
"""About how long the engine alone takes for one turn's requests: long enough that a window's filling hardly counts."""
POOL_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """What is transferred by what."""

    backend: str
    layout: str
    pages: str
    num_tokens: int


@dataclasses.dataclass
class Turns:
    """GB/s of each turn. `writing`: how many of the path's threads copy, on average over its time."""

    path: list[float] = dataclasses.field(default_factory=list)
    alone: list[float] = dataclasses.field(default_factory=list)
    raw: list[float] = dataclasses.field(default_factory=list)
    raw_threads: list[float] = dataclasses.field(default_factory=list)
    writing: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class OnePage:
    """Microseconds of a transfer of one page and its aux slot, in the median: alone, of many at once, and raw."""

    backend: str
    layout: str
    alone_us: float
    many_us: float
    raw_us: float


def measure(args: argparse.Namespace, backend: str, layout: str, pages: str) -> Iterator[tuple[Case, Turns] | OnePage]:
    """All prompt lengths over one pair; a single page where pages are scattered."""
    page_bytes = layout_of(layout, args.page_tokens).groups[0].page_bytes
    most = pages_for(max(args.tokens), args.page_tokens)
    num_pages = max(2 * most, min(args.window * most, POOL_BYTES // page_bytes), 4 * args.window)
    scattered = pages == "scattered"
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, backend, layout, args.page_tokens, num_pages, scattered=scattered)
        pair.touch_all()
        for num_tokens in args.tokens:
            each = pages_for(num_tokens, args.page_tokens)
            window = min(args.window, num_pages // each)
            pair.run(window, each, window, check=True)
            calls = pair.copies(3, each, seed=-1)
            fastest = min(pair.run_raw([copies]) for copies in calls)
            count = max(2 * window, min(args.requests, round(TURN_S / fastest)))
            yield Case(backend, layout, pages, num_tokens), _take_turns(args, pair, count, each, window)
        if scattered:
            yield _one_page(pair, backend, layout, args.singles)


def _take_turns(args: argparse.Namespace, pair: Pair, count: int, each: int, window: int) -> Turns:
    turns, giga = Turns(), each * pair.side.page_bytes / 1e9
    for index in range(args.rounds):
        requests = pair.copies(count, each, seed=index)
        for part in ("raw", "path", "raw_threads", "alone")[:: 1 if index % 2 == 0 else -1]:
            match part:
                case "raw":
                    turns.raw.append(count * giga / pair.run_raw(requests))
                case "raw_threads":
                    turns.raw_threads.append(count * giga / pair.run_raw(requests, pair.num_writers))
                case "path":
                    found = pair.run(count, each, window)
                    turns.path.append(count * giga / found.seconds)
                    turns.writing.append(found.write_s / found.seconds)
                case _:
                    turns.alone.append(giga / statistics.median(pair.run(max(3, count // 4), each, 1).latencies))
    return turns


def _one_page(pair: Pair, backend: str, layout: str, count: int) -> OnePage:
    requests = pair.copies(count, 1, seed=0)
    pair.run(20, 1, 1)
    alone = statistics.median(pair.run(count, 1, 1).latencies)
    many = pair.run(count, 1, 4).seconds / count
    raw = statistics.median(pair.run_raw([copies]) for copies in requests)
    return OnePage(backend, layout, alone * 1e6, many * 1e6, raw * 1e6)


def ratio(turns: Turns) -> report.Spread:
    """Of path and raw, within turns."""
    return report.ratios(turns.path, turns.raw)


def missed(found: Sequence[tuple[Case, Turns]]) -> list[Case]:
    """Cases below the mark."""
    return [case for case, turns in found if case.num_tokens >= MARK_TOKENS and ratio(turns).median < MARK]


def speed_table(found: Sequence[tuple[Case, Turns]], page_tokens: int) -> str:
    """A line per case."""
    rows = []
    for case, turns in found:
        num_pages = pages_for(case.num_tokens, page_tokens)
        megabytes = num_pages * layout_of(case.layout, page_tokens).groups[0].page_bytes / 1e6
        speeds = [report.spread_of(one).show(2) for one in (turns.raw, turns.raw_threads, turns.path, turns.alone)]
        quotients = [
            ratio(turns).show(2, "x"),
            report.ratios(turns.path, turns.raw_threads).show(2, "x"),
            report.ratios(turns.alone, turns.raw).show(2, "x"),
            report.spread_of(turns.writing).show(2),
        ]
        rows.append(
            [case.backend, case.layout, case.pages, f"{case.num_tokens:,}", f"{megabytes:.1f}", *speeds, *quotients]
        )
    header = [
        "backend",
        "layout",
        "pages",
        "tokens",
        "MB",
        "raw GB/s",
        "raw n GB/s",
        "path GB/s",
        "alone GB/s",
        "path / raw",
        "path / raw n",
        "alone / raw",
        "writing",
    ]
    return report.markdown_table(header, rows, num_text=3)


def one_page_table(found: Sequence[OnePage]) -> str:
    """A line per backend and layout."""
    rows = [
        [
            one.backend,
            one.layout,
            *(f"{us:.0f}" for us in (one.raw_us, one.alone_us, one.alone_us - one.raw_us, one.many_us)),
        ]
        for one in found
    ]
    header = ["backend", "layout", "raw, us", "transfer, us", "control plane, us", "each of many, us"]
    return report.markdown_table(header, rows, num_text=2)


def document(args: argparse.Namespace, facts: dict[str, Any], speeds: Any, pages: Sequence[OnePage]) -> str:
    """The whole report in Markdown."""
    below = [f"{case.backend} {case.layout} {case.pages} {case.num_tokens}" for case in missed(speeds)]
    verdict = "met" if not below else f"**missed** by {', '.join(below)}"
    return f"""# The transfer path against its engines, {facts["date"]}

Two processes, pages of {args.page_tokens} tokens. `path`: throughput with {args.window} requests under way, all of \
the control plane in it. `alone`: bytes by the latency of one request, from the decision to send to the receiver's \
success. `raw`: the engine's own call on equal copies, one request after the other; `raw n`: by as many threads as \
write in the path, which is two, each with an engine of its own. Median of {args.rounds} interleaved turns (least-most).

{speed_table(speeds, args.page_tokens)}

The mark, path / raw of at least {MARK} for prompts of {MARK_TOKENS:,} tokens and more, is {verdict}.

`writing`: how many of the path's threads are copying, on average; what is missing to n is the control plane's.

A transfer of one page and its aux slot, from the decision to send to the receiver's success:

{one_page_table(pages)}

{report.footer(facts, _notes(), own_load=2)}
"""


def _notes() -> list[str]:
    """How the system was told to treat us, where that is not as usual."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        return []
    return ["With real-time priority (`chrt -r 5`), so that what else ran had to wait while this did."]


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backends", nargs="+", choices=tuple(WRITERS), help="all that are installed when absent")
    add("--layouts", nargs="+", choices=tuple(GROUPS), default=["smollm2-135m", "llama-8b"])
    add("--pages", nargs="+", choices=("fresh", "scattered"), default=["fresh", "scattered"])
    add("--tokens", type=int, nargs="+", default=[100, 1000, 4000], help="prompt lengths")
    add("--page-tokens", type=int, default=16, help="page size")
    add("--window", type=int, default=4, help="requests under way in `path`; fewer where the pool would pass 2 GB")
    add("--requests", type=int, default=64, help="most requests of a turn")
    add("--singles", type=int, default=300, help="transfers of one page")
    add("--rounds", type=int, default=7, help="turns of each")
    report.add_write_flags(parser, "transfer")
    args = parser.parse_args(argv)
    if args.backends is None:
        args.backends = [name for name in WRITERS if name != "nixl" or nixl_engine.is_installed()]
    if min(*args.tokens, args.page_tokens, args.window, args.requests, args.rounds, args.singles) < 1:
        parser.error("all numbers must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; exit status 1 when the mark is missed."""
    args = parse_flags(argv)
    bench = report.Run("transfer", argv)
    speeds: list[tuple[Case, Turns]] = []
    pages: list[OnePage] = []
    for backend in args.backends:
        for layout, how in itertools.product(args.layouts, args.pages):
            for found in measure(args, backend, layout, how):
                if isinstance(found, OnePage):
                    pages.append(found)
                else:
                    speeds.append(found)
                    print(f"{found[0]}: path / raw {ratio(found[1]).show(2, 'x')}", flush=True)
    facts = bench.facts(
        gigabytes_per_s=[dataclasses.asdict(case) | dataclasses.asdict(turns) for case, turns in speeds],
        one_page=[dataclasses.asdict(one) for one in pages],
    )
    text = document(args, facts, speeds, pages)
    bench.publish(args, text, facts)
    return 1 if missed(speeds) else 0


if __name__ == "__main__":
    sys.exit(main())
