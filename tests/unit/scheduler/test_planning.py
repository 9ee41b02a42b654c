"""What a step computes: fairness between long and short prompts, prefixes computed once, memory kept for growth."""

from __future__ import annotations

import pytest

from pdserve.base.clock import ManualClock, RetryAfterEstimator
from pdserve.protocol.messages import AbortRequest, CommandReply, FlushCache, GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.decode_batch import NewTokenRatio
from tests.unit.scheduler.kit import Mono

LONG, SHORT = list(range(1, 401)), list(range(1000, 1010))


def test_a_long_prompt_leaves_half_of_each_step_to_short_ones() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, width=200)
    mono.post("long", LONG)
    assert mono.step() == {"long": (0, 40)}
    for rid in ("a", "b", "c"):
        mono.post(rid, SHORT, max_new_tokens=1)
    assert mono.step() == {"a": (0, 10), "b": (0, 10), "long": (40, 60)}, "two short ones end, the long one goes on"
    assert mono.step() == {"c": (0, 10), "long": (60, 88)}, "chunks that are cut end with a page"
    assert {rid for rid in "abc" if mono.finish(rid)} == set("abc")
    mono.run()
    assert mono.finish("long").type == "length" and mono.all_free()


def test_a_prompt_of_several_half_steps_goes_on_beside_a_much_longer_one() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, width=200)
    mono.post("long", LONG)
    assert mono.step() == {"long": (0, 40)}
    mono.post("middle", list(range(2000, 2050)), max_new_tokens=1)
    assert mono.step() == {"middle": (0, 20), "long": (40, 60)}
    mono.post("short", SHORT, max_new_tokens=1)
    assert mono.step() == {"short": (0, 10), "middle": (20, 28), "long": (60, 80)}, "what ends in this step comes first"
    assert mono.step() == {"middle": (28, 48), "long": (80, 100)}
    assert mono.step() == {"middle": (48, 50), "long": (100, 136)}
    assert mono.finish("middle").type == mono.finish("short").type == "length"
    mono.run()
    assert mono.finish("long").type == "length" and mono.all_free()


def test_a_second_long_prompt_waits_for_the_first() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, width=200)
    mono.post("one", LONG)
    mono.post("two", LONG[::-1])
    steps = [mono.step() for _ in range(10)]
    assert steps[:9] == [{"one": (i * 40, i * 40 + 40)} for i in range(9)]
    assert "two" in mono.step()


def test_a_step_beside_streams_takes_fewer_tokens_of_prompts() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200)
    mono.post("long", LONG[:100], max_new_tokens=1)
    assert [mono.step() for _ in range(3)] == [{"long": (0, 40)}, {"long": (40, 80)}, {"long": (80, 100)}]
    mono.post("first", SHORT[:4], max_new_tokens=5)
    mono.post("second", LONG[:90], max_new_tokens=1)
    assert mono.step() == {"first": (0, 4), "second": (0, 36)}, "nobody's stream pauses"
    assert mono.step() == {"first": (4, 5), "second": (36, 76)}, "what came together is computed together"
    assert mono.step() == {"first": (5, 6), "second": (76, 84)}, "two steps' worth are taken: a stream runs"
    mono.post("short", SHORT[:3], max_new_tokens=1)
    assert mono.step() == {"first": (6, 7), "second": (84, 90), "short": (0, 2)}
    assert mono.step() == {"first": (7, 8), "short": (2, 3)}
    mono.post("third", LONG[:50], max_new_tokens=1)
    assert mono.step() == {"third": (0, 40)}, "nobody decodes any more"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("early", [1, 2, 3, 4, 9])
def test_a_burst_takes_two_steps_worth_however_many_are_there_first(early: int, overlap: bool) -> None:
    mono = Mono(num_pages=300, num_rows=20, chunk=40, mixed=8, width=200, overlap=overlap)
    for i in range(9):
        if i == early:
            mono.step()
        mono.post(f"{i}", LONG[i * 12 : i * 12 + 12], max_new_tokens=30)
    for _ in range(9):
        mono.step()
    rows = [row for plan in mono.executor.plans for row in plan.rows]
    assert sum(row.num_tokens for row in rows if row.end <= 12) == 9 * 12
    sizes = [sum(row.num_tokens for row in plan.rows if row.end <= 12) for plan in mono.executor.plans]
    burst = sizes[: next(i for i, size in enumerate(sizes) if size == 8)]
    assert 72 < sum(burst) <= 80 and max(burst) <= 40 and max(sizes[len(burst) :]) == 8


def test_a_burst_ends_with_a_step_that_only_decodes() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200)
    mono.post("first", SHORT[:4], max_new_tokens=5)
    assert [mono.step() for _ in range(2)] == [{"first": (0, 4)}, {"first": (4, 5)}]
    mono.post("long", LONG[:50], max_new_tokens=1)
    assert mono.step() == {"first": (5, 6), "long": (0, 8)}


