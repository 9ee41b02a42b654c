"""Conversations whose prefixes need more KV memory than the device has: no tier, host tier, host tier and files.

    python -m benchmarks.bench_tiers [--write]

Each conversation begins with a long text of its own. A turn sends all turns so far and new tokens, a tenth of the
prompt, so that 90% of it was computed before. The conversations take turns, so each one's KV has left the device when
its next turn comes. `none` computes it again, `host` has room for all conversations in host memory, and `host+file` has
as little host memory as the device has, and a directory. One monolith for each variant; all are up for the whole run,
and each turn goes to all of them, one after the other. First turns are not counted.

The exit status is 1 for answers that differ between the variants, a hit rate of a tier below `LEAST_HIT_RATE`, or a
median TTFT that is less than `LEAST_TIMES` times as short as without a tier.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.servers import monolith

VARIANTS = ("none", "host", "host+file")
PAGE_TOKENS = 64
SETTLE_S = 20.0
LEAST_TIMES = 3.0
"""TTFT without a tier in those of each tier, of medians."""
LEAST_HIT_RATE = 0.85
"""Share of prompt tokens that a tier must find; 0.9 were computed before, and only whole pages are found."""
COUNTERS = ("load_back_tokens", "prefetched_tokens", "backuped_tokens")
Turns = dict[str, list[dict[str, float]]]
"""For each variant the numbers of each turn."""


def longest(args: argparse.Namespace) -> int:
    """Tokens of a conversation at its end, with outputs, in whole pages."""
    tokens: int = args.prefix_len
    for _ in range(args.turns):
        tokens += tokens // 9 + args.output_len
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS + PAGE_TOKENS


def flags_of(args: argparse.Namespace, variant: str, directory: str) -> list[str]:
    """Flags of the server of a variant. The device has room for `--fit` conversations."""
    flags = ["--max-total-tokens", str(args.fit * longest(args)), "--page-size", str(PAGE_TOKENS)]
    flags += ["--context-length", str(longest(args) + PAGE_TOKENS), "--max-running-requests", "4"]
    if variant == "host":
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(-(-2 * args.conversations // args.fit))]
    if variant == "host+file":
        options = {"directory": directory, "max_size": "64gb"}
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", "1", "--hicache-storage-backend", "file"]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(options)]
    return flags


def ask(args: argparse.Namespace, url: str, tokens: Sequence[int]) -> tuple[dict[str, float], list[int]]:
    """Send a prompt; TTFT in seconds and cached tokens, and the output's tokens."""
    sampling = {"temperature": 0, "max_new_tokens": args.output_len, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    begin, first_s, last = time.perf_counter(), None, ""
    with urllib.request.urlopen(request, timeout=args.timeout) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data: {"):
                first_s = time.perf_counter() - begin if first_s is None else first_s
                last = text
    answer = json.loads(last.removeprefix("data: "))
    assert first_s is not None
    found = {"ttft_s": first_s, "cached": float(answer["meta_info"]["cached_tokens"]), "prompt": float(len(tokens))}
    return found, list(answer["output_ids"])


def state(url: str) -> dict[str, Any]:
    """`/get_server_info`."""
    with urllib.request.urlopen(f"{url}/get_server_info", timeout=30) as response:
        return dict(json.load(response))


def settle(url: str) -> None:
    """Wait until a server copies nothing more, so that it takes no time from the next one."""
    deadline, before = time.monotonic() + SETTLE_S, -1.0
    while time.monotonic() < deadline:
        found = state(url)
        now = float(found["counters"].get("backuped_tokens", 0) + found["counters"].get("hicache_backup_tokens", 0))
        if not found["memory"].get("tier_copies_running", 0) and now == before:
            return
        before = now
        time.sleep(0.1)


def converse(args: argparse.Namespace, urls: dict[str, str]) -> tuple[Turns, int]:
    """Hold all conversations with all servers; the numbers of each turn but the first, and answers that differ."""
    rng = random.Random(args.seed)
    texts = [[rng.randrange(10, args.vocab_size) for _ in range(args.prefix_len)] for _ in range(args.conversations)]
    turns: Turns = {variant: [] for variant in urls}
    num_different = 0
    for turn in range(args.turns):
        for number, text in enumerate(texts):
            text += [rng.randrange(10, args.vocab_size) for _ in range(len(text) // 9)]
            outputs = []
            for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                found, output = ask(args, urls[variant], text)
                outputs.append(output)
                settle(urls[variant])
                if turn:
                    turns[variant].append(found)
            num_different += any(output != outputs[0] for output in outputs)
            text += outputs[0]
        print(
            f"turn {turn}: " + ", ".join(f"{name} {show(found)}" for name, found in turns.items() if found), flush=True
        )
    return turns, num_different


def show(found: Sequence[dict[str, float]]) -> str:
    """The numbers of some turns in a line."""
    ttft = statistics.median(one["ttft_s"] for one in found)
    return f"{1000 * ttft:.0f} ms {hit_rate(found):.0%}"


def hit_rate(found: Sequence[dict[str, float]]) -> float:
    """Share of prompt tokens that came from a cache."""
    return sum(one["cached"] for one in found) / sum(one["prompt"] for one in found)


def table(turns: Turns, states: dict[str, dict[str, Any]]) -> str:
    """TTFT of each variant, beside that without a tier, and where the tokens came from."""
    header = ["tier", "TTFT p50", "TTFT p90", "none / p50", "hit rate", *(name.replace("_", " ") for name in COUNTERS)]
    rows = []
    base = statistics.median(one["ttft_s"] for one in turns["none"])
    for variant, found in turns.items():
        times = sorted(one["ttft_s"] for one in found)
        middle = statistics.median(times)
        counters = states[variant]["counters"]
        rows.append(
            [variant, f"{1000 * middle:.0f} ms", f"{1000 * times[int(0.9 * len(times))]:.0f} ms"]
            + [f"{base / middle:.1f}x", f"{hit_rate(found):.0%}"]
            + [f"{counters.get(name, 0):.0f}" for name in COUNTERS]
        )
    return report.markdown_table(header, rows)


def faults(turns: Turns, different: int) -> Iterator[str]:
    """Yield what the tiers did wrong. `different`: answers that differ between variants."""
    if different:
        yield f"{different} answers differ"
    base = statistics.median(one["ttft_s"] for one in turns["none"])
    for variant, found in turns.items():
        times = base / statistics.median(one["ttft_s"] for one in found)
        if variant != "none" and times < LEAST_TIMES:
            yield f"TTFT of {variant} is {times:.1f} times as short, less than {LEAST_TIMES:g}"
        if variant != "none" and hit_rate(found) < LEAST_HIT_RATE:
            yield f"the hit rate of {variant} is {hit_rate(found):.0%}, less than {LEAST_HIT_RATE:.0%}"


def document(
    args: argparse.Namespace, facts: dict[str, Any], turns: Turns, states: dict[str, dict[str, Any]], different: int
) -> str:
    """The whole report in Markdown."""
    wrong = list(faults(turns, different))
    verdict = "The tiers meet their limit." if not wrong else f"The tiers miss their limit: {'; '.join(wrong)}."
    notes = [f"Flags of `host+file`: `{' '.join(flags_of(args, 'host+file', 'DIRECTORY'))}`."]
    return f"""# Conversations with more prefixes than device memory, {facts["date"]}

{args.model}, {args.dtype}: {args.conversations} conversations of {args.turns} turns, the first text \
{args.prefix_len} tokens, 90% of each later prompt computed before. The device has room for {args.fit} of them. \
{len(turns["none"])} turns of each variant, one request at a time. Answers that differ between variants: {different}.

{table(turns, states)}

{verdict} Limit: the same answers, a hit rate of {LEAST_HIT_RATE:.0%}, and a median TTFT that is {LEAST_TIMES:g} times \
as short as without a tier.

{report.footer(facts, notes)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--conversations", type=int, default=6)
    add("--turns", type=int, default=4)
    add("--prefix-len", type=int, default=2048)
    add("--output-len", type=int, default=8)
    add("--fit", type=int, default=2, help="conversations whose KV the device has room for")
    add("--threads", type=int, default=2, help="threads of each server; one computes at a time")
    add("--timeout", type=float, default=120.0, help="seconds a request may take")
    report.add_write_flags(parser, "tiers")
    args = parser.parse_args(argv)
    if min(args.conversations, args.fit, args.output_len) < 1 or args.turns < 2 or args.conversations <= args.fit:
        parser.error("--turns must be at least 2, and --conversations more than --fit")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; 1 when a tier misses its limit."""
    args = parse_flags(argv)
    bench = report.Run("tiers", argv)
    print(bench.machine, flush=True)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-tiers-"))
        urls = {
            variant: stack.enter_context(
                monolith(args.model, args.dtype, threads=args.threads, flags=flags_of(args, variant, directory))
            )
            for variant in VARIANTS
        }
        turns, different = converse(args, urls)
        states = {variant: state(url) for variant, url in urls.items()}
    facts = bench.facts(turns=turns, counters={variant: found["counters"] for variant, found in states.items()})
    bench.publish(args, document(args, facts, turns, states, different), facts)
    return 1 if any(faults(turns, different)) else 0


if __name__ == "__main__":
    sys.exit(main())
