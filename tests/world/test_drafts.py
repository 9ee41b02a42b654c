"""Speculative decoding in the simulated world: the tokens of a monolith without it, and nothing left.

Drafts come from n-grams of the scheduler and from a drafter of the executor, which is right with a given chance. KV
beyond the accepted prefix is poison, and states have pending tokens, so each use of either shows in the tokens.
`test_draft_groups` has pairs of equal, different and missing drafters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pdserve.errors import RankError
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepResult
from pdserve.protocol.messages import FinishReason
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.decode_batch import DecodeBatch
from pdserve.scheduler.draft_length import DraftSource, RequestSpeculation
from pdserve.scheduler.request import Req, finish_for_token
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.speculation import NgramDrafter, Speculation
from pdserve.sim.hash_lm import HashExecutor
from pdserve.sim.hash_sampling import HashSampler
from pdserve.sim.network import Faults
from tests.share import rest_slow
from tests.world import campaign, drafting, pressure
from tests.world.shadow import ShadowWorld
from tests.world.test_pause import PausingWorld

Patch = pytest.MonkeyPatch
SEEDS_PER_CASE = 12
CASES = rest_slow(range(80), keep=1)
MAX_SEEDS = 120
HAPPENED = (
    "spec_verify_steps",
    "spec_accepted_tokens",
    "spec_accepted_at.3",
    "requests_retracted",
    "offloaded_pages",
    "restored_pages",
    "recomputed_tokens",
    "cached_tokens",
    "aborts",
    "finished",
)


@pytest.mark.parametrize("case", CASES)
def test_drafts_under_memory_pressure(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        counts += drafting.play(seed)
    of_all = HAPPENED if case == 0 else ("spec_accepted_tokens",)  # a few seeds need not have all
    assert all(counts[name] for name in of_all), counts
    assert counts["spec_draft_tokens"] > 1.2 * counts["spec_accepted_tokens"], "drafts are wrong as well"


@pytest.mark.slow
def test_servers_that_draft_and_are_killed() -> None:
    counts = Counter[str]()
    for seed in range(200):
        counts += drafting.play_pair(seed, pressure.KILLS)
    assert counts["spec_accepted_tokens"] and counts["finished"]


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 2000), marks=pytest.mark.slow)], ids=len)
def test_drafts_on_unequal_splits_with_all_kinds_of_faults(seeds: range) -> None:
    tally = campaign.tally_of(seeds, 1, model="drafts")
    assert not tally.failures, tally.failures[0]
    assert tally.counts["replicas of several ranks"] and tally.counts["second drafts accepted"]


def test_without_faults_every_request_ends_like_the_monolith() -> None:
    for seed in range(3):
        counts = drafting.play_pair(seed, Faults())
        assert counts["finished"] == len(drafting.setting(seed)[1]), seed


def test_the_other_rank_plans_the_same_drafts() -> None:
    """It finds n-grams in its own requests, and gets the executor's drafts and the accepted tokens through the log."""
    counts = Counter[str]()
    for seed in range(3):
        shape, prompts = drafting.setting(seed)
        world = ShadowWorld(seed, shape, Faults(lost=0.1, abort=0.01))
        drafting.check(seed, shape, prompts, world.run(prompts, num_rooms=8))
        world.assert_alike()
        counts += drafting.counts_of(world.decode)
    assert counts["spec_accepted_tokens"]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)], ids=len)
def test_servers_with_drafts_pause_and_go_on(seeds: range) -> None:
    num_pauses, counts = 0, Counter[str]()
    for seed in seeds:
        shape, prompts = drafting.setting(seed)
        world = PausingWorld(seed, shape, Faults(lost=0.05))
        finished = drafting.check(seed, shape, prompts, world.run(prompts, num_rooms=8))
        assert finished == len(prompts) and not world.decode.leaks(), seed
        num_pauses += world.num_pauses
        counts += drafting.counts_of(world.decode)
    assert num_pauses > 3 * len(seeds) and counts["requests_retracted"] and counts["spec_accepted_tokens"]


# ---------------------------------------------------------------------- planted bugs of the scheduler


def the_cache_goes_beyond_the_accepted_prefix(patch: Patch) -> None:
    """The page with the last sampled token is cached, which no step has computed unless its draft was right."""
    cache = SchedulerContext.cache

    def beyond(self: SchedulerContext, req: Req, *, ending: bool = False) -> None:
        if req.lease is None or req.speculation is None or not req.speculation.num_verify_steps:
            cache(self, req, ending=ending)
            return
        whole = self.memory.layout.tokens_in(len(req.lease.pages))
        tokens = req.token_bytes(min(req.seq_len, whole))
        self.memory.cache(req.lease, tokens, req.spec.priority, ending=ending)

    patch.setattr(SchedulerContext, "cache", beyond)


