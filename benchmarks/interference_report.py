"""What `bench_interference` found, as tables: the streams' gaps, what prompts did to them, the best chunk, tokens."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from benchmarks import first_token, foreign, report
from benchmarks.answers import Answer, equal_tokens
from benchmarks.first_token import FirstToken
from benchmarks.foreign import BesideForeign

PAIR = "1P1D"
METRICS = (
    ("itl_p50_ms", "ITL p50, ms", 1),
    ("itl_p99_ms", "ITL p99, ms", 1),
    ("itl_max_ms", "ITL max, ms", 0),
    ("stream_tok_s", "streams' tok/s", 1),
    ("ttft_p50_ms", "prompts' TTFT p50, ms", 0),
    ("ttft_max_ms", "max, ms", 0),
)
Rounds = dict[tuple[str, bool], list[dict[str, float | None]]]
"""For each system, without (False) and with prompts, the metrics of each round."""
Firsts = dict[str, list[FirstToken]]
"""The prompts' first tokens of all rounds by system and, in words, what it did beside them."""


@dataclasses.dataclass(frozen=True)
class Found:
    """All that was measured. Answers are in the order of rounds, in which all systems had the same requests."""

    rounds: Rounds
    firsts: Firsts
    streams: dict[str, list[Answer]]
    """By system, beside prompts."""
    idle: dict[str, list[Answer]]
    foreign: list[BesideForeign] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, systems: Sequence[str], alone: Sequence[str], idle: Sequence[str]) -> Found:
        """Nothing yet, of `systems` with prompts, those of `alone` also without, and of `idle` servers."""
        turns = [*((system, False) for system in alone), *((system, True) for system in systems)]
        names = [*(f"idle: {system}" for system in idle), *(f"streams: {system}" for system in systems)]
        return cls(
            {turn: [] for turn in turns}, {name: [] for name in names}, {name: [] for name in systems},
            {name: [] for name in idle},
        )  # fmt: skip

    def add(
        self, system: str, metrics: dict[str, float | None], streams: list[Answer], firsts: list[FirstToken]
    ) -> None:
        """One part of a turn; without prompts `firsts` is empty."""
        self.rounds[system, bool(firsts)].append(metrics)
        if firsts:
            self.firsts[f"streams: {system}"] += firsts
            self.streams[system] += streams

    def add_idle(self, system: str, answer: Answer, first: FirstToken) -> None:
        """One prompt to an idle server."""
        self.firsts[f"idle: {system}"].append(first)
        self.idle[system].append(answer)

    def facts(self) -> dict[str, Any]:
        """For the results' JSON: the metrics, first tokens, and which answers of the pair are those of others."""
        return {
            "rounds": [
                {"system": s, "prompts": prompts, "rounds": found} for (s, prompts), found in self.rounds.items()
            ],
            "first_tokens": {name: [dataclasses.asdict(one) for one in found] for name, found in self.firsts.items()},
            "equal": [dataclasses.asdict(one) for one in self.equal()],
            "foreign": foreign.facts(self.foreign),
        }

    def equal(self) -> list[Equal]:
        """The pair's answers against each other system's."""
        return [
            Equal(what, system, sum(equal_tokens(answers[PAIR], theirs)), len(theirs))
            for what, answers in (("prompts to idle servers", self.idle), ("streams beside prompts", self.streams))
            for system, theirs in answers.items()
            if system != PAIR
        ]


@dataclasses.dataclass(frozen=True)
class Equal:
    """How many of the pair's answers to `what` have the tokens that `system`'s have, as far as both came."""

    what: str
    system: str
    num: int
    of: int


def monolith_name(chunk: int) -> str:
    """The system's name for one of `--chunks`."""
    return f"monolith, chunks of {chunk}" if chunk else "monolith"


def half_name(args: argparse.Namespace) -> str:
    """The monolith that has as many threads as the prefill server."""
    return f"monolith, {args.threads // 2} of {args.threads} threads"


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
    """What the prompts do to the streams, and the pair against each monolith while prompts arrive."""
    both = [system for system, prompts in rounds if not prompts]
    pairs = [(f"{system}: with prompts / alone", rounds[system, True], rounds[system, False]) for system in both]
    monoliths = [system for system, prompts in rounds if prompts and system != PAIR]
    pairs += [(f"with prompts: {PAIR} / {system}", rounds[PAIR, True], rounds[system, True]) for system in monoliths]
    rows = [ratio_row(*pair) for pair in pairs]
    return report.markdown_table(["ratio", *(label.partition(",")[0] for _, label, _ in METRICS)], rows)


