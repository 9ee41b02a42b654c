"""Prefill that computes prompts before their decode server is ready: right tokens, and nothing is left."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from pdserve.protocol.failure import Failure
from pdserve.scheduler.request import Req
from pdserve.scheduler.roles.optimistic import ComputedPrompt, OptimisticLimits, OptimisticPrefill
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.sim.network import Faults
from pdserve.sim.world import World, monolith_tokens
from tests.share import rest_slow
from tests.world.pressure import counts_of, pressured, run_pair
from tests.world.workload import workload

Patch = pytest.MonkeyPatch
ALWAYS = OptimisticLimits(attempts=3, memory_fraction=1.0)
FAULTS = Faults(lost=0.05, max_delay_s=0.6, abort=0.01, copy_failed=0.01)


def play(seed: int, faults: Faults = FAULTS) -> Counter[str]:
    """Run the pair of a seed, with prompts that may be computed early; return what both servers counted."""
    shape, prompts = pressured(seed) if seed % 2 else workload(seed)
    world, _ = run_pair(seed, dataclasses.replace(shape, optimistic=ALWAYS), prompts, faults)
    return counts_of(world.prefill, world.decode)


@pytest.mark.parametrize("case", rest_slow(range(10), keep=1))
def test_prompts_that_are_computed_early_give_the_same_tokens(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * 20, case * 20 + 20):
        counts += play(seed)
    for name in ("optimistic_prefills", "optimistic_prefills_held", "optimistic_prefills_gave_way"):
        assert counts[name] > 0, name


def test_the_limit_of_pages_holds_and_zero_attempts_start_no_prompt_early() -> None:
    shape, prompts = workload(4)
    for limits in (OptimisticLimits(attempts=0), OptimisticLimits(attempts=9, memory_fraction=0.01)):
        limited = dataclasses.replace(shape, optimistic=limits)
        world = World(4, limited, Faults())
        halves = world.run(prompts, num_rooms=6)
        tokens = [None if half is None else half.tokens for half in halves]
        assert tokens == monolith_tokens(limited, prompts)
        assert world.prefill.scheduler.context.counters["optimistic_prefills"] == 0


def free_held_pages(patch: Patch) -> None:
    hold = OptimisticPrefill.hold

    def freeing(self: OptimisticPrefill, req: Req, prompt: ComputedPrompt) -> None:
        hold(self, req, prompt)
        assert req.lease is not None
        pages = req.lease.pages
        self._context.release(req)
        req.lease = self._context.memory.reserve_tokens(req.num_reserved, req.rid)
        req.aux = self._context.memory.aux.reserve(1, req.rid)
        if req.lease is None or req.aux is None:
            raise AssertionError(f"the pages {pages} were taken at once")

    patch.setattr(OptimisticPrefill, "hold", freeing)


def keep_held_pages_after_an_abort(patch: Patch) -> None:
    end = PrefillRole.end

    def keeping(self: PrefillRole, req: Req, failure: Failure | None) -> None:
        if self._optimistic.holds(req):
            req.lease = None
        end(self, req, failure)

    patch.setattr(PrefillRole, "end", keeping)


def skip_pages_that_were_computed_early(patch: Patch) -> None:
    bound = OptimisticPrefill.bound

    def skipping(self: OptimisticPrefill, req: Req) -> ComputedPrompt | None:
        prompt = bound(self, req)
        if req.sender is not None and prompt is None:
            req.sender._num_sent = self._context.memory.layout.whole_pages(req.computed)
        return prompt

    patch.setattr(OptimisticPrefill, "bound", skipping)


def lose_a_prompt_that_gave_way(patch: Patch) -> None:
    give_way = OptimisticPrefill._give_way

    def losing(self: OptimisticPrefill, req: Req) -> None:
        give_way(self, req)
        del self._bootstrap[req.rid]

    patch.setattr(OptimisticPrefill, "_give_way", losing)


BUGS = (
    free_held_pages,
    keep_held_pages_after_an_abort,
    skip_pages_that_were_computed_early,
    lose_a_prompt_that_gave_way,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in range(100):
        try:
            play(seed, Faults(lost=0.1, max_delay_s=0.6, abort=0.03))
        except (AssertionError, KeyError):
            return
    pytest.fail("not caught in 100 seeds")
