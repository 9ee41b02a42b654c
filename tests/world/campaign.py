"""Clusters in which everything goes wrong at once. Shared with the tests.

`python -m tests.world.campaign --seeds 10000 --workers 2` plays seeds and prints how often each fault happened.
`--only KIND` plays one kind of fault, `--only KIND+KIND` two, and `--seed N` one seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import pages_for
from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import monolith_tokens
from pdserve.sim.router import ClientAnswer
from pdserve.sim.shape import Prompt, Shape
from tests.world.events import events_of
from tests.world.storage import faults_of, stored_by_other_weights, with_store
from tests.world.tiers import POLICIES
from tests.world.workload import MAX_NEW, MAX_PROMPT, optimistic, with_drafts, with_groups, with_salts, with_states

Rng = random.Random
KINDS: Mapping[str, Callable[[Rng], dict[str, Any]]] = {
    "lost": lambda rng: {"lost": rng.uniform(0.02, 0.3)},
    "late": lambda rng: {"lands_late": True, "max_delay_s": rng.uniform(0.5, 4.0)},
    "copies": lambda rng: {"copy_failed": rng.uniform(0.01, 0.15)},
    "notes": lambda rng: {"note_lost": rng.uniform(0.01, 0.05)},
    "aborts": lambda rng: {"abort": rng.uniform(0.005, 0.05)},
    "kills": lambda rng: {"kill": rng.uniform(0.001, 0.01)},
    "deaths": lambda rng: {"rank_death": rng.uniform(0.001, 0.01)},
    "cuts": lambda rng: {"cut": rng.uniform(0.005, 0.05), "max_cut_s": rng.choice((20.0, 60.0, 200.0))},
    "lies": lambda rng: {"probe_lies": rng.uniform(0.3, 0.9), "lost": rng.uniform(0.2, 0.5)},
    "usurpers": lambda rng: {"usurper": rng.uniform(0.01, 0.1)},
    "replays": lambda rng: {"replayed": rng.uniform(0.1, 0.8)},
    "stops": lambda rng: _stops(rng.uniform(0.001, 0.01), rng.choice((20.0, 90.0, 90.0, 500.0))),
    "clocks": lambda rng: {"clocks_differ": True, "clock_leap": rng.uniform(0.005, 0.05)},
    "frames": lambda rng: {"frame_damaged": rng.uniform(0.01, 0.15), "odd_frame": rng.uniform(0.02, 0.2)},
    "damage": lambda rng: {"kv_damaged": rng.uniform(0.002, 0.05)},
    "look-ups": lambda rng: {
        "slow_directory": rng.uniform(0.2, 0.9),
        "stale_directory": rng.uniform(0.0, 0.4),
        "max_look_up_s": rng.choice((10.0, 60.0, 90.0)),
    },
    "switches": lambda rng: {"switch": rng.uniform(0.001, 0.01)},
    "changes": lambda rng: {"change": rng.uniform(0.002, 0.02), "change_failed": rng.choice((0.0, 0.3))},
    "releases": lambda rng: {"release": rng.uniform(0.002, 0.02), "change_failed": rng.choice((0.0, 0.3))},
    "ranks": lambda rng: {},
    "replicas": lambda rng: {},
}
"""What goes wrong, by kind: fields of `Faults`. With `ranks` and `replicas` all servers have several."""
HARMLESS = frozenset({"lost", "late", "usurpers", "replays", "clocks", "frames", "ranks", "replicas"})
"""With these alone every client gets all its tokens, at the first try; so does it with short `stops`."""
LOCAL = frozenset({"aborts", "kills", "deaths"})
"""With these as well, those clients do that were not hit, nor the servers of theirs."""
PROMPT_S = 300.0
"""By then a client has its answer, whatever it is, unless a server, a look-up or a link stood still for longer."""
STAND_STILL = {"stops", "cuts"}
MEETS = 6
"""Rooms, of which as many requests run at once."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a seed stands for."""

    kinds: tuple[str, ...]
    shape: Shape
    layout: Layout
    faults: Faults
    prompts: Sequence[Prompt]
    late: Sequence[Prompt]
    """Those that come after all has healed."""


@dataclasses.dataclass(frozen=True)
class Played:
    """What happened in a seed. `failure` says what was wrong with it."""

    seed: int
    kinds: tuple[str, ...]
    counts: Counter[str]
    failure: str | None = None