def test_what_a_burst_has_left_is_at_least_a_step_beside_streams() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200)
    mono.post("first", SHORT[:4], max_new_tokens=9)
    mono.step()
    mono.post("second", LONG[:36], max_new_tokens=1)
    assert mono.step() == {"first": (4, 5), "second": (0, 36)}
    mono.post("third", LONG[100:138], max_new_tokens=1)
    assert mono.step() == {"first": (5, 6), "third": (0, 38)}
    mono.post("fourth", LONG[200:230], max_new_tokens=1)
    assert mono.step() == {"first": (6, 7), "fourth": (0, 8)}, "2 were left"


def test_a_last_token_under_way_is_no_stream() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200, overlap=True)
    mono.post("stream", SHORT[:4], max_new_tokens=4)
    mono.post("one", SHORT[4:8], max_new_tokens=1)
    assert [mono.step() for _ in range(4)] == [
        {"stream": (0, 4), "one": (0, 4)},
        {},
        {"stream": (4, 5)},
        {"stream": (5, 6)},
    ]
    mono.post("late", LONG[:50], max_new_tokens=1)
    assert mono.step() == {"stream": (6, 7), "late": (0, 8)}
    mono.post("later", LONG[100:150], max_new_tokens=1)
    assert "stream" in mono.scheduler.role.live and mono.step() == {"late": (8, 48)}, "its last token is on its way"


def test_with_overlap_who_gets_one_token_is_no_stream() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200, overlap=True)
    for i in range(3):
        mono.post(f"{i}", LONG[i * 40 : i * 40 + 40], max_new_tokens=1)
    assert [mono.step() for _ in range(3)] == [{f"{i}": (0, 40)} for i in range(3)]


def test_with_overlap_a_first_token_under_way_counts() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200, overlap=True)
    mono.post("first", SHORT[:4], max_new_tokens=5)
    mono.post("second", LONG[:140], max_new_tokens=1)
    steps = [mono.step() for _ in range(4)]
    assert steps[:2] == [{"first": (0, 4), "second": (0, 36)}, {"second": (36, 76)}], "its first token is not yet here"
    assert steps[2:] == [{"first": (4, 5), "second": (76, 84)}, {"first": (5, 6), "second": (84, 92)}]


@pytest.mark.parametrize("late", [False, True])
def test_with_stages_a_stream_counts_while_another_stage_has_it(late: bool) -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200, num_stages=2, late=late)
    mono.post("stream", SHORT[:4], max_new_tokens=40)
    while len(mono.tokens("stream")) < 3:
        mono.step()
    mono.post("long", LONG[:100], max_new_tokens=1)
    chunks = [end - start for _ in range(20) for start, end in [mono.step().get("long", (0, 0))]]
    assert sum(chunks) == 100 and max(chunks) == 8


def test_prompts_under_way_share_the_smaller_budget_once_streams_run() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=8, width=200)
    mono.post("stream", SHORT[:4], max_new_tokens=30)
    mono.post("one", LONG[:90], max_new_tokens=1)
    mono.post("two", LONG[200:290], max_new_tokens=1)
    mono.step(), mono.step()
    begun = [mono.step() for _ in range(14)]
    prompt_tokens = [sum(end - start for rid, (start, end) in step.items() if rid != "stream") for step in begun]
    assert max(prompt_tokens) == 8 and all(step["stream"] for step in begun)
    mono.run()
    assert {mono.finish(rid).type for rid in ("stream", "one", "two")} == {"length"} and mono.all_free()


def test_a_budget_smaller_than_a_page_still_moves_a_prompt_on() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=40, mixed=3, width=200)
    mono.post("stream", SHORT[:4], max_new_tokens=30)
    while len(mono.tokens("stream")) < 3:
        mono.step()
    mono.post("long", LONG[:20], max_new_tokens=1)
    ends = [mono.step().get("long", (0, 0))[1] for _ in range(10)]
    assert ends == [3, 4, 7, 8, 11, 12, 15, 16, 19, 20]
    mono.run()
    assert mono.finish("long").type == "length" and mono.all_free()


def test_a_request_that_comes_back_is_a_stream_at_once() -> None:
    mono = Mono(num_pages=40, num_rows=8, chunk=40, mixed=8, width=200)
    mono.post("first", SHORT[:4], max_new_tokens=20)
    while len(mono.tokens("first")) < 3:
        mono.step()
    mono.scheduler.role.retract_all()
    mono.step()
    mono.post("long", LONG[:50], max_new_tokens=1)
    assert mono.step()["long"] == (0, 8)


