"""Steps that are planned while the last one is under way: void tokens, memory in limbo, the self-audit."""

from __future__ import annotations

import pytest

from pdserve.protocol.messages import AbortRequest, StateQuery, StateReply
from tests.unit.scheduler.kit import EOS, PROMPT, Mono


@pytest.mark.parametrize("late", [False, True])
def test_the_next_step_is_launched_before_the_last_one_is_resolved(late: bool) -> None:
    mono = Mono(overlap=True, late=late)
    mono.post("a", max_new_tokens=6)
    mono.run()
    assert mono.tokens("a") == [100] * 6 and mono.all_free()
    plain = Mono()
    plain.post("a", max_new_tokens=6)
    plain.run()
    assert [plan.rows for plan in mono.executor.plans] == [plan.rows for plan in plain.executor.plans]


def test_the_row_that_was_launched_before_the_end_was_known_is_void() -> None:
    mono = Mono(overlap=True, late=True)
    mono.executor.script = [100, EOS, 555]
    mono.post("a", max_new_tokens=6)
    mono.run()
    assert mono.tokens("a") == [100, EOS] and mono.finish("a").matched == EOS
    assert len(mono.executor.plans) == 4, "two chunks, one token, and one that nobody wanted"
    assert mono.all_free()


def test_what_ends_under_way_is_free_only_after_the_step() -> None:
    mono = Mono(overlap=True, late=True)
    mono.post("a", max_new_tokens=6)
    for _ in range(4):
        mono.step()
    mono.mailbox.post(AbortRequest(rid="a"))
    role, launched = mono.scheduler.role, len(mono.executor.plans)
    mono.scheduler.inputs.drain()
    mono.scheduler.role.end(role.live["a"], None)
    assert not role.live and not mono.all_free(), "the step still writes"
    mono.step()
    assert mono.all_free() and len(mono.executor.plans) == launched


def test_a_rid_may_be_used_again_while_its_old_step_is_under_way() -> None:
    mono = Mono(overlap=True, late=True, num_rows=4)
    mono.post("a", max_new_tokens=6)
    for _ in range(4):
        mono.step()
    mono.mailbox.post(AbortRequest(rid="a"))
    mono.post("a", [*PROMPT, 11], max_new_tokens=2)
    before = len(mono.tokens("a"))
    for _ in range(20):
        mono.step()
    assert len(mono.tokens("a")) - before == 2 and mono.all_free()


def test_the_audit_names_who_still_holds_something() -> None:
    mono = Mono(num_rows=4)
    mono.post("a")
    mono.step()
    del mono.scheduler.role.live["a"]
    assert any("'a'" in sentence and "has ended" in sentence for sentence in mono.scheduler.audit())


def test_the_audit_runs_at_idle_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    mono = Mono(num_rows=4)
    mono.post("a")
    lost = mono.memory.pages.allocator.take(1)
    assert lost is not None
    mono.run()
    assert mono.context.counters["audit_differences"] > 0 and "self-audit" in caplog.text
    mono.mailbox.post(StateQuery(query_id="q", audit=True))
    mono.step()
    state = next(m.state for m in mono.sent if isinstance(m, StateReply))
    assert state.audit and state.counters["audit_differences"] > 0


def test_at_idle_the_audit_names_whatever_is_still_held() -> None:
    mono = Mono(num_rows=4)
    lease = mono.memory.reserve_tokens(8, "ghost")
    assert lease is not None
    lease.hold("remote")
    lease.drop("request")
    mono.memory.table.open([1])
    found = "; ".join(mono.scheduler.audit())
    assert "'ghost'" in found and "remote" in found and "row 0 is open for no request" in found
