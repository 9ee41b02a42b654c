"""The scheduler and the aggregated role with the hash model: refusals, aborts, finish reasons, counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.executor.interface import BatchPlan, SampledToken, StepHandle, StepResult
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.page_table import PageTable
from pdserve.protocol.messages import (
    AbortRequest,
    FinishReason,
    FlushCache,
    FlushReply,
    GenerateRequest,
    OutputBatch,
    Shutdown,
    StateQuery,
    StateReply,
    ToApi,
)
from pdserve.protocol.sampling import SamplingParams
from pdserve.scheduler.core import Core, Limits, Outbox
from pdserve.scheduler.req import Req, Times, finish_for_token
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.waiting import WaitingQueue
from pdserve.sim.hash_lm import HashExecutor, hash_layout

EOS = 2
PROMPT = [5, 6, 7, 8, 9]


class CountingExecutor(HashExecutor):
    """The hash model, but its sampled tokens are 100, 101, ... or what `script` says."""

    def __init__(self, layout_pages: int, table: PageTable) -> None:
        super().__init__(hash_layout(4), layout_pages, table)
        self.script: list[int] = []

    def resolve(self, handle: StepHandle) -> StepResult:
        result = super().resolve(handle)
        tokens = tuple(
            None if token is None else SampledToken(self.script.pop(0) if self.script else 100, -0.5, ((1, -0.5),))
            for token in result.tokens
        )
        return StepResult(result.step, tokens)


class Mono:
    """An aggregated server whose client is the test."""

    def __init__(
        self,
        *,
        num_pages: int = 16,
        num_rows: int = 2,
        chunk: int | None = 4,
        max_queued: int | None = None,
        width: int = 16,
    ) -> None:
        self.sent: list[ToApi] = []
        table = PageTable(num_rows, width)
        self.executor = CountingExecutor(num_pages, table)
        self.memory = KVMemory(self.executor.layout, num_pages, table, num_aux=0)
        limits = Limits(chunk_tokens=chunk, eos_token_ids=frozenset({EOS}))
        core = Core(self.memory, self.executor, Outbox(self.sent.append), ManualClock(), limits)
        self.mailbox: Mailbox[Event] = Mailbox()
        self.scheduler = Scheduler(
            MonolithRole(core, WaitingQueue("fcfs", 10.0, core.memory)), core, None, self.mailbox, max_queued=max_queued
        )

    def post(
        self, rid: str, tokens: list[int] | None = None, top_logprobs: int | None = None, **sampling: object
    ) -> None:
        params = SamplingParams(**({"max_new_tokens": 4} | sampling))  # type: ignore[arg-type]
        self.mailbox.post(
            GenerateRequest(rid=rid, input_ids=tokens or PROMPT, sampling=params, top_logprobs=top_logprobs)
        )

    def run(self) -> None:
        """Until nothing lives."""
        for _ in range(200):
            self.scheduler.step()
            if not self.scheduler.role.live:
                return
        raise AssertionError(self.scheduler.role.queues())

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self._outputs(rid) for token in output.token_ids]

    def finish(self, rid: str) -> FinishReason:
        """The one end of a request."""
        ends = [output.finish for output in self._outputs(rid) if output.finish is not None]
        assert len(ends) == 1 and self._outputs(rid)[-1].finish is not None, ends
        return ends[0]

    def _outputs(self, rid: str):  # type: ignore[no-untyped-def]
        return [o for message in self.sent if isinstance(message, OutputBatch) for o in message.outputs if o.rid == rid]

    def all_free(self) -> bool:
        counts = self.memory.counts()
        return all(counts[f"{name}_free"] == counts[f"{name}_total"] for name in ("pages", "rows", "aux"))


@pytest.fixture
def mono() -> Iterator[Mono]:
    mono = Mono()
    yield mono
    assert mono.all_free() and not mono.scheduler.role.live, mono.memory.counts()


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
    req = Req(GenerateRequest(rid="a", input_ids=[1], sampling=SamplingParams(max_new_tokens=1)), Times(0.0), [EOS])
    assert finish_for_token(req, EOS, frozenset({EOS})) == FinishReason(type="stop", matched=EOS)


def test_logprobs_only_where_asked(mono: Mono) -> None:
    mono.post("plain")
    mono.post("rich", top_logprobs=1)
    mono.run()
    assert all(output.logprobs is None for output in mono._outputs("plain"))
    first = mono._outputs("rich")[0].logprobs
    assert first is not None and (first[0].logprob, first[0].top) == (-0.5, [(1, -0.5)])


def test_a_rid_in_use_is_refused_with_409_and_its_owner_goes_on(mono: Mono) -> None:
    mono.post("a")
    mono.post("a")
    mono.scheduler.step()
    (refusal,) = [o for o in mono._outputs("a") if o.finish is not None]
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
    assert [(m.query_id, m.ok) for m in mono.sent if isinstance(m, FlushReply)] == [("1", False), ("2", True)]


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


def test_chunks_stay_within_the_budget() -> None:
    mono = Mono(num_rows=4, chunk=3)
    sizes: list[int] = []
    launch = mono.executor.launch

    def watching(plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        sizes.append(sum(row.num_tokens for row in plan.rows if row.end <= len(PROMPT)))
        return launch(plan, layer_marks=layer_marks)

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
