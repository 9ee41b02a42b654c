"""Deployments that are far too small for their load: every page is fought for. Shared with the tests.

`python -m tests.world.pressure --seeds 2000` plays seeds on all cores and prints how often each event happened.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from pdserve.base.clock import ManualClock
from pdserve.config.schedule_group import SchedulePolicy
from pdserve.memory.layout import pages_for
from pdserve.protocol.messages import AbortRequest
from pdserve.scheduler.request import PriorityRules
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.world import Prompt, RequestHalf, Shape, SimNode, World, monolith_tokens, request
from tests.world.workload import optimistic

MAX_PROMPT, MAX_NEW = 40, 24
CALM = Faults()
FAULTS = Faults(lost=0.05, max_delay_s=0.6, abort=0.005, copy_failed=0.01)
KILLS = Faults(lost=0.05, max_delay_s=0.6, abort=0.005, copy_failed=0.02, kill=0.004)
IN_MOST = ("cached_tokens", "evicted_pages", "requests_retracted", "offloaded_pages", "restored_pages", "aborts")
"""What must happen in more than half of the seeds for a run to say something; the rest must happen at all."""
AT_ALL = ("recomputed_tokens", "decode_cached_tokens", "copies_failed", "requests_preempted")
POLICIES: tuple[SchedulePolicy, ...] = ("fcfs", "lpm", "priority")


@dataclasses.dataclass(frozen=True)
class Played:
    """One seed: what happened, and how often."""

    shape: Shape
    events: Counter[str]
    num_finished: int


def pressured(seed: int) -> tuple[Shape, list[Prompt]]:
    """A seeded shape with hardly more memory than one request can need, and conversations that begin alike."""
    rng = random.Random(seed)
    page_tokens = rng.choice((1, 2, 4, 8))
    shape = Shape(
        page_tokens=page_tokens,
        num_pages=pages_for(MAX_PROMPT + MAX_NEW, page_tokens) + rng.choice((0, 1, 3, 6)),
        num_rows=rng.choice((4, 8)),
        num_aux=rng.choice((4, 8)),
        chunk_tokens=rng.choice((None, page_tokens * rng.randint(1, 8), page_tokens * rng.randint(1, 64))),
        decode_prefix_cache=rng.random() < 0.5,
        eviction=rng.choice(("lru", "lfu", "priority")),
        policy=rng.choice(POLICIES),
        overlap=rng.random() < 0.5,
        late=rng.random() < 0.5,
        offload_pages=rng.choice((0, 6, 100, 100, 100)),
        reserved_decode_tokens=rng.choice((0, 1, 2)),
        layer_groups=rng.choice((0, 0, 1, 2, 3)),
        num_stages=rng.choice((1, 1, 1, 2, 3)),
        optimistic=optimistic(seed),
    )
    if shape.chunk_tokens is not None and seed % 2:
        shape = dataclasses.replace(shape, mixed_chunk_tokens=seed // 2 % shape.chunk_tokens + 1)
    if seed // 4 % 2:
        shape = dataclasses.replace(shape, saturation_tokens=seed // 8 % 40 + 1)
    if seed % 3 == 1:
        rules = PriorityRules(enabled=True, threshold=seed // 3 % 2, low_values_first=seed % 5 == 0)
        shape = dataclasses.replace(shape, rules=rules, policy="fcfs" if shape.policy == "lpm" else shape.policy)
    begins = [_tokens(rng, rng.randint(4, 20)) for _ in range(2)]
    prompts: list[Prompt] = []
    for _ in range(rng.randint(5, 10)):
        tokens = rng.choice(begins) + _tokens(rng, rng.randint(1, 4))
        prompts.append(Prompt(tokens, rng.randint(4, MAX_NEW), rng.randint(0, 2)))
    answers = monolith_tokens(shape, prompts)
    for prompt, answer in zip(prompts[:4], answers, strict=False):  # second turns
        tokens = (prompt.tokens + tuple(answer))[: MAX_PROMPT - 2] + _tokens(rng, 2)
        prompts.append(Prompt(tokens, rng.randint(4, MAX_NEW)))
    rng.shuffle(prompts)
    return shape, prompts


def run_to_idle(
    seed: int,
    shape: Shape,
    prompts: Sequence[Prompt],
    rng: random.Random,
    *,
    arrivals: float,
    faults: Faults = CALM,
    net: SimNet | None = None,
) -> SimNode:
    """Run a monolith until it is idle, with some aborts. `arrivals`: chance of a new request in a step. `net` None: a
    new one with `faults`.

    Raises AssertionError if it does not get idle, and for memory that is not free.
    """
    if net is None:
        net = SimNet(seed, ManualClock(), faults)
    node = SimNode("null", shape, net, "mono", "mono")
    todo = list(enumerate(prompts))
    for _ in range(20_000):
        net.clock.advance(0.05)
        net.deliver()
        if todo and rng.random() < arrivals:
            index, prompt = todo.pop()
            node.mailbox.post(request(f"r{index}", prompt, None))
        if rng.random() < 0.01:
            node.mailbox.post(AbortRequest(rid=f"r{rng.randrange(len(prompts))}"))
        if not node.scheduler.step() and not todo and node.idle:
            break
    assert node.idle, f"seed {seed}: stuck with {node.scheduler.role.queues()}"
    assert not node.leaks(), f"seed {seed}: {node.leaks()}"
    return node


def run_alone(
    seed: int,
    shape: Shape,
    prompts: Sequence[Prompt],
    rng: random.Random,
    *,
    arrivals: float,
    faults: Faults = CALM,
    net: SimNet | None = None,
) -> SimNode:
    """See `run_to_idle`. Raises AssertionError also for a wrong token, and for a request without an end."""
    expected = monolith_tokens(shape, prompts)
    node = run_to_idle(seed, shape, prompts, rng, arrivals=arrivals, faults=faults, net=net)
    for index, tokens in enumerate(expected):
        half = node.halves[f"r{index}"]
        assert half.finish is not None and (half.finish.type == "abort" or half.tokens == tokens), f"seed {seed}"
    return node


def run_pair(
    seed: int, shape: Shape, prompts: Sequence[Prompt], faults: Faults = FAULTS
) -> tuple[World, list[RequestHalf | None]]:
    """Run a pair with these faults; return it and the ends of the requests, in order.

    Raises AssertionError for a token of a finished request that is not the monolith's, and for memory that is not free.
    """
    expected = monolith_tokens(shape, prompts)
    world = World(seed, shape, faults)
    halves = world.run(prompts, num_rooms=8)
    for index, half in enumerate(halves):
        if half is not None and half.finish is not None and half.finish.type != "abort":
            assert half.tokens == expected[index], f"seed {seed}, request {index}: tokens differ from the monolith's"
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return world, halves


def counts_of(*nodes: SimNode) -> Counter[str]:
    """What the schedulers counted and their caches evicted; no received state and no aux record was another's."""
    found = Counter[str]()
    for node in nodes:
        groups = node.memory.groups
        found += node.scheduler.context.counters
        found["evicted_pages"] += node.memory.pages.num_evicted
        found["windows_evicted"] += 0 if groups.windows is None else groups.windows.num_evicted
        found["states_evicted"] += 0 if groups.states is None else groups.states.num_evicted
    for name in ("state_mismatches", "metadata_mismatches"):
        assert not found[name], name
    return found


