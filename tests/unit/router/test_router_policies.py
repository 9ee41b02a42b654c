"""Policies are pure choices: the same state gives the same choice, and choosing changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.config.config import PolicyConfig, PrefillPolicyName, WorkerRole
from pdserve.router.policies import Candidate, Policy, RoutedRequest, make_policy
from pdserve.router.policies.basic import boundaries
from pdserve.router.policies.prefix_tree import CacheAware
from pdserve.router.policies.routing_keys import ConversationKey

NAMES = get_args(PrefillPolicyName)
KEYS = [ConversationKey(f"conversation {i}".encode(), named=True) for i in range(1000)]
LOADS = st.lists(st.floats(0, 200), min_size=1, max_size=6)
PROMPTS = st.one_of(st.none(), st.text(alphabet="ab", min_size=1, max_size=12))
ANYTHING = RoutedRequest()
EXAMPLES = settings(max_examples=25, deadline=None)


def policy(name: PrefillPolicyName, **options: float) -> Policy:
    return make_policy(PolicyConfig(prefill_policy=name, **options), WorkerRole.PREFILL)  # type: ignore[arg-type]


def loaded(*loads: float) -> list[Candidate]:
    return [Candidate(f"http://worker-{index}:30000", load) for index, load in enumerate(loads)]


def pick(of: Policy, candidates: list[Candidate], request: RoutedRequest = ANYTHING, seed: int = 7) -> int:
    return of.choose(candidates, request, random.Random(seed))


def send(to: Policy, candidates: list[Candidate], prompt: str) -> str:
    """Choose for a prompt and let the policy know; returns the chosen URL."""
    url = candidates[pick(to, candidates, RoutedRequest(prompt=prompt))].url
    to.chosen(url, RoutedRequest(prompt=prompt), 0.0)
    return url


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(
    loads=LOADS,
    past=st.lists(st.tuples(st.integers(0, 5), PROMPTS), max_size=8),
    prompt=PROMPTS,
    seed=st.integers(0, 99),
)
def test_a_choice_is_a_candidate_is_repeatable_and_changes_nothing(
    name: PrefillPolicyName, loads: list[float], past: list[tuple[int, str | None]], prompt: str | None, seed: int
) -> None:
    chooser, candidates = policy(name, max_tree_size=20), loaded(*loads)
    for at, (index, text) in enumerate(past):
        chooser.chosen(f"http://worker-{index}:30000", RoutedRequest(prompt=text), float(at))
        chooser.tick(float(at * 40))
    request = RoutedRequest(key=KEYS[seed], prompt=prompt)
    twin = copy.deepcopy(chooser)
    first = pick(chooser, candidates, request, seed)
    assert first in range(len(candidates))
    assert pick(chooser, candidates, request, seed) == first == pick(twin, candidates, request, seed)


@pytest.mark.parametrize("name", ["least_loaded", "power_of_two"])
@EXAMPLES
@given(loads=LOADS, seed=st.integers(0, 99))
def test_policies_by_load_never_take_the_busiest_alone(name: PrefillPolicyName, loads: list[float], seed: int) -> None:
    chosen = loads[pick(policy(name), loaded(*loads), seed=seed)]
    if name == "least_loaded":
        assert chosen == min(loads)
    elif loads.count(max(loads)) == 1 and len(loads) > 1:
        assert chosen < max(loads)


def test_random_and_ties_reach_every_candidate() -> None:
    for name, loads in (("random", (9, 0, 5)), ("least_loaded", (2, 2, 2)), ("power_of_two", (2, 2, 2))):
        chooser = policy(name)  # type: ignore[arg-type]
        assert {pick(chooser, loaded(*loads), seed=seed) for seed in range(100)} == {0, 1, 2}


@EXAMPLES
@given(rounds=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=40))
def test_round_robin_is_fair_while_workers_come_and_go(rounds: list[set[int]]) -> None:
    chooser, everyone = policy("round_robin"), loaded(*[0] * 5)
    last: dict[str, int] = {}
    for turn, present in enumerate(rounds, 1):
        candidates = [everyone[index] for index in sorted(present)]
        url = candidates[pick(chooser, candidates)].url
        assert last.get(url, 0) == min(last.get(candidate.url, 0) for candidate in candidates)
        chooser.chosen(url, RoutedRequest(), 0.0)
        last[url] = turn


# --- consistent hashing ---------------------------------------------------------------------------------------------


def homes(candidates: list[Candidate]) -> list[str]:
    chooser = policy("consistent_hashing")
    return [candidates[pick(chooser, candidates, RoutedRequest(key=key))].url for key in KEYS]


def test_a_conversation_stays_whatever_the_load_and_the_order_of_the_workers() -> None:
    before = homes(loaded(0, 0, 0, 0))
    assert homes(loaded(900, 0, 50, 3)) == before == homes(loaded(0, 0, 0, 0)[::-1])
    counts = [before.count(candidate.url) for candidate in loaded(0, 0, 0, 0)]
    assert all(180 < count < 320 for count in counts), "they are spread evenly"


def test_a_worker_that_goes_moves_its_own_conversations_only_and_one_that_comes_takes_its_share() -> None:
    workers = loaded(0, 0, 0, 0)
    before, gone = homes(workers), workers[2]
    after = homes([worker for worker in workers if worker is not gone])
    pairs = list(zip(before, after, strict=True))
    assert all(new == old for old, new in pairs if old != gone.url)
    moved = {new for old, new in pairs if old == gone.url}
    assert moved == {worker.url for worker in workers if worker is not gone}, "they go to all others"


def test_an_opening_alone_does_not_pile_up_on_one_worker() -> None:
    chooser = policy("consistent_hashing")
    opening = RoutedRequest(key=ConversationKey(b"the same system prompt", named=False))
    home = pick(chooser, loaded(0, 0, 0), opening)
    assert pick(chooser, loaded(*(8 if index == home else 0 for index in range(3))), opening) == home
    many = loaded(*(9 if index == home else 0 for index in range(3)))
    assert pick(chooser, many, opening) != home
    assert opening.key is not None
    assert pick(chooser, many, RoutedRequest(key=dataclasses.replace(opening.key, named=True))) == home
    assert pick(chooser, loaded(50, 50, 50), opening) == home, "all are as busy"
    assert pick(chooser, loaded(3, 1, 2)) == 1, "without a conversation the least loaded"


# --- cache aware ----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_was_sent_and_new_ones_where_the_least_text_was() -> None:
    chooser, workers = policy("cache_aware"), loaded(0, 0)
    first = send(chooser, workers, "a" * 100)
    second = send(chooser, workers, "b" * 50)
    assert {first, second} == {worker.url for worker in workers}
    assert send(chooser, workers, "a" * 100 + "x" * 100) == first
    assert send(chooser, workers, "b" * 50 + "y" * 10) == second
    assert send(chooser, workers, "c" * 10) == second, "it was sent less"
    assert send(chooser, workers, "a" * 29 + "z" * 71) == second, "29% is below the threshold"
    assert send(chooser, workers, "a" * 31 + "w" * 69) == first, "31% is above"


def test_imbalance_beats_the_cache_only_beyond_both_thresholds() -> None:
    chooser = policy("cache_aware", balance_abs_threshold=10, balance_rel_threshold=2.0)
    home = send(chooser, loaded(0, 0), "a" * 100)
    other = next(worker.url for worker in loaded(0, 0) if worker.url != home)

    def goes_to(home_load: float, other_load: float) -> str:
        workers = [Candidate(home, home_load), Candidate(other, other_load)]
        return workers[pick(chooser, workers, RoutedRequest(prompt="a" * 100))].url

    assert goes_to(10, 0) == home, "not by more than 10"
    assert goes_to(40, 25) == home, "not more than twice"
    assert goes_to(51, 25) == other


def test_who_is_gone_or_absent_is_not_chosen_and_the_next_best_is() -> None:
    chooser, workers = policy("cache_aware"), loaded(0, 0, 0)
    chooser.chosen(workers[0].url, RoutedRequest(prompt="a" * 100), 0.0)
    chooser.chosen(workers[1].url, RoutedRequest(prompt="a" * 60), 0.0)
    request = RoutedRequest(prompt="a" * 100)
    assert pick(chooser, workers, request) == 0
    assert pick(chooser, workers[1:], request) == 0, "the one with 60 of 100 characters"
    chooser.forget(workers[1].url)
    assert pick(chooser, workers[1:], request, 1) in (0, 1)
    chooser.forget(workers[0].url)
    assert {pick(chooser, workers, request, seed) for seed in range(50)} == {0, 1, 2}


def test_old_text_is_forgotten_at_each_interval() -> None:
    chooser, workers = policy("cache_aware", max_tree_size=75, eviction_interval_s=10), loaded(0, 0)
    chooser.tick(0.0)
    old, new = "a" * 40, "b" * 40
    for text in (old, new):
        chooser.chosen(workers[0].url, RoutedRequest(prompt=text), 0.0)
    chooser.chosen(workers[1].url, RoutedRequest(prompt="c" * 30), 0.0)
    chooser.tick(9.0)
    assert pick(chooser, workers, RoutedRequest(prompt=old)) == 0
    chooser.tick(10.0)
    assert pick(chooser, workers, RoutedRequest(prompt=new)) == 0
    assert pick(chooser, workers, RoutedRequest(prompt=old)) == 1, (
        "forgotten, and the other was sent less of what is left"
    )


def test_a_burst_between_two_intervals_stays_within_an_eighth_more_than_the_limit() -> None:
    chooser, workers = CacheAware(PolicyConfig(max_tree_size=800, eviction_interval_s=1e9)), loaded(0, 0)
    chooser.tick(0.0)
    for number in range(300):
        for one in workers:
            chooser.chosen(one.url, RoutedRequest(prompt=f"{number} " * 30), 0.0)
            assert chooser.size(one.url) <= 900
    chooser.chosen(workers[1].url, RoutedRequest(prompt="x" * 100_000), 0.0)
    assert chooser.size(workers[1].url) == 800, "no more of one prompt than there is room for"
    assert pick(chooser, workers, RoutedRequest(prompt="x" * 1000)) == 1


# --- bucket ---------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 1000), max_size=60), count=st.integers(1, 6))
def test_boundaries_rise_and_give_each_bucket_about_the_same_work(lengths: list[int], count: int) -> None:
    cuts = boundaries(lengths, count)
    assert len(cuts) == count - 1
    assert cuts == sorted(cuts)
    if len(set(lengths)) == len(lengths):
        share, longest = sum(lengths) / count, max(lengths, default=0)
        edges = [0, *cuts, 1001]
        for low, high in itertools.pairwise(edges):
            assert sum(length for length in lengths if low < length <= high) <= share + longest


def test_prompts_of_like_length_meet_and_longer_ones_are_apart() -> None:
    chooser, workers = policy("bucket"), loaded(0, 0, 0)
    for length in range(1, 301):
        chooser.chosen(workers[0].url, RoutedRequest(prompt="x" * length), 0.0)
    chooser.tick(0.0)
    places = [pick(chooser, workers, RoutedRequest(prompt="x" * length)) for length in range(1, 400)]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}
    assert pick(chooser, loaded(100, 100, 0), RoutedRequest(prompt="x")) == 2, "imbalance goes first"
    assert pick(chooser, loaded(3, 1, 2)) == 1, "no prompt"
    assert pick(policy("bucket"), loaded(3, 1, 2), RoutedRequest(prompt="x")) == 1, "nothing known of lengths"
