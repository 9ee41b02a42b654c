"""Speculative decoding end to end on CPU: tokens/s with and without draft tokens, of real servers of SmolLM2.

    python -m benchmarks.bench_speculation [--algorithms NGRAM EAGLE3] [--draft-model DIR] [--pair] [--write]

All servers are up for the whole run and get the same requests in turn; ratios are taken within a round. Some answers
repeat their prompt (editing, extraction, code), others do not (chat). Every round has new prompts. No round begins that
would probably end after `--max-seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.answers import INCREMENTAL, events
from benchmarks.servers import local_pair, monolith
from benchmarks.speculation_texts import KINDS, Task, tasks

PLAIN = "plain"
ALGORITHMS = ("NGRAM", "EAGLE3", "NEXTN", "STANDALONE")
NEEDS_DRAFT_MODEL = ("EAGLE3", "STANDALONE")
COUNTERS = ("spec_verify_steps", "spec_draft_tokens", "spec_accepted_tokens")
MANY = 16
"""From this number of streams on, only `--kinds-of-many` are measured."""
REQUEST_TIMEOUT_S = 300.0


@dataclasses.dataclass
class Stream:
    """What one client received: seconds of its first and last event, and the tokens of the first event and of all."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_first: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The requests of a cell in one round on one server.

    `tok_s`: all output tokens by the seconds from the first request to the last token. `decode_tok_s`: without the time
    until every stream has its first token, and the tokens before that. `counters`: those of the scheduler, by how much
    they grew.
    """

    tok_s: float
    decode_tok_s: float
    num_tokens: int
    counters: dict[str, float]
    token_ids: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured in each round: a kind of text at a number of streams."""

    kind: str
    streams: int


Rounds = dict[Cell, dict[str, list[Measured]]]
"""For each cell the measurements of each side, one a round."""


async def read(session: aiohttp.ClientSession, url: str, task: Task, seed: int, output_len: int) -> Stream:
    """Send a request and read its stream to the end.

    Raises:
        RuntimeError: no whole answer came.
    """
    sampling = {"temperature": task.temperature, "sampling_seed": seed, "max_new_tokens": output_len}
    body = {"text": task.prompt, "sampling_params": sampling, "stream": True}
    stream = Stream()
    async with session.post(f"{url}/generate", data=orjson.dumps(body)) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {(await response.text())[:200]}")
        async for data in events(response):
            if data == b"[DONE]":
                return stream
            event = orjson.loads(data)
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            if not event["output_ids"]:
                continue
            stream.last_s = time.perf_counter()
            if not stream.token_ids:
                stream.first_s, stream.num_first = stream.last_s, len(event["output_ids"])
            stream.token_ids += event["output_ids"]
    raise RuntimeError(f"{url}: the stream ended without [DONE]")


async def counters_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the scheduler's counters of drafts; a router shows those of its decode server."""
    async with session.get(f"{url}/get_server_info") as response:
        counters = orjson.loads(await response.read())["counters"]
    return {name: counters.get(name, 0.0) for name in COUNTERS}


async def run_groups(url: str, groups: Sequence[Sequence[Task]], output_len: int) -> Measured:
    """Run the groups one after the other, the tasks of each at once.

    Raises:
        RuntimeError: a request failed.
    """
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    times = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        before = await counters_of(session, url)
        for group in groups:
            began_s = time.perf_counter()
            reads = (read(session, url, task, seed, output_len) for seed, task in enumerate(group))
            times.append((began_s, await asyncio.gather(*reads)))
        after = await counters_of(session, url)
    return measured(times, {name: after[name] - before[name] for name in COUNTERS})


def measured(groups: Sequence[tuple[float, Sequence[Stream]]], counters: dict[str, float]) -> Measured:
    """Sum up groups, each with the time of its start. Times are those of one clock.

    Where all tokens of a group came at once, its whole time counts as decoding.
    """
    num_tokens = num_later = 0
    whole_s = decode_s = 0.0
    for began_s, streams in groups:
        first_s, last_s = min(stream.first_s for stream in streams), max(stream.last_s for stream in streams)
        at_once = last_s <= first_s
        count = sum(len(stream.token_ids) for stream in streams)
        num_tokens += count
        num_later += count - (0 if at_once else sum(stream.num_first for stream in streams))
        whole_s += last_s - began_s
        decode_s += last_s - (began_s if at_once else first_s)
    token_ids = [stream.token_ids for _, streams in groups for stream in streams]
    return Measured(num_tokens / whole_s, num_later / decode_s, num_tokens, counters, token_ids)