def test_without_chunks_prompts_are_taken_whole() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=None, prefill=30, width=200)
    mono.post("long", LONG, max_new_tokens=1)
    mono.post("a", SHORT, max_new_tokens=1)
    mono.post("b", SHORT, max_new_tokens=1)
    assert mono.step() == {"long": (0, 400)}
    assert mono.step() == {"a": (0, 10), "b": (0, 10)}


def test_a_prefix_that_is_being_computed_is_waited_for_not_computed_again() -> None:
    mono = Mono(num_pages=300, num_rows=70, chunk=64, width=200, prefix_cache=True)
    prefix = LONG[:200]
    for i in range(64):
        mono.post(str(i), [*prefix, 5000 + i, 6000 + i], max_new_tokens=2)
        if i == 10:
            mono.post("other", SHORT, max_new_tokens=2)
    assert [set(mono.step()), set(mono.step())] == [{"0"}, {"0", "other"}], "other shares nothing and is not held back"
    mono.run()
    rows = [row for plan in mono.executor.plans for row in plan.rows if row.rid != "other"]
    assert sum(row.num_tokens for row in rows if row.end <= 202) == 200 + 64 * 2
    assert mono.context.counters["cached_tokens"] == 63 * 200
    assert mono.all_free()


def test_a_prefix_whose_owner_is_aborted_is_computed_by_the_next() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=8, width=200, prefix_cache=True)
    mono.post("a", LONG[:100])
    mono.post("b", [*LONG[:100], 7])
    assert mono.step() == {"a": (0, 8)}
    mono.mailbox.post(AbortRequest(rid="a"))
    assert mono.step() == {"b": (8, 16)}, "what a has computed is kept"
    mono.run()
    assert mono.finish("b").type == "length" and mono.all_free()


def test_a_flush_empties_the_cache_when_idle() -> None:
    mono = Mono(num_pages=300, num_rows=8, chunk=64, width=200, prefix_cache=True)
    mono.post("a", LONG[:100])
    mono.run()
    assert mono.memory.counts()["pages_cached"] == 25
    mono.mailbox.post(FlushCache(query_id="q"))
    mono.step()
    assert [m.ok for m in mono.sent if isinstance(m, CommandReply)] == [True]
    assert mono.memory.counts()["pages_cached"] == 0
    mono.post("b", LONG[:100])
    assert mono.step() == {"b": (0, 64)}


def test_memory_is_kept_for_what_running_requests_are_expected_to_need() -> None:
    mono = Mono(num_pages=50, num_rows=8, chunk=64, width=50)
    mono.post("a", SHORT, max_new_tokens=150)
    mono.step()
    mono.post("b", SHORT, max_new_tokens=150)
    assert "b" not in mono.step(), "0.7 x 150 tokens twice do not fit 200"
    mono.run()
    assert mono.context.counters["requests_retracted"] == 0


@pytest.mark.parametrize("offload_bytes", [0, 1 << 20])
def test_retraction_is_bounded_and_changes_no_token(offload_bytes: int) -> None:
    """The ratio is far too hopeful, so that memory runs out."""
    roomy = Mono(num_pages=500, num_rows=8, chunk=64, width=100, conservativeness=0.07)
    tight = Mono(num_pages=60, num_rows=8, chunk=64, width=60, offload_bytes=offload_bytes, conservativeness=0.07)
    for mono in (roomy, tight):
        mono.executor.resolve = super(type(mono.executor), mono.executor).resolve  # type: ignore[method-assign]
        for i in range(8):
            mono.post(str(i), [i * 100 + j + 3 for j in range(10)], max_new_tokens=100, ignore_eos=True)
    worst: dict[str, int] = {}
    for _ in range(2000):
        tight.step()
        for req in tight.scheduler.role.live.values():
            worst[req.rid] = max(worst.get(req.rid, 0), req.num_retractions)
        if not tight.scheduler.role.live:
            break
    roomy.run()
    assert tight.context.counters["requests_retracted"] > 0 and max(worst.values()) <= 4, "16, 32, 64, 128 tokens"
    assert (tight.context.counters["offloaded_pages"] > 0) == (offload_bytes > 0)
    assert worst["0"] == 0, "the oldest never gives way"
    for i in range(8):
        assert tight.tokens(str(i)) == roomy.tokens(str(i)) and len(tight.tokens(str(i))) == 100
    assert tight.all_free() and tight.context.offloaded_bytes == 0 and tight.scheduler.audit() == []


