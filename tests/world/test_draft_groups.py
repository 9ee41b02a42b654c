"""DRAFT groups in the simulated world: pairs whose drafters are equal, differ, or are on one side only.

A drafter reads the draft KV of all tokens before it drafts. Keys of another token, request or drafter are an
AssertionError, and missing ones cost acceptance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pdserve.base.parallel import RankCoord
from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.memory.layout import GroupKind, KVGroup
from pdserve.sim.hash_lm import HashExecutor
from pdserve.sim.network import Faults
from pdserve.sim.shape import Prompt, Shape, SimDrafting
from pdserve.sim.world import World
from pdserve.transfer import plan
from pdserve.transfer.plan import ChunkPlanner, PageCopy, ShardFlow, plan_flow
from pdserve.transfer.wire import Hello
from tests.world import drafting, pressure

Patch = pytest.MonkeyPatch
EQUAL, OTHER, ON_DECODE, ON_PREFILL = (1, 1), (1, 2), (0, 1), (1, 0)
PAIRS = [EQUAL, OTHER, ON_DECODE, ON_PREFILL]
NUM_DRAFTS = 3


@pytest.fixture
def sent(monkeypatch: Patch) -> Counter[GroupKind]:
    """Copies that were planned, by kind of group."""
    counts = Counter[GroupKind]()

    def counted(
        group: KVGroup,
        source: RankCoord,
        destination: RankCoord,
        flow: ShardFlow,
        source_pages: Sequence[int],
        destination_pages: Sequence[int],
        layers: range | None = None,
    ) -> list[PageCopy]:
        copies = plan_flow(group, source, destination, flow, source_pages, destination_pages, layers)
        counts[group.kind] += len(copies)
        return copies

    monkeypatch.setattr(plan, "plan_flow", counted)
    return counts


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 250), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("weights", PAIRS, ids=str)
def test_a_pair_has_the_monoliths_tokens_whatever_its_drafters_are(
    weights: tuple[int, int], seeds: range, sent: Counter[GroupKind]
) -> None:
    """Under memory pressure, with retraction, offload, aborts and failed copies."""
    counts = Counter[str]()
    for seed in seeds:
        counts += drafting.play_pair(seed, weights=weights)
    assert sent[GroupKind.FULL] and bool(sent[GroupKind.DRAFT]) == (weights == EQUAL)
    assert counts["finished"] and bool(counts["spec_accepted_tokens"]) == (weights != ON_PREFILL)


def first_rows(weights: tuple[int, int], patch: Patch, **sampling: bool) -> tuple[list[tuple[int, ...]], int]:
    """Run a pair with much memory, whose drafters are always right with whole draft KV, and one step at a time.

    Returns the drafts of the first decode row of each request, and how many of them were accepted.
    """
    shape = Shape(
        num_pages=200, num_rows=8, num_aux=16, prefix_cache=False,
        drafting=SimDrafting(max_drafts=NUM_DRAFTS, min_match=0, chance=1.0, weights=weights),
    )  # fmt: skip
    prompts = [Prompt(tuple(range(7 * n, 8 * n + 3)), 9) for n in range(1, 12)]
    prompts = [Prompt(each.tokens, 9, sampling=msgspec.structs.replace(each.sampling, **sampling)) for each in prompts]
    world = World(3, shape, Faults())
    drafts: dict[str, tuple[int, ...]] = {}
    num_accepted = 0
    resolve = HashExecutor.resolve

    def recorded(self: HashExecutor, handle: StepHandle) -> StepResult:
        nonlocal num_accepted
        result = resolve(self, handle)
        for index, row in enumerate(handle.plan.rows):
            if self is world.decode.executor and row.rid not in drafts:
                drafts[row.rid] = row.drafts
                num_accepted += len(result.sampled(index)) - 1
        return result

    patch.setattr(HashExecutor, "resolve", recorded)
    assert drafting.check(3, shape, prompts, world.run(prompts, num_rooms=4)) == len(prompts) == len(drafts)
    return list(drafts.values()), num_accepted


def test_the_first_decode_step_of_equal_drafters_verifies_drafts(monkeypatch: Patch) -> None:
    """Prefill proposes them behind the first token. Those that follow come from draft KV that was sent."""
    found, num_accepted = first_rows(EQUAL, monkeypatch)
    assert {len(drafts) for drafts in found} == {NUM_DRAFTS}
    assert num_accepted == sum(map(len, found)), "the drafter of prefill had all draft KV"


@pytest.mark.parametrize("weights", [OTHER, ON_DECODE, ON_PREFILL], ids=str)
def test_without_equal_drafters_the_first_decode_step_is_plain(weights: tuple[int, int], monkeypatch: Patch) -> None:
    found, _ = first_rows(weights, monkeypatch)
    assert not any(found)


def test_requests_without_drafts_get_none_from_prefill(monkeypatch: Patch) -> None:
    launch, asked = HashExecutor.launch, set[int | None]()

    def recorded(self: HashExecutor, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        asked.add(plan.num_proposals if plan.rows[0].start == 0 else None)
        return launch(self, plan, layer_events=layer_events)

    monkeypatch.setattr(HashExecutor, "launch", recorded)
    found, _ = first_rows(EQUAL, monkeypatch, speculative=False)
    assert not any(found) and asked == {0, None}


# ---------------------------------------------------------------------- planted bugs


def draft_pages_are_sent_to_a_peer_without_a_drafter(patch: Patch) -> None:
    """Its aux slots are written as they should be."""
    patch.setattr(ChunkPlanner, "aux_bytes", lambda self, peer: self.aux_common_bytes)
    patch.setattr(ChunkPlanner, "sends_drafts", lambda self, peer: bool(self.drafts))
    patch.setattr("pdserve.transfer.sender.check_draft_pages", lambda info, hello, drafts: None)


def draft_pages_are_sent_to_a_peer_with_other_weights(patch: Patch) -> None:
    def sends_drafts(self: ChunkPlanner, peer: Hello) -> bool:
        return bool(self.drafts) and peer.draft_facts is not msgspec.UNSET

    patch.setattr(ChunkPlanner, "sends_drafts", sends_drafts)


def with_draft_pages(patch: Patch, change: Callable[[list[int]], list[int]]) -> None:
    """Send pages of the DRAFT group to other pages than those of the first group."""

    def changed(
        group: KVGroup,
        source: RankCoord,
        destination: RankCoord,
        flow: ShardFlow,
        source_pages: Sequence[int],
        destination_pages: Sequence[int],
        layers: range | None = None,
    ) -> list[PageCopy]:
        if group.kind is GroupKind.DRAFT:
            destination_pages = change(list(destination_pages))
        return plan_flow(group, source, destination, flow, source_pages, destination_pages, layers)

    patch.setattr(plan, "plan_flow", changed)


def draft_pages_arrive_in_another_order(patch: Patch) -> None:
    with_draft_pages(patch, lambda pages: pages[::-1])


def draft_pages_have_the_numbers_of_another_group(patch: Patch) -> None:
    """Those of a group with pages of its own, which counts from 0."""
    with_draft_pages(patch, lambda pages: list(range(len(pages))))


def the_hidden_state_of_another_request_is_sent(patch: Patch) -> None:
    hidden, before = HashExecutor.draft_hidden, [b""]

    def late(self: HashExecutor, row: int) -> bytes:
        before.append(hidden(self, row))
        return before.pop(0)

    patch.setattr(HashExecutor, "draft_hidden", late)


def the_whole_aux_slot_is_sent_to_any_peer(patch: Patch) -> None:
    """Slots of a server without a drafter are shorter, so the next slot is overwritten."""
    patch.setattr(ChunkPlanner, "aux_bytes", lambda self, peer: self.aux_slot_bytes)
    patch.setattr("pdserve.transfer.sender.check_receiver_pages", lambda *args: None)


PLANTED: dict[Callable[[Patch], None], tuple[int, int]] = {
    draft_pages_are_sent_to_a_peer_without_a_drafter: ON_PREFILL,
    draft_pages_are_sent_to_a_peer_with_other_weights: OTHER,
    draft_pages_arrive_in_another_order: EQUAL,
    draft_pages_have_the_numbers_of_another_group: EQUAL,
    the_hidden_state_of_another_request_is_sent: EQUAL,
    the_whole_aux_slot_is_sent_to_any_peer: ON_PREFILL,
}
"""A bug, and the drafters of the pair that shows it."""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    weights = PLANTED[plant]
    pressure.assert_caught(lambda seed: drafting.play_pair(seed, weights=weights), 40, KeyError, IndexError)
