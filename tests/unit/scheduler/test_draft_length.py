"""How many drafts pay: costs, rates of acceptance, and switching drafting off and on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from pdserve.scheduler.draft_length import (
    AMX_COST,
    CPU_COST,
    CUDA_COST,
    FIRST_STEPS,
    FIRST_WAIT,
    MAX_WAIT,
    MIN_CHANCE,
    AcceptanceModel,
    DraftSwitch,
    RequestSpeculation,
    StepCost,
    choose_lengths,
)
from tests.unit.scheduler.speculation_kit import FREE, LINEAR, Drafting

COSTS = [AMX_COST, CPU_COST, CUDA_COST]


@pytest.mark.parametrize("cost", COSTS)
def test_a_step_costs_more_with_more_tokens_and_less_per_token(cost: StepCost) -> None:
    costs = [cost.of(number) for number in range(1, 2000)]
    assert costs[0] == 1.0
    assert all(one <= two for one, two in itertools.pairwise(costs))
    per_token = [one / number for number, one in enumerate(costs, start=1)]
    assert all(one >= two * 0.999 for one, two in itertools.pairwise(per_token[:200]))


def test_costs_between_and_beyond_the_measured_points() -> None:
    cost = StepCost(((1, 1.0), (3, 2.0), (5, 6.0)), overlap_gain=0.0)
    assert [cost.of(number) for number in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]


def test_the_most_likely_drafts_are_taken() -> None:
    cost = StepCost(((1, 1.0), (101, 11.0)), overlap_gain=0.0)
    lengths = choose_lengths([[0.9, 0.8, 0.1], [0.05], [0.95, 0.2]], 3, 0, cost)
    assert lengths == [2, 0, 1]


def test_drafts_that_cost_nothing_are_all_taken_and_costly_ones_never() -> None:
    chances = [[0.5, 0.25], [0.1]]
    assert choose_lengths(chances, 8, 0, FREE) == [2, 1]
    assert choose_lengths(chances, 8, 0, LINEAR) == [0, 0]


def test_overlap_is_lost_with_drafts() -> None:
    for gain, taken in ((0.05, 1), (0.2, 0)):
        cost = StepCost(((1, 1.0), (2, 1.0)), overlap_gain=gain)
        assert choose_lengths([[0.1]], 1, 0, cost) == [taken]


def test_drafts_that_a_model_has_yet_to_make_cost_its_passes() -> None:
    """One pass gives a draft to each row, so the deepest draft counts."""
    cost = StepCost(((1, 1.0), (1000, 1.0)), overlap_gain=0.0, draft_pass=0.2)
    chances = [[0.5, 0.3, 0.1]]
    assert choose_lengths(chances, 1, 0, cost) == [3]
    assert choose_lengths(chances, 1, 0, cost, drafted=False) == [2]
    assert choose_lengths([[0.5, 0.3, 0.1], [0.4]], 2, 0, cost, drafted=False) == [1, 1]
    assert choose_lengths([[0.15]], 1, 0, cost, drafted=False) == [0]
    for rows in (1, 4, 16):
        dear = dataclasses.replace(AMX_COST, draft_pass=1.0)
        assert not any(choose_lengths([[0.97]] * rows, rows, 0, dear, drafted=False)), "a pass as long as a step"


@pytest.mark.parametrize("cost", [AMX_COST, CPU_COST])
def test_fewer_drafts_pay_in_a_large_batch(cost: StepCost) -> None:
    chances = [0.7**place for place in range(1, 12)]
    lengths = [max(choose_lengths([chances] * rows, rows, 0, cost)) for rows in (1, 4, 16, 64)]
    assert lengths[0] >= 2 and lengths == sorted(lengths, reverse=True) and lengths[-1] == 0
    sure = [0.97**place for place in range(1, 12)]
    assert max(choose_lengths([sure], 1, 0, cost)) > 6
    beside_prompts = max(choose_lengths([chances] * 16, 16, 512, cost))
    assert beside_prompts >= lengths[2], "a step that computes a prompt costs much anyway"


def test_rates_follow_what_is_accepted() -> None:
    model, good, bad = AcceptanceModel(), RequestSpeculation(), RequestSpeculation()
    first = model.chances(good, "request", 0, 4)
    for _ in range(30):
        for state, accepted in ((good, 4), (bad, 0)):
            state.verifying = "request", 0
            model.add(state, 4, accepted)
    assert model.chances(good, "request", 0, 4)[0] > 0.85 > first[0] > model.chances(bad, "request", 0, 4)[0]
    assert len(model.chances(bad, "request", 0, 4)) < 4, "hopeless drafts are left out"
    others = model.chances(RequestSpeculation(), "request", 0, 4)
    assert model.chances(bad, "request", 0, 4)[0] < others[0] < model.chances(good, "request", 0, 4)[0]


def test_longer_matches_and_earlier_positions_are_trusted_more() -> None:
    model, state = AcceptanceModel(), RequestSpeculation()
    classes = [model.class_of_match(length) for length in (1, 2, 3, 4, 5, 6, 8, 9, 100)]
    assert classes == [0, 0, 1, 2, 2, 3, 3, 4, 4]
    starts = [model.chances(state, "request", number, 1)[0] for number in range(5)]
    assert starts == sorted(starts)
    chances = model.chances(state, "executor", 0, 9)
    assert chances == sorted(chances, reverse=True) and chances[-1] >= MIN_CHANCE


def test_a_request_forgets_what_was_long_ago() -> None:
    model, state = AcceptanceModel(), RequestSpeculation()
    state.verifying = "executor", 0
    for accepted in [0] * 200 + [3] * 40:
        model.add(state, 3, accepted)
    assert model.chances(state, "executor", 0, 1)[0] > 0.6


def waits_of(switch: DraftSwitch, num_waits: int) -> list[int]:
    """The next waits of a switch whose drafts are never accepted."""
    waits = []
    for _ in range(num_waits):
        while switch.num_waiting == 0:
            switch.planned(1)
        waits.append(switch.num_waiting)
        while switch.num_waiting:
            assert not switch.is_attempt
            switch.planned(1)
        assert switch.is_attempt
    return waits


def test_drafting_is_given_up_and_tried_again_ever_more_rarely() -> None:
    switch = DraftSwitch(0.05)
    for _ in range(FIRST_STEPS - 1):
        switch.planned(1)
        assert switch.num_waiting == 0 and not switch.is_attempt
    assert waits_of(switch, 6) == [FIRST_WAIT, 16, 32, MAX_WAIT, MAX_WAIT, MAX_WAIT]


def test_drafting_goes_on_while_it_gains_more_than_overlap() -> None:
    """A draft is accepted in every tenth step."""
    for num_rows, goes_on in ((1, True), (4, False)):
        switch = DraftSwitch(0.05)
        for step in range(200):
            switch.planned(num_rows)
            if switch.num_waiting:
                break
            switch.accepted(int(step % 10 == 0))
        assert (switch.num_waiting == 0) is goes_on


def test_drafting_resumes_when_the_drafts_of_an_attempt_are_accepted() -> None:
    switch = DraftSwitch(0.05)
    waits_of(switch, 3)
    for _ in range(50):
        switch.planned(1)
        switch.accepted(3)
        assert switch.num_waiting == 0 and not switch.is_attempt
    assert waits_of(switch, 1) == [FIRST_WAIT]


def test_drafts_that_were_under_way_when_drafting_was_given_up_can_resume_it() -> None:
    switch = DraftSwitch(0.05)
    while not switch.num_waiting:
        switch.planned(1)
    switch.accepted(1)
    switch.planned(1)
    assert switch.num_waiting == 0 and not switch.is_attempt


def test_a_server_stops_drafting_what_never_comes_and_resumes_when_it_does() -> None:
    """The text looks as if it repeated itself, but each repetition goes on in another way; later it really repeats."""
    mono = Drafting(cost=AMX_COST, max_drafts=4, num_rows=1, num_pages=300)
    lures = [token for n in range(60) for token in (7, 8, 100 + n)]
    loop = [5, 6, 9, 4] * 60
    mono.ask("a", [7, 8, 1, 7, 8, 2], lures + loop)
    facts: list[tuple[int, float, float]] = []
    while mono.step() or mono.scheduler.role.live:
        told = mono.scheduler.state().facts
        active, length = told["spec_is_drafting"], told["spec_draft_length"]
        assert isinstance(active, float) and isinstance(length, float)
        facts.append((len(mono.tokens("a")), active, length))
    assert mono.tokens("a") == lures + loop
    in_lures = [active for count, active, _ in facts if 60 < count < 180]
    assert sum(in_lures) < len(in_lures) / 3, "mostly off"
    in_loop = [length for count, _, length in facts if count > 180 + 80]
    assert sum(in_loop) / len(in_loop) > 3, "on, with long drafts"


def test_a_server_with_a_drafter_in_the_executor_asks_only_for_drafts_that_pay() -> None:
    mono = Drafting(cost=LINEAR, ngram=False, num_rows=1, num_pages=100)
    text = list(range(10, 160))
    mono.executor.proposals = {"a": 0}
    mono.ask("a", [1, 2, 3], text)
    mono.run()
    assert mono.tokens("a") == text
    asked = mono.executor.num_proposed
    assert None not in asked and sum(number != 0 for number in asked) < len(asked) / 5
    assert any(asked[FIRST_STEPS + 2 :]), "attempts go on"
    useful = Drafting(cost=AMX_COST, ngram=False, num_rows=1, num_pages=100)
    useful.executor.proposals = {"a": 4}
    useful.ask("a", [1, 2, 3], text)
    useful.run()
    assert useful.tokens("a") == text and useful.num_steps("a") < len(text) / 3


@pytest.mark.parametrize(("draft_pass", "num_right", "wanted"), [(0.1, 0, 0), (0.1, 4, 4), (1.2, 4, 0)])
def test_a_server_asks_for_as_many_drafts_as_pay_for_the_passes(draft_pass: float, num_right: int, wanted: int) -> None:
    """The first `num_right` drafts of each step are right."""
    mono = Drafting(cost=dataclasses.replace(AMX_COST, draft_pass=draft_pass), ngram=False, num_rows=1, num_pages=200)
    mono.executor.proposals = {"a": num_right}
    text = list(range(10, 400))
    mono.ask("a", [1, 2, 3], text)
    mono.run()
    assert mono.tokens("a") == text
    asked = [number for number in mono.executor.num_proposed[30:] if number is not None]
    assert sum(number == wanted for number in asked) > 0.8 * len(asked), asked


def test_a_request_with_better_drafts_than_others_before_it_has_drafts_again() -> None:
    """Requests with wrong drafts have switched drafting off. An attempt shows that this request's are right."""
    mono = Drafting(cost=dataclasses.replace(AMX_COST, draft_pass=0.1), ngram=False, num_rows=1, num_pages=400)
    mono.executor.proposals = {"bad": 0, "good": 4}
    text = list(range(10, 310))
    for rid in mono.executor.proposals:
        mono.ask(rid, [1, 2, 3], text)
        mono.run()
    assert mono.num_steps("bad") > 0.95 * len(text)
    assert mono.num_steps("good") < 0.6 * len(text)