def play_cached(seed: int, shape: Shape, prompts: Sequence[Prompt]) -> Counter[str]:
    """A pair with retraction, offload, aborts and failed copies; or, with an odd seed, a monolith that retracts
    requests. Returns what happened.
    """
    if seed % 2 == 0:
        world, _ = run_pair(seed, shape, prompts)
        return counts_of(world.prefill, world.decode)
    rng = random.Random(f"mono {seed}")
    shape = dataclasses.replace(shape, offload_pages=rng.choice((0, 0, 6)))
    return counts_of(run_alone(seed, shape, prompts, rng, arrivals=0.3))


def assert_caught(play: Callable[[int], object], num_seeds: int, *raised: type[Exception]) -> None:
    """Play seeds until one raises an AssertionError or one of `raised`; fails when none does."""
    for seed in range(num_seeds):
        try:
            play(seed)
        except (AssertionError, *raised):
            return
    pytest.fail(f"the planted bug is not caught in {num_seeds} seeds")


def press_monolith(seed: int) -> Counter[str]:
    """The aggregated server with hardly more memory than its largest request needs; what happened."""
    rng = random.Random(seed)
    shape, prompts = pressured(seed)
    need = max(len(prompt.tokens) + prompt.max_new_tokens - 1 for prompt in prompts)
    num_pages = pages_for(need, shape.page_tokens) + rng.choice((0, 0, 1, 5))
    shape = dataclasses.replace(shape, num_pages=num_pages, prefix_cache=rng.random() < 0.8)
    return run_alone(seed, shape, prompts, rng, arrivals=0.5).scheduler.context.counters