def ratio_row(
    name: str, ours: Sequence[dict[str, float | None]], theirs: Sequence[dict[str, float | None]]
) -> list[str]:
    """A row named `name`: of each metric, ours by theirs of the same round, where both have it."""
    cells = []
    for metric, _, _ in METRICS:
        mine, peer = values(ours, metric), values(theirs, metric)
        cells.append(report.ratios(mine, peer).show(2, "x") if len(mine) == len(peer) else "")
    return [name, *cells]


def best_chunk(rounds: Rounds, chunks: Sequence[int]) -> str:
    """Which chunk serves the streams best, which of those that serve prompts as soon as the pair, and the pair."""

    def median(system: str, metric: str) -> float:
        return report.spread_of(values(rounds[system, True], metric)).median

    def itl(system: str) -> float:
        return median(system, "itl_p99_ms")

    def told(system: str) -> str:
        return f"{system}: {itl(system):.1f} ms, prompts' TTFT {median(system, 'ttft_p50_ms'):,.0f} ms"

    tried = [monolith_name(chunk) for chunk in sorted(chunks, key=lambda chunk: chunk or math.inf)]
    best = min(tried, key=itl)
    soon = [system for system in tried if median(system, "ttft_p50_ms") <= median(PAIR, "ttft_p50_ms")]
    lines = [
        f"Best monolith for the streams: {told(best)}{'; no smaller chunk was tried' if best == tried[0] else ''}.",
        f"Best monolith whose prompts wait no longer than {PAIR}'s: {told(min(soon, key=itl)) if soon else 'none'}.",
        f"{told(PAIR)}.",
    ]
    return "By ITL p99 while prompts arrive:\n\n" + "\n".join(f"- {line}" for line in lines)


def equal_table(found: Found) -> str:
    """A row for each system."""
    rows = [[one.what, one.system, str(one.num), str(one.of)] for one in found.equal()]
    return report.markdown_table(["answers", f"{PAIR} beside", "equal", "of"], rows, num_text=2)


def document(args: argparse.Namespace, facts: dict[str, Any], found: Found) -> str:
    """The whole report in Markdown."""
    rounds = found.rounds
    half = args.threads // 2
    pinned = ", pinned to cores of their own" if args.pin else ""
    notes = [
        f"Threads: monoliths {args.threads}, prefill and decode {half} each{pinned}; router and load generator "
        f"share these cores. More flags of all servers: `{' '.join(args.server_flags) or 'none'}`."
    ]
    with_prompts = [metrics for (_, prompts), all_rounds in rounds.items() if prompts for metrics in all_rounds]
    sent, through, gaps = (values(with_prompts, f"num_{name}") for name in ("prompts", "prompts_through", "gaps"))
    idle = [f"idle: {system}" for system in (PAIR, monolith_name(args.chunks[0]), half_name(args))]
    return f"""# Long prompts beside decoding streams, {facts["date"]}

{args.model}, {args.dtype}: {args.streams} streams (prompts of {args.stream_prompt_len}), started anew in each turn; \
beside them one client that sends prompts of {args.prompt_len} tokens, {args.prompt_output_len} out, each behind the \
answer to the one before. In each turn gaps count for {args.seconds:g} s: {min(gaps):,.0f} to {max(gaps):,.0f} gaps \
with prompts, of which {min(sent):.0f} to {max(sent):.0f} were sent and {min(through):.0f} to {max(through):.0f} \
through meanwhile. Median of {args.rounds} rounds (least-most), each in another order.

{absolute_table(rounds)}

{best_chunk(rounds, args.chunks)}

Ratios of the same round (ITL and TTFT: lower is better):

{ratio_table(rounds)}

## The time to a prompt's first token

As the client sees it: one prompt at a time to idle servers, and those beside the streams. Its mean is the sum of the \
parts that follow it; where a row is a difference, so is each part.

{first_token.table(found.firsts, [(idle[0], idle[1]), (idle[0], idle[2])])}

{foreign.section(found.foreign, PAIR, args.foreign)}
## Tokens

All greedy, of the same prompts for all systems in each round; of two streams as many tokens as both made. The CPU \
kernels give a request the same bits in any company; torch sums up in an order that follows from the number of rows, \
so that a near tie between two tokens may go another way:

{equal_table(found)}

{report.footer(facts, notes, own_load=2)}
"""