def all_drafts_count_as_computed(patch: Patch) -> None:
    commit = DecodeBatch.commit_drafts

    def wrong(
        self: DecodeBatch, req: Req, row: BatchRow, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        found = commit(self, req, row, sampled)
        req.computed = req.planned = row.end
        return found

    patch.setattr(DecodeBatch, "commit_drafts", wrong)


def prefill_sends_a_draft_as_the_first_token(patch: Patch) -> None:
    """Prefill asks the executor's drafter, and sends its first draft."""
    init, commit = BatchPlanner.__init__, PrefillRole.commit

    def drafting_too(self: BatchPlanner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._num_proposals, self._propose_for = None, None

    def first_drafts(self: PrefillRole, plan: BatchPlan, result: StepResult) -> None:
        first = {index: SampledToken(drafts[0]) for index, drafts in result.drafts.items()}
        tokens = tuple(first.get(index, token) for index, token in enumerate(result.tokens))
        commit(self, plan, dataclasses.replace(result, tokens=tokens))

    patch.setattr(BatchPlanner, "__init__", drafting_too)
    patch.setattr(PrefillRole, "commit", first_drafts)


def a_stop_inside_an_accepted_run_is_ignored(patch: Patch) -> None:
    commit = DecodeBatch.commit_drafts
    more = [0]

    def only_at_the_end(req: Req, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        more[0] -= 1
        return None if more[0] > 0 else finish_for_token(req, token_id, eos_token_ids)

    def counting(
        self: DecodeBatch, req: Req, row: BatchRow, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        more[0] = len(sampled)
        return commit(self, req, row, sampled)

    patch.setattr("pdserve.scheduler.context.finish_for_token", only_at_the_end)
    patch.setattr(DecodeBatch, "commit_drafts", counting)


def tokens_behind_a_stop_are_sent(patch: Patch) -> None:
    commit = DecodeBatch.commit_drafts

    def wrong(
        self: DecodeBatch, req: Req, row: BatchRow, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        return sampled, commit(self, req, row, sampled)[1]

    patch.setattr(DecodeBatch, "commit_drafts", wrong)


def a_row_is_planned_before_its_drafts_are_settled(patch: Patch) -> None:
    patch.setattr(Speculation, "needs_sync", lambda self, reqs: False)


def drafts_have_no_pages_of_their_own(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "_grow_for_drafts", lambda self, req, num_tokens: num_tokens)


def drafts_have_no_window_pages(patch: Patch) -> None:
    with_drafts = DecodeBatch._with_drafts

    def uncovered(self: DecodeBatch, req: Req, row: BatchRow, drafts: tuple[int, ...]) -> BatchRow:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SchedulerContext, "cover_window", lambda self, req, start, end: None)
            return with_drafts(self, req, row, drafts)

    patch.setattr(DecodeBatch, "_with_drafts", uncovered)


# ---------------------------------------------------------------------- planted bugs of the executor


def of_the_rows_first_position(patch: Patch, name: str) -> None:
    """Draw the tokens at all positions of a row with what `HashSampler.<name>` returns for its first one."""
    accept, own = HashExecutor.accept, getattr(HashSampler, name)
    found: list[int] = []
    is_row = [False]

    def first(self: HashSampler, argument: object) -> int:
        value: int = own(self, argument)
        if not is_row[0]:
            return value
        found.append(value)
        return found[0]

    def accepting(
        self: HashExecutor,
        sampler: HashSampler,
        carries: Sequence[int],
        tokens: Sequence[int],
        start: int,
        drafts: Sequence[int],
    ) -> list[int]:
        found.clear()
        is_row[0] = True
        try:
            return accept(self, sampler, carries, tokens, start, drafts)
        finally:
            is_row[0] = False

    patch.setattr(HashSampler, name, first)
    patch.setattr(HashExecutor, "accept", accepting)


def the_penalties_of_another_position(patch: Patch) -> None:
    of_the_rows_first_position(patch, "penalty")


def the_sampling_number_of_another_position(patch: Patch) -> None:
    of_the_rows_first_position(patch, "number_at")


def the_thinking_budget_begins_again(patch: Patch) -> None:
    """A row that opens with output, behind a hand-over or a retraction, counts its reasoning from there."""
    open_row = HashExecutor.open_row

    def forgetful(
        self: HashExecutor,
        row: int,
        token_ids: Sequence[int],
        num_prompt: int,
        sampling: CoreSamplingParams,
        *more: Any,
    ) -> None:
        budget = sampling.thinking
        if budget is not None:
            budget = msgspec.structs.replace(budget, num_tokens=budget.num_tokens + len(token_ids) - num_prompt)
        open_row(self, row, token_ids, num_prompt, msgspec.structs.replace(sampling, thinking=budget), *more)

    patch.setattr(HashExecutor, "open_row", forgetful)


def a_draft_is_accepted_without_a_draw(patch: Patch) -> None:
    accept = HashExecutor.accept

    def generous(
        self: HashExecutor,
        sampler: HashSampler,
        carries: Sequence[int],
        tokens: Sequence[int],
        start: int,
        drafts: Sequence[int],
    ) -> list[int]:
        if not drafts:
            return accept(self, sampler, carries, tokens, start, drafts)
        return [drafts[0], *accept(self, sampler, carries[1:], tokens, start + 1, drafts[1:])]

    patch.setattr(HashExecutor, "accept", generous)


def a_state_is_not_folded(patch: Patch) -> None:
    def forgetful(self: HashExecutor, row: int, slot: int) -> None:
        self._by_row[row].pending = []

    patch.setattr(HashExecutor, "fold", forgetful)


def a_state_is_folded_twice(patch: Patch) -> None:
    fold = HashExecutor.fold

    def twice(self: HashExecutor, row: int, slot: int) -> None:
        pending = self._by_row[row].pending
        fold(self, row, slot)
        self._by_row[row].pending = pending
        fold(self, row, slot)

    patch.setattr(HashExecutor, "fold", twice)


def a_row_with_drafts_changes_its_state(patch: Patch) -> None:
    patch.setattr(HashExecutor, "_write_slot", lambda self, slot, saved: None)


def a_slot_is_offloaded_with_pending_tokens(patch: Patch) -> None:
    patch.setattr(HashExecutor, "_settle", lambda self, pages: None)


PLANTED: dict[Callable[[Patch], None], int] = {
    the_cache_goes_beyond_the_accepted_prefix: 27,
    all_drafts_count_as_computed: 0,
    prefill_sends_a_draft_as_the_first_token: 0,
    a_stop_inside_an_accepted_run_is_ignored: 0,
    tokens_behind_a_stop_are_sent: 0,
    a_row_is_planned_before_its_drafts_are_settled: 9,
    drafts_have_no_pages_of_their_own: 0,
    drafts_have_no_window_pages: 1,
    the_penalties_of_another_position: 0,
    the_sampling_number_of_another_position: 0,
    the_thinking_budget_begins_again: 0,
    a_draft_is_accepted_without_a_draw: 0,
    a_state_is_not_folded: 1,
    a_state_is_folded_twice: 1,
    a_row_with_drafts_changes_its_state: 1,
    a_slot_is_offloaded_with_pending_tokens: 23,
}
"""A bug, and a seed that has caught it before."""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """The seeds are played from the bug's own on."""
    plant(monkeypatch)
    first = PLANTED[plant]
    pressure.assert_caught(lambda number: drafting.play((first + number) % MAX_SEEDS), MAX_SEEDS, KeyError, IndexError)


def test_ranks_that_draft_apart_are_caught(monkeypatch: Patch) -> None:
    """A planted bug: every other search finds one draft less, whichever rank it belongs to."""
    find, numbers = NgramDrafter.find, itertools.count()

    def shorter(
        self: NgramDrafter, req: Req, state: RequestSpeculation, num_tokens: int
    ) -> tuple[tuple[int, ...], DraftSource, int]:
        drafts, source, length = find(self, req, state, num_tokens)
        return drafts[: len(drafts) - next(numbers) % 2], source, length

    monkeypatch.setattr(NgramDrafter, "find", shorter)
    shape, prompts = drafting.setting(1)
    world = ShadowWorld(1, shape, Faults())
    with pytest.raises(RankError):
        world.run(prompts, num_rooms=8)


@pytest.mark.parametrize("seed", sorted(set(PLANTED.values())))
def test_the_same_seeds_pass_without_a_planted_bug(seed: int) -> None:
    drafting.play(seed)