def cells(args: argparse.Namespace) -> list[Cell]:
    """Everything that a round measures."""
    return [
        Cell(kind, streams)
        for streams in args.streams
        for kind in args.kinds
        if streams < MANY or kind in args.kinds_of_many
    ]


def run_rounds(args: argparse.Namespace, urls: dict[str, str], began_s: float) -> Rounds:
    """Warm up, then all cells on all sides in turn. The side that begins changes with round and cell."""
    found: Rounds = {cell: {side: [] for side in urls} for cell in cells(args)}
    for url in urls.values():
        for cell in found:
            asyncio.run(run_groups(url, [tasks(cell.kind, cell.streams, "warm up")], 8))
    longest_s = 0.0
    for index in range(args.rounds):
        round_s = time.perf_counter()
        if index and round_s - began_s + longest_s > args.max_seconds:
            print(f"{index} of {args.rounds} rounds: the next one would pass --max-seconds {args.max_seconds}")
            break
        for number, (cell, sides) in enumerate(found.items()):
            order = list(urls)
            turn = (index + number) % len(order)
            for side in order[turn:] + order[:turn]:
                groups = groups_of(cell, f"{args.seed} {index}", args.alone)
                sides[side].append(asyncio.run(run_groups(urls[side], groups, output_len(args, cell))))
        longest_s = max(longest_s, time.perf_counter() - round_s)
        print(f"round {index}: {time.perf_counter() - round_s:.0f} s", flush=True)
    return found


def groups_of(cell: Cell, seed: str, num_alone: int) -> list[list[Task]]:
    """The requests of a cell in one round: all streams at once, or with one stream `num_alone` requests in turn."""
    num_groups = num_alone if cell.streams == 1 else 1
    made = tasks(cell.kind, num_groups * cell.streams, f"{seed} {cell.streams}")
    return [made[first : first + cell.streams] for first in range(0, len(made), cell.streams)]


def output_len(args: argparse.Namespace, cell: Cell) -> int:
    """Most tokens of an answer."""
    return int(args.output_len if cell.streams < MANY else args.output_len_of_many)


