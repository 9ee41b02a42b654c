"""Rows with drafts: planning, acceptance, stops inside an accepted run, memory, overlap, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.protocol.messages import (
    AbortRequest,
    ContinueGeneration,
    FlushCache,
    OutputBatch,
    PauseGeneration,
    SpeculationStats,
)
from pdserve.scheduler.draft_length import AMX_COST
from pdserve.scheduler.request import PriorityRules
from pdserve.scheduler.speculation import Speculation
from tests.unit.scheduler.kit import EOS
from tests.unit.scheduler.speculation_kit import LINEAR, Drafting

SOURCE = list(range(10, 30))
PROMPT = [*SOURCE, 5, 10]
"""Its last token begins the source anew, once another token of it has come."""
COPY = SOURCE[1:]


def test_a_copied_text_takes_fewer_steps_and_has_the_same_tokens() -> None:
    mono = Drafting(min_match=1)
    mono.ask("a", PROMPT, COPY)
    mono.run()
    assert mono.tokens("a") == COPY and mono.finish("a").type == "length"
    assert mono.num_steps("a") == 2 + 4, "two chunks, and 18 tokens in steps of at most five"
    assert mono.all_free()


def test_wrong_drafts_cost_no_token() -> None:
    mono = Drafting(adaptive=False)
    mono.ask("a", [1, 4, 5, 1, 4], [7, 1, 4, 8, 1, 4, 9])
    mono.run()
    assert mono.tokens("a") == [7, 1, 4, 8, 1, 4, 9] and mono.all_free()
    stats = mono.stats("a")
    assert stats is not None and stats.num_accepted < stats.num_draft_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ["eos", "stop", "length"])
def test_no_token_comes_behind_an_end_inside_an_accepted_run(end: str, overlap: bool) -> None:
    source = [11, 12, 13, EOS if end == "eos" else 14, 15, 16, 17]
    prompt = [*source, 5, 6, 11, 12]
    mono = Drafting(overlap=overlap, adaptive=False)
    text = [13, *source[3:]]
    options: dict[str, Any] = {"eos": {}, "stop": {"stop_token_ids": (14,)}, "length": {"max_new_tokens": 2}}[end]
    mono.ask("a", prompt, text, **options)
    mono.run()
    assert mono.tokens("a") == [13, source[3]]
    finish = mono.finish("a")
    assert finish.type == ("length" if end == "length" else "stop")
    assert mono.all_free() and not mono.scheduler.audit()
    if end != "length":
        assert mono.drafted("a")[0][0] == source[3], "it was a draft"
        stats = mono.stats("a")
        assert stats is not None and stats.num_accepted == 1 < stats.num_draft_tokens


def test_a_row_never_has_more_drafts_than_tokens_left() -> None:
    mono = Drafting(adaptive=False)
    mono.ask("a", [*PROMPT, 11], COPY[1:], max_new_tokens=4)
    mono.run()
    assert mono.tokens("a") == COPY[1:5]
    assert [len(drafts) for drafts in mono.drafted("a")] == [2]
    longest = max(row.end for plan in mono.executor.plans for row in plan.rows)
    assert longest == len(PROMPT) + 1 + 4 - 1, "the KV of the last token is never computed"


def test_a_request_may_turn_drafts_off_and_probes_have_none() -> None:
    mono = Drafting(adaptive=False)
    mono.ask("off", PROMPT, COPY, speculative=False)
    mono.ask("probe", PROMPT, COPY)
    mono.post("probe2", PROMPT, probe=True, max_new_tokens=6)
    mono.executor.texts["probe2"] = [*COPY]
    mono.run()
    assert not mono.drafted("off") and not mono.drafted("probe2") and mono.drafted("probe")
    assert mono.stats("off") is None and mono.tokens("off") == COPY


def test_requests_of_a_step_have_different_drafts() -> None:
    mono = Drafting(adaptive=False)
    texts = {"a": COPY, "b": [40, 41, 42, 43, 44, 45], "c": [7, 5, 7, 5, 7, 5, 7, 5, 7]}
    mono.ask("a", PROMPT, texts["a"])
    mono.ask("b", [60, 61, 62], texts["b"])
    mono.ask("c", [7, 5, 7, 5], texts["c"])
    mono.run()
    for rid, text in texts.items():
        assert mono.tokens(rid) == text
    assert mono.drafted("a") and mono.drafted("c") and not mono.drafted("b")
    assert mono.all_free()


def test_past_outputs_are_drafts_for_later_requests_until_they_are_flushed() -> None:
    mono = Drafting(adaptive=False)
    text = [31, 32, 33, 34, 35, 36, 37, 38]
    for rid, is_drafted in (("first", False), ("second", True), ("third", False)):
        if rid == "third":
            mono.mailbox.post(FlushCache(query_id="q"))
        mono.ask(rid, [50], text)
        mono.run()
        assert mono.tokens(rid) == text
        assert bool(mono.drafted(rid)) is is_drafted


def test_the_executors_drafts_are_used_for_the_next_row_only() -> None:
    mono = Drafting(ngram=False, max_drafts=4, adaptive=False)
    mono.executor.proposals = {"a": 2, "b": 9}
    text = [41, 42, 43, 44, 45, 46, 47, 48, 49, 50]
    mono.ask("a", [1, 2, 3], text)
    mono.ask("b", [1, 2, 4], text)
    mono.run()
    assert mono.tokens("a") == text == mono.tokens("b")
    assert [drafts[:2] for drafts in mono.drafted("a")] == [(42, 43), (45, 46), (48, 49)]
    stats = mono.stats("a"), mono.stats("b")
    assert stats[0] == SpeculationStats(num_verify_steps=3, num_draft_tokens=10, accepted_by_position=(3, 3))
    assert stats[1] is not None and stats[1].num_accepted == 8 - 1


def test_counters_of_all_requests_and_by_position() -> None:
    mono = Drafting(ngram=False, adaptive=False)
    mono.executor.proposals = {"a": 1, "b": 0}
    mono.ask("a", [1, 2, 3], [41, 42, 43, 44, 45])
    mono.ask("b", [1, 2, 4], [41, 42, 43])
    mono.run()
    counters = mono.counters()
    stats = [mono.stats(rid) for rid in ("a", "b")]
    assert counters["spec_verify_steps"] == sum(s.num_verify_steps for s in stats if s is not None)
    assert counters["spec_draft_tokens"] == sum(s.num_draft_tokens for s in stats if s is not None)
    assert counters["spec_accepted_tokens"] == counters["spec_accepted_at.1"] == 2
    assert "spec_accepted_at.2" not in counters
    assert mono.scheduler.state().counters["generation_tokens"] == 8


def test_the_next_step_waits_for_the_results_of_one_with_drafts_and_overlaps_else() -> None:
    mono = Drafting(adaptive=False)
    mono.ask("a", PROMPT, COPY)
    mono.run()
    copied, plain = mono.drafted("a"), Drafting(cost=LINEAR)
    assert copied
    plain.ask("a", list(range(10, 60)), list(range(100, 190)))
    under_way = 0
    for _ in range(110):
        plain.step()
        under_way += not plain.context.no_step_in_flight
    assert plain.tokens("a") == list(range(100, 190))
    assert under_way > 70, "where nothing matches, few plans wait"


def test_steps_overlap_while_no_drafts_are_likely() -> None:
    """Drafting is on. No step waits in a text without repetitions; in a copy each step waits for the drafts before."""
    found = []
    for text in ([*range(100, 112)], COPY[:12]):
        mono = Drafting(cost=AMX_COST, min_match=1)
        mono.ask("a", PROMPT, text)
        mono.run()
        assert mono.tokens("a") == text
        found.append((mono.num_steps("a"), mono.executor.num_overlapping))
    assert found[0][0] == 2 + 11 and found[0][1] >= 10
    assert found[1][0] < 9 and found[1][1] <= 3


def test_retraction_keeps_the_tokens() -> None:
    """Memory for little more than one of the requests: they take turns, and none is retracted for drafts."""
    mono = Drafting(num_pages=14, adaptive=False, capacity=0, conservativeness=0.1)
    texts = {rid: [n + i % 7 for i in range(24)] for rid, n in (("a", 100), ("b", 200), ("c", 300))}
    for rid, text in texts.items():
        mono.ask(rid, [1, 2, text[0]], text)
    mono.run()
    for rid, text in texts.items():
        assert mono.tokens(rid) == text and mono.drafted(rid)
    assert mono.context.counters["requests_retracted"] > 0 and mono.all_free()


@pytest.mark.parametrize("offload_bytes", [0, 1 << 20])
def test_a_pause_retracts_and_continues_a_request_with_drafts(offload_bytes: int) -> None:
    mono = Drafting(adaptive=False, offload_bytes=offload_bytes)
    mono.ask("a", PROMPT, COPY)
    while not mono.drafted("a"):
        mono.step()
    mono.mailbox.post(PauseGeneration(query_id="p", mode="retract"))
    mono.step()
    req = mono.scheduler.role.live["a"]
    assert req.lease is None and req.planned == req.computed
    assert req.computed == (req.seq_len - 1 if offload_bytes else 0), "only accepted tokens count"
    mono.mailbox.post(ContinueGeneration(query_id="c"))
    mono.run()
    assert mono.tokens("a") == COPY and mono.all_free()


@pytest.mark.parametrize("offload_bytes", [0, 1 << 20])
def test_a_request_with_drafts_is_preempted_and_goes_on(offload_bytes: int) -> None:
    rules = PriorityRules(enabled=True, threshold=1)
    mono = Drafting(adaptive=False, num_rows=1, rules=rules, offload_bytes=offload_bytes)
    mono.ask("low", PROMPT, COPY, priority=0)
    while not mono.drafted("low"):
        mono.step()
    mono.ask("high", PROMPT, COPY, priority=9)
    mono.run()
    assert mono.tokens("low") == mono.tokens("high") == COPY and mono.all_free()
    batches = [message for message in mono.sent if isinstance(message, OutputBatch)]
    ends = [output.rid for batch in batches for output in batch.outputs if output.finish is not None]
    assert ends == ["high", "low"] and mono.context.counters["requests_preempted"] == 1


def test_an_abort_while_drafts_are_verified_frees_all() -> None:
    mono = Drafting(adaptive=False)
    mono.ask("a", PROMPT, COPY)
    mono.ask("b", PROMPT, COPY)
    while not mono.drafted("a"):
        mono.step()
    mono.mailbox.post(AbortRequest(rid="a"))
    mono.run()
    assert mono.finish("a").type == "abort" and mono.tokens("b") == COPY and mono.all_free()


def test_drafts_take_no_page_that_running_requests_need_next() -> None:
    """Three pages of four tokens are left for two requests: one page each stays free for their next tokens."""
    mono = Drafting(num_pages=8, num_rows=2, adaptive=False, max_drafts=8)
    loop = [7, 8, 9]
    for rid in ("a", "b"):
        mono.ask(rid, [*loop, *loop, 7], [8, 9, 7, 8, 9, 7, 8])
    mono.run()
    assert mono.context.counters["requests_retracted"] == 0
    assert all(mono.tokens(rid) == [8, 9, 7, 8, 9, 7, 8] for rid in ("a", "b"))


def test_drafts_from_another_server_are_a_source_of_the_next_step() -> None:
    """They hold for the tokens that were known when they came, like those of the executor."""
    speculation = Speculation(4, adaptive=False)
    mono = Drafting(ngram=False, adaptive=False)
    mono.ask("a", [1, 2, 3], [*range(41, 71)])
    mono.ask("b", [1, 2, 3], [*range(41, 71)], speculative=False)
    while not (mono.tokens("a") and mono.tokens("b")):
        mono.step()
    reqs = [mono.scheduler.role.live[rid] for rid in ("b", "a")]
    for number, req in enumerate(reqs):
        assert not speculation.is_due
        speculation.received(req, (7, 8, 9))
        assert speculation.is_due is bool(number)
    most = dict.fromkeys(range(2), 2)
    assert speculation.choose(dict(enumerate(reqs)), most, 2, 0) == {1: (7, 8)}
    reqs[1].output_ids.append(5)
    assert speculation.choose(dict(enumerate(reqs)), most, 2, 0) == {}


def test_cached_pages_end_before_the_first_rejected_draft() -> None:
    """The next turn finds the KV of accepted tokens in the prefix cache, and no more than that."""
    mono = Drafting(adaptive=False, prefix_cache=True)
    mono.ask("a", PROMPT, COPY, max_new_tokens=11)
    mono.run()
    num_kv = len(PROMPT) + 11 - 1
    mono.ask("b", [*PROMPT, *COPY[:11], 70, 71, 72], [1])
    mono.run()
    assert mono.outputs("b")[-1].cached_tokens == num_kv - num_kv % 4


def test_pipeline_stages_draft_without_waiting_for_each_other() -> None:
    mono = Drafting(adaptive=False, num_stages=2, overlap=False)
    texts = {rid: COPY[: 10 + n] for n, rid in enumerate("abcd")}
    for rid, text in texts.items():
        mono.ask(rid, PROMPT, text)
    mono.run()
    for rid, text in texts.items():
        assert mono.tokens(rid) == text and mono.drafted(rid)
    assert mono.executor.most_under_way == 2 and mono.all_free()


def test_prompts_in_parts_come_before_the_rows_with_drafts() -> None:
    mono = Drafting(adaptive=False, saturation=4, chunk=64)
    mono.ask("a", PROMPT, COPY)
    while not mono.drafted("a"):
        mono.step()
    for rid in ("b", "c"):
        mono.ask(rid, [*PROMPT, 9, ord(rid)], [90, 91, 92])
    mono.run()
    assert mono.tokens("a") == COPY and mono.tokens("b") == mono.tokens("c") == [90, 91, 92]


def test_each_token_of_a_run_has_its_line_in_the_step_log() -> None:
    lines: list[dict[str, Any]] = []
    mono = Drafting(ngram=False, adaptive=False, write_line=lines.append)
    mono.executor.proposals = {"a": 2}
    mono.ask("a", [1, 2, 3], [41, 42, 43, 44])
    mono.run()
    assert len(lines) == 1
    rows = lines[0]["rows"]
    assert [(row["position"], row["last_token"], row["next_token"]) for row in rows] == [
        (3, 41, 42), (4, 42, 43), (5, 43, 44),
    ]  # fmt: skip
    assert [row["finish_reason"] for row in rows] == [None, None, "length"]


def test_the_first_tokens_of_a_run_carry_timing() -> None:
    mono = Drafting(ngram=False, adaptive=False)
    mono.executor.proposals = {"a": 4}
    mono.ask("a", [1, 2, 3], list(range(41, 60)))
    mono.run()
    with_timing = [output.timing is not None for output in mono.outputs("a")]
    assert with_timing[:2] == [True, True] and not any(with_timing[2:-1]) and with_timing[-1]
