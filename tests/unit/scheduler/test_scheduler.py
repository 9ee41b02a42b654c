"""The scheduler and the aggregated role with the hash model: refusals, aborts, finish reasons, counts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Literal

import pytest

from pdserve.executor.interface import BatchPlan, StepHandle
from pdserve.protocol.messages import (
    AbortRequest,
    CommandReply,
    ContinueGeneration,
    FinishReason,
    FlushCache,
    GenerateRequest,
    PauseGeneration,
    Shutdown,
    StateQuery,
    StateReply,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.request import Req, Times, finish_for_token
from tests.unit.scheduler.kit import EOS, PROMPT, Mono


@pytest.fixture
def mono() -> Iterator[Mono]:
    mono = Mono()
    yield mono
    assert mono.all_free() and not mono.scheduler.role.live, mono.memory.counts()


def test_a_request_ends_when_it_waits_or_runs_for_too_long() -> None:
    mono = Mono(num_rows=1)
    mono.context.limits = dataclasses.replace(mono.context.limits, waiting_timeout_s=0.1, running_timeout_s=0.3)
    for rid in ("runs", "waits"):
        mono.post(rid, max_new_tokens=50, ignore_eos=True)
    mono.run()
    waited, ran = mono.finish("waits").failure, mono.finish("runs").failure
    assert waited is not None and (waited.code, waited.status, waited.retry_after_s) == ("waiting_timeout", 503, 1)
    assert ran is not None and (ran.code, ran.message) == ("running_timeout", "Request running timeout reached.")
    assert not mono.tokens("waits") and 25 < len(mono.tokens("runs")) < 40, "a step takes 10 ms"
    mono.post("quick")
    mono.run()
    assert mono.finish("quick") == FinishReason(type="length", length=4)
    assert mono.all_free()


@pytest.mark.parametrize(
    ("sampling", "script", "tokens", "finish"),
    [
        ({}, [], [100] * 4, FinishReason(type="length", length=4)),
        ({"max_new_tokens": 1}, [], [100], FinishReason(type="length", length=1)),
        ({}, [100, EOS], [100, EOS], FinishReason(type="stop", matched=EOS)),
        ({}, [EOS], [EOS], FinishReason(type="stop", matched=EOS)),
        ({"ignore_eos": True}, [EOS], [EOS, 100, 100, 100], FinishReason(type="length", length=4)),
        ({"stop_token_ids": (7, 9)}, [100, 9], [100, 9], FinishReason(type="stop", matched=9)),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [EOS, 9], [EOS, 9], FinishReason(type="stop", matched=9)),
        ({"min_new_tokens": 3}, [EOS, EOS, EOS], [EOS] * 3, FinishReason(type="stop", matched=EOS)),
        ({"min_new_tokens": 2, "stop_token_ids": (9,)}, [9, 9], [9, 9], FinishReason(type="stop", matched=9)),
        ({"max_new_tokens": 2}, [100, EOS], [100, EOS], FinishReason(type="stop", matched=EOS)),
    ],
)
def test_finish_reasons(
    mono: Mono, sampling: dict[str, object], script: list[int], tokens: list[int], finish: FinishReason
) -> None:
    mono.executor.script = script
    mono.post("a", **sampling)
    mono.run()
    assert mono.tokens("a") == tokens
    assert mono.finish("a") == finish


def test_stop_tokens_come_before_length() -> None:
    req = Req(GenerateRequest(rid="a", input_ids=[1], sampling=CoreSamplingParams(max_new_tokens=1)), Times(0.0), [EOS])
    assert finish_for_token(req, EOS, frozenset({EOS})) == FinishReason(type="stop", matched=EOS)


def test_logprobs_only_where_asked(mono: Mono) -> None:
    mono.post("plain")
    mono.post("rich", top_logprobs=1)
    mono.run()
    assert all(output.logprobs is None for output in mono.outputs("plain"))
    first = mono.outputs("rich")[0].logprobs
    assert first is not None and (first[0].logprob, first[0].top) == (-0.5, [(1, -0.5)])


def test_a_rid_in_use_is_refused_with_409_and_its_owner_goes_on(mono: Mono) -> None:
    mono.post("a")
    mono.post("a")
    mono.scheduler.step()
    (refusal,) = [o for o in mono.outputs("a") if o.finish is not None]
    assert (refusal.finish.type, refusal.finish.status_code) == ("abort", 409)
    mono.run()
    assert mono.tokens("a") == [100] * 4
    mono.post("a")
    mono.run()
    assert mono.tokens("a") == [100] * 8, "a rid may be used again"


def test_a_full_queue_refuses_with_503() -> None:
    mono = Mono(num_rows=1, max_queued=2)
    mono.post("running")
    mono.scheduler.step()
    for rid in ("b", "c", "d"):
        mono.post(rid)
    mono.scheduler.step()
    assert (mono.finish("d").status_code, mono.finish("d").err_type) == (503, "queue_full")
    mono.run()
    assert [mono.finish(rid).type for rid in ("running", "b", "c")] == ["length"] * 3
    assert mono.scheduler.state().counters["requests_refused"] == 1
    assert mono.all_free()


@pytest.mark.parametrize(
    ("kwargs", "num_prompt"), [({"num_pages": 4}, 14), ({"num_pages": 16, "width": 4}, 14)], ids=["pool", "row"]
)
def test_what_can_never_fit_is_refused_with_400(kwargs: dict[str, int], num_prompt: int) -> None:
    mono = Mono(**kwargs)
    mono.post("large", list(range(num_prompt)))
    mono.post("fits", list(range(num_prompt - 2)))
    mono.run()
    assert (mono.finish("large").type, mono.finish("large").status_code) == ("abort", 400)
    assert mono.finish("fits").type == "length"
    assert mono.all_free()


@pytest.mark.parametrize(("reason", "kind", "status"), [("abort", "abort", 499), ("stop", "stop", None)])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_in_any_queue_leaves_nothing(
    mono: Mono, steps: int, reason: Literal["abort", "stop"], kind: str, status: int | None
) -> None:
    for rid in ("a", "b", "c", "d"):
        mono.post(rid, max_new_tokens=8)
    for _ in range(steps):
        mono.scheduler.step()
    mono.mailbox.post(AbortRequest(rid="c", reason=reason))
    mono.mailbox.post(AbortRequest(rid="a"))
    mono.mailbox.post(AbortRequest(rid="nobody"))
    mono.mailbox.post(AbortRequest(rid="a"))
    mono.run()
    assert (mono.finish("c").type, mono.finish("c").status_code) == (kind, status)
    assert mono.finish("a").type == "abort"
    assert mono.finish("b").type == mono.finish("d").type == "length"
    assert mono.tokens("b") == [100] * 8


def test_abort_of_all_ends_all(mono: Mono) -> None:
    for rid in "abcd":
        mono.post(rid)
    mono.scheduler.step()
    mono.mailbox.post(AbortRequest(rid=None))
    mono.scheduler.step()
    assert {mono.finish(rid).type for rid in "abcd"} == {"abort"}
    assert mono.scheduler.state().counters["requests_aborted"] == 4


def test_flush_is_refused_while_requests_run(mono: Mono) -> None:
    mono.post("a")
    mono.mailbox.post(FlushCache(query_id="1"))
    mono.run()
    mono.mailbox.post(FlushCache(query_id="2"))
    mono.scheduler.step()
    assert [(m.query_id, m.ok) for m in mono.sent if isinstance(m, CommandReply)] == [("1", False), ("2", True)]


def test_state_counts_what_is_where() -> None:
    mono = Mono(num_rows=2, num_pages=16, chunk=4)
    for rid in "abc":
        mono.post(rid)
    mono.scheduler.step()
    mono.mailbox.post(StateQuery(query_id="q"))
    mono.scheduler.step()
    reply = next(m for m in mono.sent if isinstance(m, StateReply))
    state = reply.state
    assert (state.num_running_reqs, state.num_queue_reqs, state.memory["reqs_live"]) == (1, 2, 3)
    assert state.memory["pages_total"] - state.memory["pages_free"] == 2, "the prompt of one request"
    assert (state.num_used_tokens, state.max_total_tokens) == (8, 64)
    mono.run()
    after = mono.scheduler.state()
    assert (after.num_running_reqs, after.num_queue_reqs, after.num_used_tokens) == (0, 0, 0)
    assert after.counters["prompt_tokens"] == 15 and after.counters["generation_tokens"] == 12


def test_progress_grows_with_each_step_that_computes_and_with_nothing_else() -> None:
    mono = Mono(num_rows=2, chunk=4)
    assert mono.scheduler.state().progress == 0
    mono.post("a")
    mono.run()
    ended = mono.scheduler.state().progress
    assert ended >= 2, "a prompt step, and decode steps"
    mono.scheduler.step()
    mono.mailbox.post(PauseGeneration(query_id="1", mode="in_place"))
    mono.post("b")
    mono.scheduler.step()
    assert mono.scheduler.state().progress == ended


def test_requests_that_wait_for_their_grammar_are_in_the_queue() -> None:
    mono = Mono(num_rows=2, chunk=4, num_gated=lambda: 5)
    mono.post("a")
    mono.scheduler.step()
    state = mono.scheduler.state()
    assert (state.num_running_reqs, state.num_queue_reqs) == (1, 5)
    assert state.queues["num_grammar_queue_reqs"] == 5


def test_retracted_requests_fill_the_queue_and_are_never_refused() -> None:
    mono = Mono(num_rows=2, max_queued=1)
    for rid in ("a", "b"):
        mono.post(rid)
    for _ in range(4):
        mono.step()
    mono.mailbox.post(PauseGeneration(query_id="1", mode="retract"))
    for rid in ("c", "d"):
        mono.post(rid)
    mono.step()
    assert mono.scheduler.state().queues["num_retracted_reqs"] == 2
    assert mono.finish("d").err_type == "queue_full", "two rows are free, and one may wait beyond them"
    mono.mailbox.post(ContinueGeneration(query_id="2"))
    mono.run()
    assert [mono.finish(rid).type for rid in "abc"] == ["length"] * 3 and mono.all_free()


def test_probes_are_counted_as_such_and_nowhere_else() -> None:
    mono = Mono()
    mono.post("real")
    mono.run()
    before = mono.scheduler.state()
    for rid in ("probe", "stopped"):
        mono.mailbox.post(
            GenerateRequest(rid=rid, input_ids=[1], sampling=CoreSamplingParams(max_new_tokens=1), probe=True)
        )
    mono.mailbox.post(AbortRequest(rid="stopped"))
    mono.run()
    after = mono.scheduler.state()
    assert mono.finish("probe").type == "length" and mono.finish("stopped").type == "abort"
    grown = {name: total for name, total in after.counters.items() if total != before.counters.get(name, 0)}
    grown = {name: total for name, total in grown.items() if "_seconds" not in name}
    assert grown == {"health_probes": 2} and before.failures == after.failures
    mono.post("next")
    mono.run()
    assert mono.finish("next").type == "length" and mono.all_free()


def test_chunks_stay_within_the_budget() -> None:
    mono = Mono(num_rows=4, chunk=3)
    sizes: list[int] = []
    launch = mono.executor.launch

    def watching(plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        sizes.append(sum(row.num_tokens for row in plan.rows if row.end <= len(PROMPT)))
        return launch(plan, layer_events=layer_events)

    mono.executor.launch = watching  # type: ignore[method-assign]
    for rid in "abcd":
        mono.post(rid)
    mono.run()
    assert max(sizes) == 3 and sum(sizes) == 4 * len(PROMPT)


def test_shutdown_ends_the_loop() -> None:
    mono = Mono()
    mono.post("a")
    mono.mailbox.post(Shutdown())
    mono.scheduler.run()
    assert mono.scheduler.role.live or mono.finish("a")


def test_a_shutdown_while_idle_is_not_slept_on() -> None:
    mono = Mono()
    loop = threading.Thread(target=mono.scheduler.run, daemon=True)
    mono.mailbox.post(Shutdown())
    loop.start()
    loop.join(timeout=10)
    assert not loop.is_alive()


def test_tokens_of_steps_are_counted_by_what_they_were_computed_for() -> None:
    mono = Mono(num_rows=2, chunk=4, prefix_cache=True, num_pages=32, saturation=4)
    prompt = list(range(3, 16))
    for rid in ("a", "b"):
        mono.post(rid, prompt, max_new_tokens=4)
        mono.run()
    counted = mono.scheduler.state().counters
    modes = [counted[f"realtime_tokens.{mode}"] for mode in ("prefill_compute", "prefill_cache", "decode")]
    assert modes == [13 + 1, 12, 6], "the first token of an answer comes from its prompt"
    assert counted["forward_execution_seconds.extend"] > 0 and counted["forward_execution_seconds.decode"] > 0