def summary(sides: dict[str, list[Measured]], side: str) -> dict[str, Any]:
    """The numbers of one side of a cell beside plain decoding."""
    runs, plain = sides[side], sides[PLAIN]
    steps, drafts, accepted = (sum(one.counters[name] for one in runs) for name in COUNTERS)
    num_tokens = sum(one.num_tokens for one in runs)
    answers = [pair for a, b in zip(runs, plain, strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    return {
        "decode_tok_s": report.spread_of([one.decode_tok_s for one in runs]),
        "decode_ratio": report.ratios([one.decode_tok_s for one in runs], [one.decode_tok_s for one in plain]),
        "ratio": report.ratios([one.tok_s for one in runs], [one.tok_s for one in plain]),
        "accept_length": 1 + accepted / steps if steps else None,
        "accept_rate": accepted / drafts if drafts else None,
        "share_of_verify_steps": (steps + accepted) / num_tokens,
        "num_answers": len(answers),
        "num_equal": sum(ours == theirs for ours, theirs in answers),
    }


def table(rounds: Rounds, streams: int) -> str:
    """All kinds of text at one number of streams."""
    rows = []
    for cell, sides in rounds.items():
        if cell.streams != streams:
            continue
        for side in sides:
            found = summary(sides, side)
            row = [cell.kind, side, found["decode_tok_s"].show(1)]
            if side == PLAIN:
                rows.append([*row, *["-"] * 5, f"{found['num_answers']}"])
                continue
            length, rate = found["accept_length"], found["accept_rate"]
            rows.append(
                [
                    *row,
                    found["decode_ratio"].show(2, "x"),
                    found["ratio"].show(2, "x"),
                    "-" if length is None else f"{length:.2f}",
                    "-" if rate is None else f"{100 * rate:.0f} %",
                    f"{100 * found['share_of_verify_steps']:.0f} %",
                    f"{found['num_equal']} of {found['num_answers']}",
                ]
            )
    header = [
        "text", "drafter", "decode tok/s", "to plain", "with prefill", "accept length", "accepted", "drafted",
        "equal answers",
    ]  # fmt: skip
    return report.markdown_table(header, rows, num_text=2)


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: Rounds) -> str:
    """The whole report in Markdown."""
    num_rounds = max(len(runs) for sides in rounds.values() for runs in sides.values())
    tables = "\n\n".join(f"## {streams} at once\n\n{table(rounds, streams)}" for streams in args.streams)
    where = "1P1D through the router" if args.pair else "monoliths"
    return f"""# Speculative decoding on CPU, {facts["date"]}

{args.model}, {args.dtype}, {where} with {args.threads} thread(s) each. Answers have at most {args.output_len} tokens, \
at {MANY} streams and more {args.output_len_of_many}. Median of {num_rounds} interleaved rounds (least-most), with new \
prompts in each.

- `to plain`: the ratio of decode tokens/s to the same requests without drafts; `with prefill`: that of all output \
tokens by the whole time.
- `accept length`: tokens per verify step; `accepted`: the share of the draft tokens; `drafted`: the share of the \
output tokens that come from verify steps.
- `equal answers`: those with the same tokens as without drafts.

{tables}

{report.footer(facts, own_load=args.threads)}
"""


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """URLs by side: plain, and each algorithm."""
    start = local_pair if args.pair else monolith
    with contextlib.ExitStack() as stack:
        urls = {}
        for side in (PLAIN, *args.algorithms):
            flags = [INCREMENTAL, *args.server_flags.split()]
            if side != PLAIN:
                flags += ["--speculative-algorithm", side, *args.speculative_flags.split()]
            if side in NEEDS_DRAFT_MODEL:
                flags += ["--speculative-draft-model-path", args.draft_model]
            urls[side] = stack.enter_context(start(args.model, args.dtype, threads=args.threads, flags=flags))
        yield urls


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="as --model-path of a server")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--algorithms", nargs="+", default=["NGRAM"], choices=ALGORITHMS, help="drafters beside plain decoding")
    add("--draft-model", help="directory of the EAGLE-3 head or the draft model")
    add("--speculative-flags", default="", help="more flags of the servers with a drafter, in one argument")
    add("--server-flags", default="", help="more flags of all servers, in one argument")
    add("--pair", action="store_true", help="1P1D through a router instead of a monolith")
    add("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    add("--kinds-of-many", nargs="+", default=["editing", "chat"], choices=list(KINDS),
        help=f"of these, the kinds at {MANY} streams and more")  # fmt: skip
    add("--streams", nargs="+", type=int, default=[1, 4, 64])
    add("--alone", type=int, default=2, help="requests of a round at one stream, one after the other")
    add("--output-len", type=int, default=128)
    add("--output-len-of-many", type=int, default=48)
    add("--threads", type=int, default=2, help="CPU threads of each server")
    add("--rounds", type=int, default=5)
    add("--max-seconds", type=float, default=420.0, help="no round begins that would probably end after that")
    add("--seed", type=int, default=0)
    report.add_write_flags(parser, "speculation")
    args = parser.parse_args(argv)
    if (
        min(*args.streams, args.rounds, args.threads, args.alone) < 1
        or min(args.output_len, args.output_len_of_many) < 2
    ):
        parser.error("--streams, --rounds, --threads and --alone must be at least 1, --output-len and -of-many 2")
    if args.draft_model is None and any(side in NEEDS_DRAFT_MODEL for side in args.algorithms):
        parser.error("EAGLE3 and STANDALONE need --draft-model")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked. Status 1 when an answer has other tokens than without drafts."""
    args = parse_flags(argv)
    bench = report.Run("speculation", argv)
    print(bench.machine, flush=True)
    began_s = time.perf_counter()
    with servers(args) as urls:
        rounds = run_rounds(args, urls, began_s)
    results = {
        f"{cell.kind}, {cell.streams}": {
            side: {
                name: dataclasses.asdict(value) if isinstance(value, report.Spread) else value
                for name, value in summary(sides, side).items()
            }
            for side in sides
        }
        for cell, sides in rounds.items()
    }
    facts = bench.facts(results=results)
    bench.publish(args, document(args, facts, rounds), facts)
    equal = all(found["num_equal"] == found["num_answers"] for sides in results.values() for found in sides.values())
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