def crowded(seed: int) -> Shape:
    """The shape of a seed with priority scheduling, few rows and short queues."""
    shape, _ = pressured(seed)
    return dataclasses.replace(
        shape,
        rules=PriorityRules(enabled=True, threshold=seed % 2, low_values_first=seed % 5 == 0),
        policy="fcfs" if shape.policy == "lpm" else shape.policy,
        num_rows=1 + seed % 4,
        max_queued=(None, 1, 2)[seed % 3],
        load_failure_policy="recompute" if seed // 2 % 2 else "fail",
    )


def press(seed: int, faults: Faults, shape: Shape | None = None) -> Played:
    """Run a seed and hold it against the oracle: the monolith's tokens for whoever finished, and nothing left.

    `shape`: another one than the seed's.
    """
    given, prompts = pressured(seed)
    shape = shape or given
    world, halves = run_pair(seed, shape, prompts, faults)
    ends = [half.finish for half in halves if half is not None and half.finish is not None]
    return Played(shape, _events(world), sum(end.type != "abort" for end in ends))


def _events(world: World) -> Counter[str]:
    events: Counter[str] = Counter(aborts=world.num_aborts, kills=world.num_kills)
    for node in (world.prefill, world.decode, *world.dead):
        for name, number in node.scheduler.state().counters.items():
            events[name] += int(number)
    return events


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(0, 999) for _ in range(count))


@dataclasses.dataclass
class Tally:
    """Many seeds together: how often each event happened, and in how many seeds."""

    num_seeds: int = 0
    num_finished: int = 0
    times: Counter[str] = dataclasses.field(default_factory=Counter)
    seeds: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, played: Played) -> None:
        """One more seed."""
        self.num_seeds += 1
        self.num_finished += played.num_finished
        self.times += played.events
        self.seeds += Counter(name for name, number in played.events.items() if number)

    def lacks(self) -> list[str]:
        """Events that did not happen often enough."""
        rare = [name for name in IN_MOST if self.seeds[name] * 2 <= self.num_seeds]
        return rare + [name for name in AT_ALL if not self.seeds[name]]


def tally_of(seeds: range, faults: Faults) -> Tally:
    """Play many seeds on all cores."""
    tally = Tally()
    with multiprocessing.get_context("spawn").Pool() as pool:
        for played in pool.imap_unordered(functools.partial(press, faults=faults), seeds, chunksize=20):
            tally.add(played)
    return tally


def main() -> None:
    """Print the tally of many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    count = parser.parse_args().seeds
    tally = tally_of(range(count), FAULTS)
    print(f"{count} seeds, {tally.num_finished} requests finished with the monolith's tokens, nothing left")
    print("| event | times | seeds |\n|---|---|---|")
    for name in (*IN_MOST, *AT_ALL):
        print(f"| {name} | {tally.times[name]} | {tally.seeds[name]} |")
    assert not tally.lacks(), tally.lacks()


if __name__ == "__main__":
    main()
