"""Prompts that come at once while nobody streams: computed in turn, and who has a first token waits for the last."""

from __future__ import annotations

import random

import pytest

from tests.unit.scheduler.kit import Mono

WORDS = list(range(1, 401))


def burst(lengths: list[int], *, max_new_tokens: int = 6, **kwargs: object) -> Mono:
    """Prompts "0", "1" and so on of these lengths, all posted at once."""
    shape = {"num_pages": 900, "num_rows": 40, "chunk": 40, "mixed": 8, "width": 200, "saturation": 10}
    mono = Mono(**(shape | kwargs))  # type: ignore[arg-type]
    for index, length in enumerate(lengths):
        mono.post(str(index), WORDS[index : index + length], max_new_tokens=max_new_tokens, ignore_eos=True)
    return mono


def test_first_tokens_come_in_turn_and_then_all_go_on_together() -> None:
    mono = burst([12, 12, 12])
    assert [mono.step() for _ in range(3)] == [{"0": (0, 12)}, {"1": (0, 12)}, {"2": (0, 12)}]
    assert [len(mono.tokens(rid)) for rid in "012"] == [1, 1, 1]
    assert mono.step() == dict.fromkeys("012", (12, 13))
    mono.run()
    assert [len(mono.tokens(rid)) for rid in "012"] == [6, 6, 6] and mono.all_free()


def test_short_prompts_share_a_step_that_none_of_them_fills() -> None:
    mono = burst([4, 4, 4, 30, 2, 2])
    assert [mono.step() for _ in range(4)] == [
        {"0": (0, 4), "1": (0, 4)},  # the third does not end in it
        {"2": (0, 4)},  # beside the fourth it would wait for 30
        {"3": (0, 30)},
        {"4": (0, 2), "5": (0, 2)},
    ]
    assert set(mono.step()) == set("012345")


def test_a_prompt_that_fits_no_step_is_cut_and_leaves_room_for_short_ones() -> None:
    mono = burst([100, 4])
    assert [mono.step() for _ in range(3)] == [{"0": (0, 40)}, {"1": (0, 4), "0": (40, 76)}, {"0": (76, 100)}]
    assert mono.step() == {"0": (100, 101), "1": (4, 5)}, "the short one waited for what came before it"


def test_who_comes_after_a_first_token_does_not_keep_it_waiting() -> None:
    mono = burst([12, 12])
    assert [mono.step() for _ in range(2)] == [{"0": (0, 12)}, {"1": (0, 12)}]
    mono.post("late", WORDS[50:62], max_new_tokens=6, ignore_eos=True)
    assert mono.step() == {"0": (12, 13), "1": (12, 13)}
    assert mono.step() == {"0": (13, 14), "1": (13, 14), "late": (0, 8)}, "beside streams, as ever"


def test_who_comes_with_the_first_token_belongs_to_the_burst() -> None:
    mono = burst([12])
    mono.step()
    mono.post("1", WORDS[50:62])
    assert mono.step() == {"1": (0, 12)}
    assert mono.step() == {"0": (12, 13), "1": (12, 13)}


def test_a_burst_is_at_most_so_long() -> None:
    mono = burst([20] * 30)
    steps = [mono.step() for _ in range(6)]
    assert [list(rows) for rows in steps] == [["0"], ["1"], ["2"], ["3"], ["4"], ["0", "1", "2", "3", "4"]]
    assert mono.step()["5"] == (0, 8), "two steps of 40 tokens were waited for; others go beside the streams"
    mono.run()
    assert all(len(mono.tokens(str(index))) == 6 for index in range(30)) and mono.all_free()


def test_where_memory_is_short_those_that_have_it_go_on() -> None:
    mono = burst([12, 12, 12], num_pages=8, width=8)
    assert [mono.step() for _ in range(2)] == [{"0": (0, 12)}, {"0": (12, 13)}], "what the first will need is kept"
    mono.run()
    assert all(len(mono.tokens(rid)) == 6 for rid in "012") and mono.all_free()


def test_a_request_of_one_token_waits_for_nobody() -> None:
    mono = burst([12, 12], max_new_tokens=1)
    assert [mono.step() for _ in range(3)] == [{"0": (0, 12)}, {"1": (0, 12)}, {}]


def test_without_chunks_prompts_come_in_turn_too() -> None:
    mono = burst([100, 4, 4, 12], chunk=None, mixed=None)
    assert [mono.step() for _ in range(3)] == [{"0": (0, 100)}, {"1": (0, 4), "2": (0, 4)}, {"3": (0, 12)}]
    assert set(mono.step()) == set("0123")


@pytest.mark.parametrize("late", [False, True])
def test_with_overlap_the_burst_is_over_when_its_last_prompt_is_under_way(late: bool) -> None:
    mono = burst([12, 12, 12], overlap=True, late=late)
    assert [mono.step() for _ in range(3)] == [{"0": (0, 12)}, {"1": (0, 12)}, {"2": (0, 12)}]
    assert mono.step() == {"0": (12, 13), "1": (12, 13)}
    mono.run()
    assert [len(mono.tokens(rid)) for rid in "012"] == [6, 6, 6] and mono.all_free()


def test_a_request_that_comes_back_keeps_nobody_waiting() -> None:
    mono = burst([12])
    while len(mono.tokens("0")) < 3:
        mono.step()
    mono.scheduler.role.retract_all()
    mono.post("new", WORDS[100:112])
    assert [mono.step() for _ in range(2)] == [{"0": (0, 15)}, {"0": (15, 16), "new": (0, 8)}]


def times(lengths: list[int], saturation: int | None) -> dict[str, list[int]]:
    """How many tokens were computed when each request of a burst had its first, second and so on token."""
    mono = burst(lengths, chunk=80, saturation=saturation)
    seen: dict[str, list[int]] = {str(index): [] for index in range(len(lengths))}
    computed = 0
    while mono.scheduler.role.live or not computed:
        computed += sum(end - start for start, end in mono.step().values())
        for rid, at in seen.items():
            at += [computed] * (len(mono.tokens(rid)) - len(at))
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_no_token_comes_later_than_if_all_were_computed_together_but_for_one_step_of_decode(seed: int) -> None:
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < 60:
        lengths.append(rng.randint(1, 20))
    in_turn, together = (times(lengths, saturation) for saturation in (10, None))
    sooner = [together[rid][0] - in_turn[rid][0] for rid in together]
    assert min(sooner) >= 0 and max(sooner) > 0
    for rid, at in together.items():
        assert all(new <= old + len(lengths) for new, old in zip(in_turn[rid], at, strict=True)), rid
