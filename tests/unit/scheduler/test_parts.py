"""Steps are computed in parts: whole prompts in turn, what decodes with the last."""

from __future__ import annotations

import random

import pytest

from pdserve.executor.interface import BatchRow
from pdserve.protocol.messages import AbortRequest
from pdserve.scheduler.step_parts import BatchSplitter
from tests.unit.scheduler.kit import Mono

WORDS = list(range(1, 401))


def burst(lengths: list[int], *, max_new_tokens: int = 6, **kwargs: object) -> Mono:
    """Prompts "0", "1" and so on of these lengths, all posted at once."""
    shape = {"num_pages": 900, "num_rows": 40, "chunk": 40, "mixed": 8, "width": 200, "saturation": 10}
    mono = Mono(**(shape | kwargs))  # type: ignore[arg-type]
    for index, length in enumerate(lengths):
        post(mono, str(index), length, max_new_tokens)
    return mono


def post(mono: Mono, rid: str, length: int, max_new_tokens: int = 6) -> None:
    begin = 3 * len(mono.scheduler.role.live) + len(rid)
    mono.post(rid, WORDS[begin : begin + length], max_new_tokens=max_new_tokens, ignore_eos=True)


def rows(sizes: list[int]) -> list[BatchRow]:
    """Chunks of so many tokens, the first tokens of requests "0", "1" and so on."""
    return [BatchRow(str(index), index, 0, size, sample=True) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([10, 10, 10], ["0", "1", "2"]),
        ([4, 4, 4, 4], ["01", "23"]),
        ([9, 2, 9, 30], ["0", "12", "3"]),  # two are too few for a part
        ([4, 30, 5, 5, 1], ["01", "234"]),  # so are four, and one
        ([12, 12, 4], ["0", "12"]),  # what is left belongs to the last part
        ([30], ["0"]),
    ],
)
def test_a_part_has_about_as_many_tokens_as_saturate(sizes: list[int], parts: list[str]) -> None:
    step = BatchSplitter(10)
    step.put([], rows(sizes))
    taken = []
    while step:
        taken.append(step.take())
    assert ["".join(row.rid for row in part) for part in taken] == parts
    assert [row for part in taken for row in part] == rows(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_all_parts_have_at_least_half_of_that(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randint(1, 20)
    prompts = rows([rng.randint(1, 2 * most) for _ in range(30)])
    decode = [BatchRow(f"d{i}", 100 + i, 5, 6, sample=True) for i in range(3)]
    step, parts = BatchSplitter(most), []
    step.put(decode, prompts)
    while step:
        parts.append(step.take())
    assert parts[-1][:3] == decode
    parts[-1] = parts[-1][3:]
    assert [row for part in parts for row in part] == prompts and len(parts) > 1
    for part in parts:
        sizes = [row.num_tokens for row in part]
        assert sum(sizes) >= most / 2
        assert len(part) == 1 or sum(sizes) <= most or min(sum(sizes[:-1]), sizes[-1]) < most / 2


def test_without_saturation_there_are_no_parts() -> None:
    step = BatchSplitter(None)
    step.put([], rows([20, 20, 20]))
    assert len(step.take()) == 3 and not step


def test_beside_streams_parts_are_twice_as_large() -> None:
    step = BatchSplitter(10)
    step.put([], rows([10, 10, 10, 10, 9]), beside_streams=True)
    assert [len(step.take()) for _ in range(2)] == [2, 3] and not step, "nine are less than half of one"
    step.put([], rows([10, 10, 10]))
    assert [len(step.take()) for _ in range(3)] == [1, 1, 1] and not step


def test_first_tokens_come_in_turn_and_what_decodes_comes_with_the_last() -> None:
    mono = burst([12])
    assert mono.step() == {"0": (0, 12)}
    for rid in "123":
        post(mono, rid, 12)
    assert [mono.step() for _ in range(2)] == [{"1": (0, 12)}, {"2": (0, 12)}]
    assert [len(mono.tokens(rid)) for rid in "0123"] == [1, 1, 1, 0]
    assert mono.step() == {"0": (12, 13), "3": (0, 12)}
    post(mono, "late", 50)
    assert mono.step() == {"0": (13, 14), "late": (0, 32)} | dict.fromkeys("123", (12, 13)), "80 are a burst"
    assert mono.step()["late"] == (32, 40), "then they stream"
    mono.run()
    assert all(len(mono.tokens(rid)) == 6 for rid in "0123") and mono.all_free()


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_streams_two_saturations_are_a_part(overlap: bool) -> None:
    mono = burst([12], max_new_tokens=30, chunk=80, mixed=60, overlap=overlap)
    while len(mono.tokens("0")) < 3:
        mono.step()
    for rid in "123456":
        post(mono, rid, 10)
    assert [set(mono.step()) for _ in range(2)] == [set("12"), set("34")]
    mono.mailbox.post(AbortRequest(rid="5"))
    assert set(mono.step()) == set("06")
    mono.run()
    assert [len(mono.tokens(rid)) for rid in "0123456"] == [30, 6, 6, 6, 6, 0, 6] and mono.all_free()


def test_what_arrives_meanwhile_waits_for_the_next_step() -> None:
    mono = burst([12, 12])
    assert mono.step() == {"0": (0, 12)}
    post(mono, "late", 12)
    assert [mono.step() for _ in range(2)] == [{"1": (0, 12)}, {"0": (12, 13), "1": (12, 13), "late": (0, 12)}]


def test_short_prompts_come_before_the_chunk_of_a_long_one_in_the_same_step() -> None:
    mono = burst([100, 10, 10])
    assert [mono.step() for _ in range(4)] == [{"0": (0, 40)}, {"1": (0, 10)}, {"2": (0, 10)}, {"0": (40, 60)}]


def test_without_chunks_there_are_parts_too() -> None:
    mono = burst([100, 12, 12], chunk=None, mixed=None)
    assert [mono.step() for _ in range(3)] == [{"0": (0, 100)}, {"1": (0, 12)}, {"2": (0, 12)}]


@pytest.mark.parametrize("overlap", [False, True])
def test_who_ends_meanwhile_is_not_computed(overlap: bool) -> None:
    mono = burst([12], overlap=overlap)
    while not mono.tokens("0"):
        mono.step()
    for rid in "123":
        post(mono, rid, 12)
    assert mono.step() == {"1": (0, 12)}
    for rid in "02":
        mono.mailbox.post(AbortRequest(rid=rid))
    post(mono, "4", 12)
    assert [mono.step() for _ in range(2)] == [
        {"3": (0, 12)},
        {"1": (12, 13), "4": (0, 12)} | ({} if overlap else {"3": (12, 13)}),
    ]
    mono.run()
    assert [len(mono.tokens(rid)) for rid in "01234"] == [1, 6, 0, 6, 6] and mono.all_free()
    assert mono.scheduler.audit() == []


def test_a_rid_that_comes_again_meanwhile_begins_anew() -> None:
    mono = burst([12, 12, 12])
    assert mono.step() == {"0": (0, 12)}
    mono.mailbox.post(AbortRequest(rid="1"))
    mono.step()
    post(mono, "1", 20)
    assert mono.step() == {"0": (12, 13), "2": (12, 13), "1": (0, 20)}


def test_what_gives_way_meanwhile_is_planned_anew() -> None:
    mono = burst([12, 12, 12])
    assert mono.step() == {"0": (0, 12)}
    mono.scheduler.role.retract_all()
    assert [mono.step() for _ in range(3)] == [{"0": (0, 13)}, {"1": (0, 12)}, {"2": (0, 12)}]
    mono.run()
    assert all(len(mono.tokens(rid)) == 6 for rid in "012") and mono.all_free()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", [{"overlap": True}, {"num_stages": 2}, {"num_stages": 3}])
def test_parts_are_under_way_together(shape: dict[str, object], late: bool) -> None:
    mono = burst([12, 12, 12], late=late, **shape)
    assert [mono.step() for _ in range(3)] == [{rid: (0, 12)} for rid in "012"]
    mono.run()
    assert all(len(mono.tokens(rid)) == 6 for rid in "012") and mono.all_free()


def times(lengths: list[int], saturation: int | None) -> dict[str, list[int]]:
    """How many tokens were computed when each request of a burst had its first, second and so on token."""
    mono = burst(lengths, saturation=saturation)
    seen: dict[str, list[int]] = {str(index): [] for index in range(len(lengths))}
    computed = 0
    while mono.scheduler.role.live or not computed:
        computed += sum(end - start for start, end in mono.step().values())
        for rid, at in seen.items():
            at += [computed] * (len(mono.tokens(rid)) - len(at))
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_no_token_comes_later_than_if_steps_were_computed_at_once(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice((8, 20, 30, 150))
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(6, 30))]
    in_parts, at_once = (times(lengths, saturation) for saturation in (10, None))
    later = {rid: [new - old for new, old in zip(in_parts[rid], at_once[rid], strict=True)] for rid in at_once}
    assert max(max(each) for each in later.values()) <= 0
    assert min(each[0] for each in later.values()) < 0