Model = Literal["full", "groups", "states", "drafts"]
"""Full attention; also a window and a state group; also a state group, with a prefix cache that keeps states.

With `drafts` the model is one of these in turn, and all servers decode speculatively.
"""


def base_model(seed: int, model: Model) -> Model:
    """The model whose groups the servers of a seed have."""
    bases: tuple[Model, ...] = ("full", "groups", "states")
    return bases[seed % 3] if model == "drafts" else model


def setting(seed: int, only: str | None = None, *, without: str | None = None, model: Model = "full") -> Setting:
    """A seeded cluster, workload and choice of faults: one kind of every fourth seed, several of the others.

    `without` is a kind that is left out of the same cluster and workload: its faults, or the replicas or ranks. A
    `model` with other groups is on ranks of all kinds.
    """
    rng = random.Random(f"campaign {seed}")
    names = list(KINDS)
    if only is not None:
        kinds = tuple(only.split("+")) if only else ()
    elif seed % 4 == 0:
        kinds = (names[seed // 4 % len(names)],)
    else:
        kinds = tuple(name for name in names if rng.random() < 0.3)
    drawn = {kind: KINDS[kind](rng) for kind in kinds}
    prompts = _prompts(rng)
    late = [dataclasses.replace(prompt, tokens=(*prompt.tokens, 1)) for prompt in prompts[:6]]
    shape, layout = _cluster(rng, kinds)
    shape = dataclasses.replace(shape, optimistic=optimistic(seed))
    if without == "replicas":
        layout = dataclasses.replace(layout, prefill_dp=1, decode_dp=1, redirect=0.0)
    elif without == "ranks":
        layout = dataclasses.replace(layout, prefill_ranks=ParallelShape(), decode_ranks=ParallelShape())
    base = base_model(seed, model)
    if model == "drafts":
        draw = random.Random(f"drafts {seed}")
        prompts = [dataclasses.replace(it, max_new_tokens=draw.choice((it.max_new_tokens, MAX_NEW))) for it in prompts]
        shape, prompts = with_drafts(shape, prompts, draw)
    if base != "full":
        shape, layout = _with_groups(random.Random(f"{base} {seed}"), shape, layout, kinds, base)
    if base == "states":
        prompts = _branching(random.Random(f"branches {seed}"), prompts)
    if model in ("states", "drafts"):
        late = [dataclasses.replace(prompt, tokens=(*prompt.tokens, 1)) for prompt in prompts[:6]]
    prompts, late = (with_salts(random.Random(f"salts {seed}"), given) for given in (prompts, late))
    drawn.pop(without or "", None)
    fields = {name: value for of_kind in drawn.values() for name, value in of_kind.items()}
    return Setting(tuple(drawn), shape, layout, Faults(**fields), prompts, late if seed % 2 else ())


def with_migrations(seed: int, it: Setting) -> Setting:
    """The same seed with at least two decode servers, longer outputs, and requests that move between the servers.

    In half of the seeds with full attention only, outputs are long enough for stages, which need a prefix cache.
    In half of all seeds a server has room for requests of others; else it refuses more of them.
    """
    rng = random.Random(f"migrations {seed}")
    rate, shape, num_new = rng.choice((0.1, 0.3, 0.8)), it.shape, MAX_NEW
    if rng.random() < 0.5 and not (shape.window or shape.has_state):
        num_new = 5 * MAX_NEW
        num_pages = 3 * pages_for(MAX_PROMPT + num_new, shape.page_tokens)
        shape = dataclasses.replace(shape, decode_prefix_cache=True, num_pages=num_pages)
    prompts, late = (
        [dataclasses.replace(one, max_new_tokens=num_new) for one in each] for each in (it.prompts, it.late)
    )
    layout = dataclasses.replace(it.layout, decodes=max(2, it.layout.decodes))
    draw = random.Random(f"drains {seed}")
    if draw.random() < 0.5:
        shape = _roomy(shape, MAX_PROMPT + num_new)
    faults = dataclasses.replace(
        it.faults,
        migrate=rate,
        drain_migrate=draw.choice((0.0, 0.1, 0.5)),
        stage_death=draw.uniform(0.02, 0.1) if {"kills", "deaths"}.intersection(it.kinds) else 0.0,
    )
    return dataclasses.replace(it, shape=shape, layout=layout, faults=faults, prompts=prompts, late=late)


def _roomy(shape: Shape, longest: int) -> Shape:
    """The same server with memory for two requests of up to `longest` tokens, and aux slots for more."""
    return dataclasses.replace(
        shape,
        num_pages=max(shape.num_pages, 2 * pages_for(longest, shape.page_tokens)),
        num_aux=max(6, shape.num_aux),
        num_window_pages=2 * shape.num_window_pages,
        num_slots=2 * shape.num_slots,
    )


def with_tiers(seed: int, it: Setting) -> Setting:
    """The same seed with a host tier, a store with its faults, a prefix cache, and prompts that begin alike."""
    rng = random.Random(f"tiers {seed}")
    shape = dataclasses.replace(
        with_store(rng, it.shape),
        decode_prefix_cache=True,
        write_policy=rng.choice(POLICIES),
        offload_pages=it.shape.offload_pages,
    )
    prompts, late = (_branching(rng, each) for each in (it.prompts, it.late))
    return dataclasses.replace(it, shape=shape, faults=faults_of(seed, it.faults), prompts=prompts, late=late)


def play(
    seed: int,
    only: str | None = None,
    *,
    without: str | None = None,
    model: Model = "full",
    migrations: bool = False,
    tiers: bool = False,
) -> Counter[str]:
    """Run a seed and hold it against the oracle; counts of what happened. For `without` and `model` see `setting`.

    `migrations`: see `with_migrations`. `tiers`: see `with_tiers`.

    Raises:
        AssertionError: tokens that are not the monolith's, a copy that touched another's page, something left, a
            request that ended twice or never, or one that failed though nothing had gone wrong that may fail one.
    """
    it = setting(seed, only, without=without, model=model)
    it = with_migrations(seed, it) if migrations else it
    it = with_tiers(seed, it) if tiers else it
    base = base_model(seed, model)
    expected = monolith_tokens(it.shape, [*it.prompts, *it.late])
    cluster = Cluster(seed, it.shape, it.faults, it.layout)
    if tiers and seed % 3 == 0:
        cluster.net.objects.update(stored_by_other_weights(seed, it.shape, it.prompts))
    answers = cluster.run(it.prompts, MEETS, it.late)
    local = LOCAL if it.faults.max_stop_s > 90.0 or _takes_turns(it, base, migrations) else LOCAL | {"stops"}
    spared = _spared(it, cluster) if (HARMLESS | local).issuperset(it.kinds) else set()
    spared |= set(range(len(it.prompts), len(answers)))
    is_prompt = len(it.kinds) < 3 and not STAND_STILL.intersection(it.kinds) and it.faults.max_look_up_s <= 60.0
    most_s = PROMPT_S if base == "full" else 2 * PROMPT_S  # more ranks: a copy of each request fails more often
    check(answers, expected, spared, most_s=most_s if is_prompt else math.inf)
    assert not cluster.leaks(), cluster.leaks()
    counts = cluster.net.counts
    if model != "full" or tiers:
        counts += events_of(cluster)
        assert "damage" in it.kinds or not counts["state mismatches"], "a state of another request or position"
        assert not counts["aux records of other KV or state"]
    counts["simulated seconds"] = round(cluster.clock.now())
    counts["requests"] = len(answers)
    counts["requests after all had healed"] = len(it.late)
    counts["requests with the monolith's tokens"] = sum(answer.error is None for answer in answers)
    counts["requests that were tried again and got them"] = sum(
        answer.error is None and answer.num_tries > 1 for answer in answers
    )
    return +counts


def _spared(it: Setting, cluster: Cluster) -> set[int]:
    """Clients on none of whose hosts a server died, and whose request was not aborted, nor one with the same prompt.

    An Abort that comes before pages were told names the prompt. A host's former server is known for a while.
    """
    assert cluster.router is not None
    hit = {it.prompts[index].tokens for index in cluster.mishaps.aborted}
    hosts = {server.host for server in [*cluster.dead, *cluster.servers] if server.dead or server.draining}
    for client in cluster.router.clients:
        if hosts.intersection(server.host for server in client.servers):
            hit.add(client.prompt.tokens)
    return {index for index, prompt in enumerate(it.prompts) if prompt.tokens not in hit}


def _takes_turns(it: Setting, base: str, migrations: bool) -> bool:
    """Whether decode servers have room for one request at a time: behind several that wait for servers which have
    stopped, the last one's turn may come too late.
    """
    if base != "full":
        return it.shape.num_slots < 3
    longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in it.prompts)
    return migrations and it.shape.num_pages < 2 * pages_for(longest, it.shape.page_tokens)


def check(
    answers: Sequence[ClientAnswer], expected: Sequence[Sequence[int]], spared: Container[int], *, most_s: float
) -> None:
    """What clients got, beside what a monolith gives, in at most `most_s` seconds each.

    Nothing has happened to those `spared` that may end a request.
    """
    for index, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
        if answer.error is None:
            assert answer.tokens == tokens, f"request {index}: tokens differ from the monolith's"
        else:
            assert answer.tokens == tokens[: len(answer.tokens)], f"request {index}: wrong tokens before its end"
        assert answer.took_s < most_s, f"request {index}: ended after {answer.took_s:.0f} s"
        if index in spared:
            tried = f"request {index}: {answer.error} after {answer.num_tries} tries"
            assert answer.error is None and answer.num_tries == 1, f"{tried}, though nothing had happened to it"


def _stops(stop: float, max_stop_s: float) -> dict[str, Any]:
    """The longest ones are rare, or nothing ever runs."""
    return {"stop": stop if max_stop_s < 100.0 else min(stop, 0.0005), "max_stop_s": max_stop_s}


def _cluster(rng: Rng, kinds: Sequence[str]) -> tuple[Shape, Layout]:
    page_tokens = rng.choice((1, 2, 4, 8))
    notifies = rng.random() < 0.5 or bool({"late", "notes"} & set(kinds))
    single, split = ParallelShape(), ParallelShape(tp_size=2)
    splits = (split,) if "ranks" in kinds else (single, single, single, split)
    if "damage" in kinds:  # a follower's pages may be another request's when it comes to hash them
        splits = (single,)
    replicas = (2,) if "replicas" in kinds else (1, 1, 2)
    layout = Layout(
        prefills=rng.choice((1, 2, 2, 3)),
        decodes=rng.choice((1, 2, 2, 3)),
        prefill_dp=rng.choice(replicas),
        decode_dp=rng.choice(replicas),
        prefill_ranks=rng.choice(splits),
        decode_ranks=rng.choice(splits),
        redirect=0.5 if "replicas" in kinds else rng.choice((0.0, 0.3)),
    )
    shape = Shape(
        page_tokens=page_tokens,
        num_pages=pages_for(MAX_PROMPT + MAX_NEW, page_tokens) + rng.choice((0, 1, 4, 16)),
        num_rows=rng.choice((2, 4, 8)),
        num_aux=rng.choice((2, 6)),
        chunk_tokens=rng.choice((None, 1, 3, 5, 9)),
        decode_prefix_cache=rng.random() < 0.3,
        overlap=rng.random() < 0.3,
        late=rng.random() < 0.3,
        offload_pages=rng.choice((0, 0, 20)),
        layer_groups=rng.choice((0, 0, 2)),
        notifies=notifies,
        fences=notifies or rng.random() < 0.5,  # an engine that notifies can end what a peer writes
        num_heads=2 if max(layout.prefill_ranks.num_ranks, layout.decode_ranks.num_ranks) > 1 else 1,
        load_failure_policy=rng.choice(("fail", "fail", "recompute")),
        kv_checksum="damage" in kinds,
    )
    return shape, layout


PREFILL_SPLITS = [ParallelShape(tp_size=tp, pp_size=pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3))]


