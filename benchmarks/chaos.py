"""Real servers under mixed load while they are killed, stopped, cut off and attacked: what clients see of it.

    python -m benchmarks.chaos --seconds 600 --seed 1 --write
    python -m benchmarks.chaos --soak --seconds 1800 --write        the same load without faults

Two prefill and two decode servers and a router, each on a network of its own where namespaces are permitted, elsewhere
with proxies between them (`--links`). Every
answer must be the greedy text of a monolith, whole, or an error in time. Exit status 1 when an answer was wrong, lost
or late without end, a fault was not recovered from, or something is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from benchmarks.chaos_farm import (
    AUTO,
    LOOPBACK,
    NAMESPACES,
    NONE,
    PROXY,
    Farm,
    Member,
    Use,
    choose_links,
    running_farm,
    settle,
)
from benchmarks.chaos_faults import Faults
from benchmarks.chaos_hostile import Attackers, Trap, make_hostile
from benchmarks.chaos_load import PROBE, Load, Question, make_questions, with_answers
from benchmarks.chaos_report import Outcome, Sample, render
from benchmarks.report import Run, add_write_flags
from benchmarks.servers import monolith

TOKEN = "chaos-control-token-0123456789abcdef"
WARM_UP_S, SOAK_WARM_UP_S = 10.0, 120.0
"""A soak waits until every page of the pools has been used once: only then they are all in memory."""
WARM_UP_LIMIT_S = 300.0
SAMPLE_S = 5.0
HEALTH_S, HEALTH_TIMEOUT_S = 0.5, 60.0
DRAIN_TIMEOUT_S = 90.0
FLAGS = ("--page-size", "16", "--device", "cpu", "--cpu-threads", "1", "--log-level", "warning")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="how long faults, or with --soak the load, go on")
    add("--seed", type=int, default=1)
    add("--soak", action="store_true", help="no faults and no hostile requests; memory must stay flat")
    add("--warm-up", type=float, help="seconds of load before anything counts: 10, and 120 with --soak")
    add("--only", nargs="+", metavar="KIND", help="these kinds of faults only")
    text = "how links are cut: by network namespaces (root, iproute2), by proxies, or not; auto: the first that works"
    add("--links", default=AUTO, choices=(AUTO, NAMESPACES, PROXY, NONE), help=text)
    add("--no-hostile", action="store_true", help="no hostile requests beside the faults")
    add("--model", default="smollm2", help="as --model-path of a server")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--clients", type=int, default=8)
    add("--attackers", type=int, default=2)
    add("--questions", type=int, default=28)
    add("--long-words", type=int, default=700, help="words of a long prompt")
    add("--deadline", type=float, default=90.0, help="seconds in which every request must have ended")
    add("--recovery-limit", type=float, default=10.0, help="seconds after a fault in which its servers must answer")
    add("--hostile-scale", type=int, default=300_000, help="repeats in hostile regular expressions")
    add("--max-total-tokens", type=int, default=16384)
    add("--no-token", action="store_true", help="servers without a control token")
    add("--server-flags", default="", help="more flags of launch_server, in one string")
    add("--router-flags", default="", help="more flags of launch_router, in one string")
    add_write_flags(parser, "chaos")
    return parser.parse_args(argv)


def server_flags(args: argparse.Namespace) -> list[str]:
    """Flags that all servers share."""
    own = ["--model-path", args.model, "--served-model-name", args.model, "--dtype", args.dtype]
    own += ["--max-total-tokens", str(args.max_total_tokens), "--no-require-control-proof", *FLAGS]
    return own + str(args.server_flags).split()


class Background:
    """An event loop on a thread: load, attackers, and questions after health."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="load", daemon=True)
        self._thread.start()

    def start(self, work: Any) -> Callable[..., Any]:
        """Start a coroutine; the function that is returned waits for its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


class HealthWatch:
    """Asks every member for its health all the time. Answers count while the member itself is under no fault.

    `turns` is that of `Faults`: a fault that began or ended while an answer was awaited makes the answer not count.
    """

    def __init__(self, members: Sequence[Member], turns: Mapping[str, int], timeout_s: float = HEALTH_TIMEOUT_S):
        self._members, self._turns, self._timeout_s = members, turns, timeout_s
        self.worst: dict[str, float | None] = {member.name: None for member in members}
        """Seconds of the slowest answer that counts, by member; None: no answer of this member counted."""
        self.failures: Counter[str] = Counter()
        """Answers that should have counted and were no 200, by member and reason."""
        self.stopping = False

    async def run(self) -> None:
        """Until `stopping`."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        connector = aiohttp.TCPConnector(force_close=True)  # no connection that an earlier fault has broken
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._watch(session, member) for member in self._members))

    async def _watch(self, session: aiohttp.ClientSession, member: Member) -> None:
        while not self.stopping:
            turn, began, failure = self._turns.get(member.name, 0), time.monotonic(), ""
            try:
                async with session.get(f"{member.url}/health") as answer:
                    await answer.read()
                    failure = "" if answer.status == 200 else f"status {answer.status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failure = type(error).__name__
            if turn % 2 == 0 and turn == self._turns.get(member.name, 0):
                self.worst[member.name] = max(self.worst[member.name] or 0.0, time.monotonic() - began)
                if failure:
                    self.failures[f"{member.name}: {failure}"] += 1
            await asyncio.sleep(HEALTH_S)


