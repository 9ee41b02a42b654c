"""The split of memory between state slots and KV pages (`--mamba-full-memory-ratio`), by simulation.

    python -m benchmarks.bench_state_ratio [--trace PATH ...] [--write]

The scheduler, the prefix cache and the sizes of pages and slots are real. A cost model stands for the device: it
advances a clock by the duration of each step, so a run gives the same numbers on every machine. Users in a closed loop
play the workloads of `state_workloads` once for each ratio, in the same memory. With `ample` there is memory for
everything: its cached share is the most that any ratio can reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report, state_workloads
from benchmarks.gpu.shapes import HYBRID_MODELS
from benchmarks.state_workloads import Turn, Workload
from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.executor.memory_sizing import group_bytes, requests_in, sizes_of_many, sizes_of_one
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import KVLayout
from pdserve.model.config import kv_layout, spec_from_config
from pdserve.protocol.messages import EngineCoreOutput, GenerateRequest, OutputBatch, ToApi
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import WaitingQueue
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.sim.cost_model import CostModel, CostModelExecutor
from pdserve.sim.hash_lm import hash_layout

RATIOS = (0.1, 0.2, 0.4, 0.6, 0.9, 1.5, 3.0)
AMPLE_TIMES = 64
"""Memory of the case `ample`, as a multiple of the others'."""
PAGE_TOKENS = GRID_TOKENS = 64
CHUNK_TOKENS, MIXED_CHUNK_TOKENS, NUM_ROWS = 8192, 2048, 256
"""The defaults on CUDA."""
MAX_STEPS = 200_000