def test_an_abort_of_a_retracted_request_frees_its_host_memory() -> None:
    mono = Mono(num_pages=20, num_rows=4, chunk=64, width=20, offload_bytes=1 << 20, conservativeness=0.0)
    for rid in "ab":
        mono.post(rid, SHORT, max_new_tokens=60, ignore_eos=True)
    for _ in range(200):
        mono.step()
        if mono.context.offloaded_bytes:
            break
    assert mono.context.offloaded_bytes and mono.scheduler.role.queues()["num_retracted_reqs"] == 1
    mono.mailbox.post(AbortRequest(rid=None))
    mono.run()
    assert mono.context.offloaded_bytes == 0 and mono.all_free()


def test_the_ratio_falls_with_good_steps_and_rises_to_what_was_used() -> None:
    ratio = NewTokenRatio(0.7, 1.0, 4096)
    assert ratio.value == 0.7
    for _ in range(1000):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    mono = Mono(num_pages=100, num_rows=4, width=50)
    mono.post("a", max_new_tokens=100)
    for _ in range(30):
        mono.step()
    req = mono.scheduler.role.live["a"]
    ratio.raise_to([req])
    assert ratio.value == pytest.approx((len(req.output_ids) + 16) / 100)
    assert NewTokenRatio(0.7, 3.0, 4096).value == 1.0


def test_a_started_prompt_goes_on_whatever_short_ones_come() -> None:
    mono = Mono(num_pages=3000, num_rows=200, chunk=64, width=2000)
    mono.post("long", list(range(4000)))
    mono.step()
    mono.post("middle", list(range(5000, 5200)), max_new_tokens=1)
    mono.step()
    for i in range(30):
        for k in range(4):
            mono.post(f"{i}-{k}", list(range(6000, 6008)), max_new_tokens=1)
        rows = mono.step()
        assert "long" in rows and ("middle" in rows or mono.finish("middle"))


def test_a_short_prompt_does_not_wait_behind_those_that_wait_for_a_prefix() -> None:
    mono = Mono(num_pages=900, num_rows=60, chunk=64, width=900, prefix_cache=True)
    prefix = list(range(1500))
    mono.post("first", prefix)
    mono.step()
    for i in range(40):
        mono.post(f"{i}", [*prefix, 5000 + i])
    mono.post("short", SHORT, max_new_tokens=1)
    steps = [mono.step() for _ in range(3)]
    assert any("short" in rows for rows in steps) and all(set(rows) <= {"first", "short"} for rows in steps)
    mono.run()
    assert mono.all_free() and mono.context.counters["cached_tokens"] == 40 * 1500


@pytest.mark.parametrize("together", [False, True])
def test_a_request_whose_pages_are_cached_already_needs_no_more_than_its_own(together: bool) -> None:
    prompt = [*range(19), 99]
    mono = Mono(num_pages=11, num_rows=4, chunk=4, width=11, prefix_cache=True)
    mono.post("a", prompt, max_new_tokens=1, ignore_eos=True)
    if not together:
        mono.run()
    mono.post("b", prompt, max_new_tokens=25, ignore_eos=True)
    mono.run()
    assert len(mono.tokens("b")) == 25 and mono.all_free() and mono.scheduler.audit() == []


def test_the_queue_is_full_when_more_wait_than_rows_are_about_to_take() -> None:
    mono = Mono(num_rows=2, max_queued=1, num_pages=100, width=50)
    for i in range(5):
        mono.post(f"{i}", max_new_tokens=50)
    mono.step()
    refused = [rid for rid in "01234" if mono.scheduler.role.live.get(rid) is None]
    assert refused == ["3", "4"]
    assert mono.finish("3").status_code == 503 and mono.finish("3").retry_after_s == 1
    mono.run()


def test_when_to_come_back_follows_the_pace_of_the_last_half_minute() -> None:
    clock = ManualClock()
    pace = RetryAfterEstimator(clock)
    assert pace.retry_after_s(0) == 1
    for second in range(20):
        pace.sample(second // 4)
        clock.advance(1.0)
    assert pace.retry_after_s(5) == 4, "five in twenty seconds"
    clock.advance(8 * 3600.0)
    assert pace.retry_after_s(5) == 1, "hours ago says nothing"


@pytest.mark.parametrize(
    ("salts", "waits"), [(("", ""), True), (("a", "a"), True), (("a", "b"), False), (("", "a"), False)]
)
def test_a_prompt_waits_for_a_page_of_its_salt_only(salts: tuple[str, str], waits: bool) -> None:
    mono = Mono(prefix_cache=True, num_rows=2, chunk=None)
    for rid, salt in zip("ab", salts, strict=True):
        mono.mailbox.post(
            GenerateRequest(rid=rid, input_ids=[5] * 9, sampling=CoreSamplingParams(max_new_tokens=2), cache_salt=salt)
        )
    mono.scheduler.step()
    assert [row.rid for row in mono.executor.plans[0].rows] == (["a"] if waits else ["a", "b"])