def _with_groups(rng: Rng, shape: Shape, layout: Layout, kinds: Sequence[str], model: Model) -> tuple[Shape, Layout]:
    """A hybrid model with two KV heads, and prefill and decode split differently."""
    shape = with_groups(shape, rng) if model == "groups" else with_states(shape, rng)
    shape = dataclasses.replace(shape, num_heads=2)
    if "damage" in kinds:
        return shape, layout
    prefill = rng.choice(PREFILL_SPLITS)
    decode = ParallelShape(tp_size=rng.choice((1, 2, 4)), pp_size=rng.choice((1, prefill.pp_size)))
    return shape, dataclasses.replace(layout, prefill_ranks=prefill, decode_ranks=decode)


def _prompts(rng: Rng) -> list[Prompt]:
    """Some come again, so that a late message can meet a later use of its room."""
    prompts: list[Prompt] = []
    for _ in range(rng.randint(4, 12)):
        if prompts and rng.random() < 0.5:
            prompts.append(rng.choice(prompts[-2:]))
        else:
            tokens = tuple(rng.randint(0, 999) for _ in range(rng.randint(1, MAX_PROMPT)))
            prompts.append(Prompt(tokens, rng.randint(1, MAX_NEW)))
    return prompts


def _branching(rng: Rng, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, half of which begin like an earlier one."""
    found: list[Prompt] = []
    for prompt in prompts:
        if found and rng.random() < 0.5:
            begin = rng.choice(found).tokens
            tokens = (*begin[: rng.randint(1, len(begin))], *prompt.tokens)[:MAX_PROMPT]
            prompt = dataclasses.replace(prompt, tokens=tokens)
        found.append(prompt)
    return found


# ---------------------------------------------------------------------- many seeds


@dataclasses.dataclass
class Tally:
    """Many seeds together."""

    num_seeds: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    seeds: Counter[str] = dataclasses.field(default_factory=Counter)
    """In how many of them each thing happened."""
    failures: list[Played] = dataclasses.field(default_factory=list)

    def add(self, played: Played) -> None:
        """One more seed."""
        self.num_seeds += 1
        self.counts += played.counts
        self.seeds += Counter(name for name, number in played.counts.items() if number)
        if played.failure is not None:
            self.failures.append(played)


def try_seed(
    seed: int, only: str | None = None, *, model: Model = "full", migrations: bool = False, tiers: bool = False
) -> Played:
    """Play a seed; what was wrong is a value."""
    logging.disable(logging.ERROR)  # what fails on purpose is no news
    try:
        counts = play(seed, only, model=model, migrations=migrations, tiers=tiers)
        return Played(seed, setting(seed, only).kinds, counts)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {error}"
        return Played(seed, setting(seed, only).kinds, Counter(), words)
    finally:
        logging.disable(logging.NOTSET)


def tally_of(
    seeds: Sequence[int],
    workers: int,
    only: str | None = None,
    *,
    model: Model = "full",
    migrations: bool = False,
    tiers: bool = False,
) -> Tally:
    """Play many seeds in `workers` processes."""
    tally, one = Tally(), functools.partial(try_seed, only=only, model=model, migrations=migrations, tiers=tiers)
    if workers == 1:
        for seed in seeds:
            tally.add(one(seed))
        return tally
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for played in pool.imap_unordered(one, seeds, chunksize=10):
            tally.add(played)
            if played.failure is not None:
                print(f"seed {played.seed} {played.kinds}: {played.failure[:600]}", file=sys.stderr, flush=True)
    return tally


def main() -> None:
    """Print the tally of many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one, and show where it fails")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help=f"kinds of faults, joined by +, of {', '.join(KINDS)}")
    parser.add_argument("--groups", action="store_true", help="a model with window and state groups")
    parser.add_argument("--states", action="store_true", help="a model with a state group, and cached states")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding, with all of these models in turn")
    parser.add_argument("--migrations", action="store_true", help="running requests move between decode servers")
    parser.add_argument("--tiers", action="store_true", help="a host tier and a store with faults")
    args = parser.parse_args()
    kinds = {"migrations": args.migrations, "tiers": args.tiers}
    model: Model = "drafts" if args.drafts else "groups" if args.groups else "states" if args.states else "full"
    if args.seed is not None:
        print(setting(args.seed, args.only, model=model))
        print(play(args.seed, args.only, model=model, **kinds))
        return
    began = time.monotonic()
    tally = tally_of(range(args.first, args.first + args.seeds), args.workers, args.only, model=model, **kinds)
    took = time.monotonic() - began
    print(
        f"{tally.num_seeds} seeds in {took:.0f} s, {tally.num_seeds / took:.1f} a second; {len(tally.failures)} failed"
    )
    print("| what happened | times | seeds |\n|---|---|---|")
    for name, number in sorted(tally.counts.items()):
        print(f"| {name} | {number} | {tally.seeds[name]} |")
    for played in tally.failures:
        print(f"failed: seed {played.seed} {played.kinds}: {played.failure}")
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