def play(args: argparse.Namespace) -> Outcome:
    """The whole run, from the monolith's answers to what is left at the end."""
    links = choose_links(args.links)
    questions = make_questions(args.seed, args.model, args.questions, args.long_words)
    with monolith(args.model, args.dtype, threads=1, flags=server_flags(args)[6:]) as url:
        questions = asyncio.run(with_answers(url, questions))
    say(f"{len(questions)} answers known")
    token = "" if args.no_token else TOKEN
    router_flags = ["--health-check-interval", "1", "--log-level", "warning", *str(args.router_flags).split()]
    with running_farm(2, 2, server_flags(args), router_flags, token=token, links=links) as (farm, leftovers):
        say(f"all servers serve; what cuts links: {links}")
        outcome = _play(args, farm, questions, token, links)
    outcome.leftovers = leftovers
    return outcome


def _play(args: argparse.Namespace, farm: Farm, questions: list[Question], token: str, links: str) -> Outcome:
    background = Background()
    load = Load(farm.router.url, questions, args.seed, args.clients, args.deadline)
    faults = Faults(farm, next(question for question in questions if question.kind == PROBE), args.seed, token)
    faults.only(args.only or faults.kinds)
    trap = Trap(token)
    host = farm.client_host.address if farm.client_host else LOOPBACK
    background.start(trap.open(host))()
    hostile = make_hostile(args.model, trap.port, host, args.hostile_scale)
    attackers = Attackers(farm, hostile, args.seed, args.deadline)
    watch = HealthWatch(farm.members, faults.turns)
    loaded = background.start(load.run())
    warm_up(farm, faults, args.warm_up or (SOAK_WARM_UP_S if args.soak else WARM_UP_S))
    before = farm.use()
    watched = background.start(watch.run())
    num_attackers = 0 if args.soak or args.no_hostile else args.attackers
    attacked = background.start(attackers.run(num_attackers))
    began = time.monotonic()
    samples: list[Sample] = []
    while (elapsed := time.monotonic() - began) < args.seconds:
        if args.soak:
            samples.append(Sample(elapsed, farm.use(), _pages(farm)))
            time.sleep(SAMPLE_S)
            continue
        injected = faults.inject()
        recovery = "not" if injected.recovery_s is None else f"after {injected.recovery_s:.1f} s"
        seen = Counter(ending.verdict for ending in load.endings)
        say(f"{injected.kind} ({injected.member}, {injected.lasted_s:.1f} s): recovered {recovery}; {dict(seen)}")
    load.stopping = attackers.stopping = watch.stopping = True
    say("the load ends")
    for ended in (attacked, loaded, watched):
        ended(args.deadline + 60)
    background.start(trap.close())()
    settled_s, held = settle(farm, DRAIN_TIMEOUT_S)
    outcome = Outcome(
        endings=load.endings,
        hostile=attackers.endings,
        faults=faults.happened,
        problems=faults.problems,
        worst_health=watch.worst,
        failed_health=watch.failures,
        settled_s=settled_s,
        held=held,
        before=before,
        after=_settled_use(farm, before),
        samples=samples,
        num_trapped=trap.num_visits,
        num_secrets=trap.num_secrets,
        links=links,
        seconds=time.monotonic() - began,
        recovery_limit_s=args.recovery_limit,
    )
    background.close()
    return outcome


def warm_up(farm: Farm, faults: Faults, seconds: float) -> None:
    """So many seconds of load, and a transfer between each two servers: then connections and buffers are there."""
    ready = time.monotonic() + seconds
    for prefill, decode in itertools.product(farm.prefill, farm.decode):
        while not faults.answers(prefill, decode):
            if time.monotonic() > ready + WARM_UP_LIMIT_S:
                raise SystemExit(f"{prefill.name} and {decode.name} answer nothing although no fault was injected")
            time.sleep(0.5)
    time.sleep(max(0.0, ready - time.monotonic()))


def _settled_use(farm: Farm, before: dict[str, Use]) -> dict[str, Use]:
    """What processes take once connections of the load have been let go of: asked again for a while."""
    for _ in range(20):
        after = farm.use()
        if all(after[name].descriptors <= use.descriptors for name, use in before.items() if name in after):
            break
        time.sleep(1.0)
    return after


def _pages(farm: Farm) -> dict[str, int]:
    """Pages in use, by member."""
    found = {}
    for member in farm.workers:
        memory = member.state()["memory"]
        found[member.name] = memory["pages_total"] - memory["pages_free"] - memory["pages_evictable"]
    return found


def say(text: str) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the report, write it when asked."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    args = parse(argv)
    run = Run("soak" if args.soak else "chaos", argv, module="chaos")
    outcome = play(args)
    facts = run.facts(**outcome.summary(), faults=[dataclasses.asdict(f) for f in outcome.faults])
    run.publish(args, render(outcome, facts, soak=args.soak), json.loads(json.dumps(facts)))
    return int(bool(outcome.failures(soak=args.soak)))


if __name__ == "__main__":
    sys.exit(main())