@dataclasses.dataclass(frozen=True)
class Pools:
    """Pages and state slots of a server."""

    num_pages: int
    num_slots: int

    @classmethod
    def sized(cls, layout: KVLayout, num_bytes: int, ratio: float) -> Pools:
        """Divide the bytes as a server does, but with slots for any number of requests."""
        one = sizes_of_one(layout, context_length=GRID_TOKENS, step_tokens=CHUNK_TOKENS)
        slots = sizes_of_many(one, 1, requests_in(num_bytes, ratio, layout, one))
        return cls((num_bytes - group_bytes(layout, slots)) // layout.page_bytes, slots.num_slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """One workload, played in one division of the memory. Seconds are the cost model's.

    `budget_tokens`: tokens whose KV has the size of the memory. `ratio` None: ample memory. `num_requests` have ended
    without an error. `mean_running`: requests with a row, over time. `differences`: what the scheduler's self-audit
    found afterwards.
    """

    model: str
    workload: str
    budget_tokens: int
    ratio: float | None
    pools: Pools
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    states_kept: int
    states_evicted: int
    states_cached: int
    pages_evicted: int
    retractions: int
    mean_running: float
    most_running: int
    mean_ttft_s: float
    duration_s: float
    num_steps: int
    differences: tuple[str, ...]

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Played:
        """Undo `as_json`."""
        own = {field.name: entry[field.name] for field in dataclasses.fields(cls)}
        return cls(**own | {"pools": Pools(**entry["pools"]), "differences": tuple(entry["differences"])})

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def requests_per_s(self) -> float:
        """Requests that ended in a second."""
        return self.num_requests / self.duration_s

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        derived = {"cached_share": self.cached_share, "requests_per_s": self.requests_per_s}
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass
class _Session:
    """A session under way: `tokens` so far, and its turns to come."""

    turns: list[Turn]
    tokens: list[int] = dataclasses.field(default_factory=list)
    posted_s: float = 0.0
    ttft_s: float | None = None
    cached_tokens: int = 0


class Player:
    """Plays a workload on one scheduler. Use it once."""

    def __init__(self, workload: Workload, layout: KVLayout, pools: Pools, costs: CostModel | None = None) -> None:
        one = sizes_of_one(layout, context_length=GRID_TOKENS, step_tokens=CHUNK_TOKENS)
        self.workload = workload
        self.clock = ManualClock()
        self.memory = KVMemory(
            layout,
            pools.num_pages,
            PageTable(NUM_ROWS, layout.pages_for(workload.most_tokens) + 1),
            0,
            prefix_cache=workload.has_prefix_cache,
            group_sizes=sizes_of_many(one, 1, pools.num_slots),
        )
        # steps write no KV, so the executor needs no pool of this layout
        executor = CostModelExecutor(hash_layout(PAGE_TOKENS, num_layers=1), 1, costs or CostModel(), self.clock)
        limits = StepLimits(chunk_tokens=CHUNK_TOKENS, mixed_chunk_tokens=MIXED_CHUNK_TOKENS, state_grid=GRID_TOKENS)
        self.mailbox: Mailbox[Event] = Mailbox()
        self.context = SchedulerContext(self.memory, executor, Outbox(self._hear), self.clock, limits)
        role = MonolithRole(self.context, WaitingQueue("fcfs", 10.0, self.memory))
        self.scheduler = Scheduler(role, self.context, None, self.mailbox, overlap=True)
        self._to_start = iter(workload.sessions)
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, _Session]] = []
        """Sessions between two turns: when the next one begins, and a number that orders equal times."""
        self._live: dict[str, _Session] = {}
        self._ttfts_s: list[float] = []
        self._prompt_tokens = self._cached_tokens = 0

    def play(self, model: str, budget_tokens: int, ratio: float | None, pools: Pools) -> Played:
        """Play all sessions to their ends.

        Raises:
            RuntimeError: a request has failed, or the sessions have not ended after `MAX_STEPS` steps.
        """
        for _ in range(self.workload.num_users):
            self._start_next()
        num_steps, row_s, most_running = 0, 0.0, 0
        while self._due or self._live:
            if num_steps == MAX_STEPS:
                raise RuntimeError(f"{len(self._live)} requests are under way after {MAX_STEPS} steps")
            self._post_due()
            before = self.clock.now()
            computed = self.scheduler.step()
            num_steps += computed
            running = self.memory.table.num_rows - self.memory.table.num_free
            row_s += running * (self.clock.now() - before)
            most_running = max(most_running, running)
            if not computed and self._live:
                raise RuntimeError(f"{len(self._live)} requests wait, and nothing can be computed")
            if not computed and self._due:
                self.clock.advance(max(0.0, self._due[0][0] - self.clock.now()))
        duration_s = self.clock.now()
        self.scheduler.step()  # frees what the last step could still write
        states, counters = self.memory.groups.states, self.context.counters
        return Played(
            model=model,
            workload=self.workload.name,
            budget_tokens=budget_tokens,
            ratio=ratio,
            pools=pools,
            num_requests=len(self._ttfts_s),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=counters["generation_tokens"],
            states_kept=counters["states_kept"],
            states_evicted=0 if states is None else states.num_evicted,
            states_cached=0 if states is None else len(states),
            pages_evicted=self.memory.pages.num_evicted,
            retractions=counters["requests_retracted"],
            mean_running=row_s / duration_s,
            most_running=most_running,
            mean_ttft_s=statistics.mean(self._ttfts_s),
            duration_s=duration_s,
            num_steps=num_steps,
            differences=tuple(self.scheduler.audit()),
        )

    def _start_next(self) -> None:
        """Let a user without a session begin the next one."""
        turns = next(self._to_start, None)
        if turns is not None:
            self._schedule(_Session(list(turns)))

    def _schedule(self, session: _Session) -> None:
        heapq.heappush(self._due, (self.clock.now() + session.turns[0].think_s, next(self._numbers), session))

    def _post_due(self) -> None:
        """Send the requests whose time has come."""
        while self._due and self._due[0][0] <= self.clock.now():
            due_s, number, session = heapq.heappop(self._due)
            turn = session.turns.pop(0)
            session.tokens += turn.new_ids
            session.posted_s, session.ttft_s = due_s, None
            rid = f"request-{number}"
            self._live[rid] = session
            sampling = CoreSamplingParams(max_new_tokens=turn.max_new_tokens, temperature=0.0, ignore_eos=True)
            self.mailbox.post(GenerateRequest(rid=rid, input_ids=list(session.tokens), sampling=sampling))

    def _hear(self, message: ToApi) -> None:
        assert isinstance(message, OutputBatch), message
        for output in message.outputs:
            self._take(output, self._live[output.rid])

    def _take(self, output: EngineCoreOutput, session: _Session) -> None:
        if output.finish is not None and output.finish.failure is not None:
            raise RuntimeError(f"{output.rid} has failed: {output.finish.failure.message}")
        if session.ttft_s is None:
            session.ttft_s = self.clock.now() - session.posted_s
            self._ttfts_s.append(session.ttft_s)
        session.tokens += output.token_ids
        if output.finish is not None:
            del self._live[output.rid]
            self._prompt_tokens += output.prompt_tokens
            self._cached_tokens += output.cached_tokens
            if session.turns:
                self._schedule(session)
            else:
                self._start_next()


def layout_of(model: str) -> KVLayout:
    """The KV layout of a shape in bfloat16, with its stamps."""
    spec = spec_from_config(HYBRID_MODELS[model], {}, where=model)
    return kv_layout(spec, PAGE_TOKENS, "bfloat16").with_stamps()


def state_tokens(layout: KVLayout) -> float:
    """Tokens whose KV has the size of one state slot."""
    one = sizes_of_one(layout, context_length=GRID_TOKENS, step_tokens=CHUNK_TOKENS)
    return group_bytes(layout, one) / layout.token_bytes


def measure(model: str, workload: Workload, budget_tokens: int, ratios: Iterable[float | None]) -> list[Played]:
    """Play a workload once for each ratio, in memory for the KV of `budget_tokens` tokens."""
    layout, found = layout_of(model), list[Played]()
    for ratio in ratios:
        num_bytes = budget_tokens * layout.token_bytes * (AMPLE_TIMES if ratio is None else 1)
        pools = Pools.sized(layout, num_bytes, 1.0 if ratio is None else ratio)
        found.append(Player(workload, layout, pools).play(model, budget_tokens, ratio, pools))
        one = found[-1]
        print(
            f"{model} {workload.name} {budget_tokens} {_ratio(ratio)}: {one.cached_share:.1%} cached, "
            f"{one.requests_per_s:.2f} requests/s, TTFT {one.mean_ttft_s * 1e3:.0f} ms, {one.num_steps} steps",
            flush=True,
        )
    return found


def cases(found: Sequence[Played]) -> list[list[Played]]:
    """The runs by model, workload and memory, without those in ample memory."""
    groups: dict[tuple[str, str, int], list[Played]] = {}
    for one in found:
        if one.ratio is not None:
            groups.setdefault((one.model, one.workload, one.budget_tokens), []).append(one)
    return list(groups.values())


def relative_to_best(
    found: Sequence[Played], value: Callable[[Played], float], best: Callable[[Iterable[float]], float]
) -> dict[float, list[float]]:
    """For each ratio and case, `value` divided by that of the case's best ratio. `best`: `max` or `min`."""
    relative: dict[float, list[float]] = {}
    for group in cases(found):
        limit = best(map(value, group))
        for one in group:
            assert one.ratio is not None
            relative.setdefault(one.ratio, []).append(value(one) / limit)
    return relative


def summary_table(found: Sequence[Played]) -> str:
    """A line per ratio, over all cases."""
    header = ["ratio", "requests/s of the best: mean", "least", "TTFT of the best: mean", "most"]
    multiples = relative_to_best(found, lambda one: one.mean_ttft_s, min)
    rows = [
        [
            _ratio(ratio),
            f"{statistics.geometric_mean(shares):.1%}",
            f"{min(shares):.1%}",
            f"{statistics.geometric_mean(multiples[ratio]):.2f}x",
            f"{max(multiples[ratio]):.2f}x",
        ]
        for ratio, shares in sorted(relative_to_best(found, lambda one: one.requests_per_s, max).items())
    ]
    return report.markdown_table(header, rows)


def case_table(found: Sequence[Played]) -> str:
    """A line per ratio of one model and workload."""
    header = ["ratio", "slots", "pages", "cached", "states kept", "states evicted", "retractions", "running", "most"]
    header += ["TTFT, ms", "requests/s"]
    rows = [
        [
            _ratio(one.ratio),
            f"{one.pools.num_slots:,}",
            f"{one.pools.num_pages:,}",
            f"{one.cached_share:.1%}",
            f"{one.states_kept:,}",
            f"{one.states_evicted:,}",
            f"{one.retractions:,}",
            f"{one.mean_running:.1f}",
            f"{one.most_running:,}",
            f"{one.mean_ttft_s * 1e3:,.0f}",
            f"{one.requests_per_s:.3g}",
        ]
        for one in found
    ]
    return report.markdown_table(header, rows)


def _ratio(ratio: float | None) -> str:
    return "ample" if ratio is None else f"{ratio:g}"


def document(facts: dict[str, Any], found: Sequence[Played]) -> str:
    """The whole report in Markdown."""
    parts, summaries = [], []
    for budget in sorted({one.budget_tokens for one in found}):
        there = [one for one in found if one.budget_tokens == budget]
        summaries.append(f"Memory of {budget:,} tokens:\n\n{summary_table(there)}")
        for model, workload in dict.fromkeys((one.model, one.workload) for one in there):
            ones = [one for one in there if (one.model, one.workload) == (model, workload)]
            tokens = ones[0].prompt_tokens / ones[0].num_requests
            parts.append(
                f"**{model}, {workload}**, memory of {budget:,} tokens: {ones[0].num_requests:,} requests of "
                f"{tokens:,.0f} prompt tokens on average, {facts['num_users'][workload]} users.\n\n{case_table(ones)}"
            )
    tables, summary = "\n\n".join(parts), "\n\n".join(summaries)
    states = ", ".join(f"{tokens:,.0f} tokens ({model})" for model, tokens in facts["state_tokens"].items())
    commands = ", ".join(f"`{command}`" for command in facts["commands"])
    return f"""# Memory of state slots and KV pages, {facts["date"]}

Requests per second and mean TTFT by `--mamba-full-memory-ratio`, compared with the best ratio of each case (model, \
workload and memory). Memory has the size of the KV of that many tokens. One state slot has that of {states}.

{summary}

{tables}

- The seconds are those of a cost model (`pdserve/sim/cost_model.py`, about an 8B model on one H100), so the machine \
does not matter. Copies of states cost nothing in it.
- Slots are for any number of requests: a server stops at three for each of `--max-running-requests`.
- Traces are samples, see `--trace-every`, `--trace-requests` and `--most-prompt-tokens`; their times are not used.
- `running`: requests with a row, mean over time and most. `ample`: {AMPLE_TIMES} times the memory.
- Revision {facts["revision"]}.
- Commands: {commands}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(HYBRID_MODELS), default=list(HYBRID_MODELS))
    add("--ratios", type=float, nargs="+", default=list(RATIOS))
    add("--budget-tokens", type=int, nargs="+", default=[1 << 17, 1 << 18], help="sizes of the memory, as tokens of KV")
    add("--sessions", type=int, default=40, help="chats; there are four times as many single answers; 0: neither")
    add("--workloads", nargs="+", help="play only these, by name")
    add("--trace", type=Path, nargs="*", default=[], help="JSON lines with input_length, output_length, hash_ids")
    add("--trace-every", type=int, default=40, help="take one conversation of this many of a trace")
    add("--trace-requests", type=int, default=100, help="most requests of a trace")
    add("--trace-users", type=int, default=6, help="requests of a trace that are under way at a time")
    add("--most-prompt-tokens", type=int, default=24_576, help="longer prompts of a trace are left out")
    add("--add-to", type=Path, help="results of an earlier run, whose cases the report has too")
    report.add_write_flags(parser, "state-ratio")
    args = parser.parse_args(argv)
    counts = (*args.budget_tokens, args.trace_every, args.trace_requests, args.trace_users, args.most_prompt_tokens)
    if min(*counts) < 1 or args.sessions < 0 or not all(0 < ratio < math.inf for ratio in args.ratios):
        parser.error("all numbers must be positive; --sessions may be 0")
    if args.sessions == 0 and not args.trace:
        parser.error("--sessions 0 needs --trace")
    return args


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the flags ask for."""
    found = []
    if args.sessions:
        found += [
            state_workloads.chats(args.sessions, 32),
            state_workloads.chats(args.sessions, 12, name="long chats", scale=8),
            state_workloads.answers(4 * args.sessions, 64),
        ]
    for path in args.trace:
        found.append(
            state_workloads.trace(
                path,
                args.trace_users,
                every=args.trace_every,
                most_prompt_tokens=args.most_prompt_tokens,
                most_requests=args.trace_requests,
            )
        )
    return [one for one in found if args.workloads is None or one.name in args.workloads]


def shown(words: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The arguments for the report: without `--results`, and paths without their directories, those of one machine."""
    paths, kept = {*args.trace, args.add_to}, list[str]()
    for before, word in itertools.pairwise(["", *words]):
        if word != "--results" and before != "--results":
            kept.append(Path(word).name if Path(word) in paths else word)
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; exit status 1 when a self-audit found a difference."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_flags(words)
    nothing: dict[str, Any] = {"played": [], "num_users": {}, "state_tokens": {}, "commands": []}
    before = nothing if args.add_to is None else json.loads(args.add_to.read_text())
    bench = report.Run("state-ratio", shown(words, args), module="bench_state_ratio")
    loads = workloads(args)
    ratios: list[float | None] = [*sorted(args.ratios), None]
    found = [Played.from_json(entry) for entry in before["played"]]
    for model, load, budget in itertools.product(args.models, loads, args.budget_tokens):
        found += measure(model, load, budget, ratios)
    facts = bench.facts(
        num_users=before["num_users"] | {load.name: load.num_users for load in loads},
        state_tokens=before["state_tokens"] | {model: state_tokens(layout_of(model)) for model in args.models},
        played=[one.as_json() for one in found],
    )
    facts["commands"] = [*before["commands"], facts["command"]]
    bench.publish(args, document(facts, found), facts)
    return 1 if any(one.differences for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
