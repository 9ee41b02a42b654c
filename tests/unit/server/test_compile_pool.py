"""The compile worker: what is hostile is refused, others go on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.config.groups import GrammarConfig
from pdserve.errors import RequestError
from pdserve.grammar import compile_jobs
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.compile_jobs import Check, CheckGrammar, CheckPattern, CompileResult, compile_one
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.sampling import Grammar
from pdserve.server.request import compile_pool
from pdserve.server.request.compile_pool import GONE, CompilePool, FairQueue, QueuedCheck
from pdserve.server.request.constraints import Constraint, GrammarCheck
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import EOS, VOCAB
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


def schema(value: object) -> CheckGrammar:
    return CheckGrammar(job=0, grammar=Grammar(kind="json_schema", text=json.dumps(value)))


def regex(pattern: str) -> CheckGrammar:
    return CheckGrammar(job=0, grammar=Grammar(kind="regex", text=pattern))


def slow(number: int, *, small: bool = True) -> CheckGrammar:
    """Takes seconds: an automaton of up to 49,999 states for each property."""
    names = [f"p{number}{'' if small else 'x' * 200}{i}" for i in range(30)]
    values = {name: {"type": "integer", "multipleOf": 49_999 - i} for i, name in enumerate(names)}
    return schema({"properties": values, "required": names})


def deep() -> CheckGrammar:
    """Rules that each need the next: the engine recurses until it has no stack."""
    rules = "\n".join(f'r{i}: "a{i}" r{(i + 1) % 4000}?' for i in range(4000))
    return CheckGrammar(job=0, grammar=Grammar(kind="ebnf", text=f"start: r0\n{rules}"))


@contextlib.asynccontextmanager
async def opened(tokenizer: Tokenizer, cpu_s: float = 5.0) -> AsyncIterator[CompilePool]:
    pool = CompilePool(JsonRules(), cpu_s)
    try:
        assert (await pool.load(tokenizer.as_json(), VOCAB, [EOS])).message is None
        yield pool
    finally:
        await pool.close()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_each_kind_of_harm_is_the_child_s_alone(tokenizer: Tokenizer) -> None:
    async with opened(tokenizer, cpu_s=0.5) as pool:
        pid = pool.pid
        assert (await pool.check(regex("[ab]+"), "a")).reason == "ok"
        late = await pool.check(slow(0), "a")
        assert late.reason == "slow" and late.message == "it takes more than 0.5 s of a processor to compile"
        assert (await pool.check(deep(), "a")).reason == "crashed"
        wrong = await pool.check(regex("("), "a")
        assert wrong.reason == "refused" and wrong.message is not None
        assert (await pool.check(CheckPattern(job=0, pattern=r"\n{3}"), "a")).reason == "ok"
        assert "empty text" in str((await pool.check(CheckPattern(job=0, pattern="a*"), "a")).message)
        assert pid is not None and pool.pid == pid and is_running(pid), "the worker has seen nothing of it"
    assert not is_running(pid)


async def test_what_takes_too_much_memory_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "MEMORY_BYTES", 24 << 20)
    async with opened(tokenizer) as pool:
        verdict = await pool.check(slow(0), "a")
        assert verdict.reason == "memory" and verdict.message == "it takes more than 24 MiB to compile"
        assert (await pool.check(regex("[ab]+"), "a")).message is None


async def test_an_innocent_grammar_does_not_wait_for_large_ones(tokenizer: Tokenizer) -> None:
    async with opened(tokenizer, cpu_s=0.6) as pool:
        large = [asyncio.create_task(pool.check(slow(i, small=False), "a")) for i in range(6)]
        await asyncio.sleep(0)
        assert (await pool.check(regex("b+"), "a")).message is None
        assert sum(task.done() for task in large) < 4, "each takes 0.6 s of a processor, two at a time"
        assert (await pool.check(slow(9, small=False), "b")).reason == "slow"
        assert not all(task.done() for task in large), "another client has not waited for all of them"
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)


async def test_a_worker_that_is_killed_or_stuck_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tokenizer, cpu_s=30.0) as pool:
        first = pool.pid
        assert first is not None
        held = asyncio.create_task(pool.check(slow(0), "a"))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        assert (await held).message == GONE
        assert (await pool.check(regex("[ab]+"), "a")).message is None, "with the vocabulary"
        second = pool.pid
        assert second is not None and second != first
        os.kill(second, signal.SIGSTOP)
        monkeypatch.setattr(compile_pool, "GRACE_S", 0.2 - compile_pool.WALL_FACTOR * 30.0)  # an answer has 0.2 s
        assert (await pool.check(regex("c+"), "a")).message == GONE
        monkeypatch.undo()
        assert (await pool.check(regex("c+"), "a")).message is None
        third = pool.pid
        assert third not in (first, second) and not is_running(first)


def _entry(client: str, *, small: bool) -> QueuedCheck:
    return QueuedCheck(regex("a"), client, small, asyncio.get_running_loop().create_future())


async def test_clients_take_turns() -> None:
    queue = FairQueue()
    for client in "aaab":
        queue.add(_entry(client, small=False))
    queue.add(_entry("a", small=True))
    first, second, third = queue.take(), queue.take(), queue.take()
    assert first is not None and second is not None and third is not None
    assert [(one.client, one.small) for one in (first, second, third)] == [("a", True), ("a", False), ("b", False)]
    queue.add(_entry("c", small=True))
    assert queue.take() is None, "all places are taken"
    queue.ended(second)
    fourth = queue.take()
    assert fourth is not None and fourth.client == "c", "small ones first"
    queue.ended(first)
    fifth = queue.take()
    assert fifth is not None and (fifth.client, fifth.small) == ("a", False)
    assert len(queue) == 1 and queue.take() is None


async def test_what_a_client_may_have_waiting_is_bounded() -> None:
    queue = FairQueue()
    for _ in range(compile_pool.MAX_WAITING_OF_CLIENT):
        queue.add(_entry("a", small=True))
    with pytest.raises(RequestError) as refused:
        queue.add(_entry("a", small=True))
    assert refused.value.status == 503 and refused.value.retry_after_s == 1
    queue.add(_entry("b", small=True))


async def test_a_client_that_finds_the_queue_full_leaves_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "MAX_WAITING", 2)
    queue = FairQueue()
    entries = [_entry(client, small=True) for client in "ab"]
    for entry in entries:
        queue.add(entry)
    with pytest.raises(RequestError):
        queue.add(_entry("c", small=True))
    for entry in entries:
        assert queue.take() is entry
        queue.ended(entry)
    assert queue.take() is None


async def test_a_pool_that_closes_leaves_no_check_unanswered(tokenizer: Tokenizer) -> None:
    async with opened(tokenizer, cpu_s=30.0) as pool:
        checks = [asyncio.create_task(pool.check(slow(i), "a")) for i in range(4)]
        await asyncio.sleep(0)
        await pool.close()
        verdicts = await asyncio.wait_for(asyncio.gather(*checks), 10.0)
        assert [(verdict.reason, verdict.message) for verdict in verdicts] == [("busy", GONE)] * 4


class Counting:
    """A `Compiler` that says what it is told to, and counts."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.verdict = CompileResult(job=0)
        self.go = asyncio.Event()

    async def load(self, tokenizer_json: str, vocab_size: int, eos_token_ids: object) -> CompileResult:
        return CompileResult(job=0)

    async def check(self, text: Check, client: str) -> CompileResult:
        self.checks.append(text)
        await self.go.wait()
        return self.verdict

    async def close(self) -> None:
        self.go.set()


def _ready() -> EngineReady:
    return EngineReady(
        model_type="llama", architectures=[], vocab_size=VOCAB, context_length=64, max_total_tokens=64,
        eos_token_ids=[EOS], facts={},
    )  # fmt: skip


async def test_a_text_is_checked_once_whatever_comes_of_it(tokenizer: Tokenizer) -> None:
    compiler = Counting()
    check = GrammarCheck(GrammarConfig(), tokenizer, compiler)
    good = Constraint(Grammar(kind="regex", text="a+"), "regex")
    both = [asyncio.create_task(check.take(good, _ready())) for _ in range(2)]
    await until(lambda: compiler.checks)
    compiler.go.set()
    assert await asyncio.gather(*both) == [good.grammar] * 2 and len(compiler.checks) == 1
    assert await check.take(good, _ready()) == good.grammar and len(compiler.checks) == 1
    compiler.verdict = CompileResult(job=0, reason="slow", message="too slow")
    for field in ("regex", "guided_regex"):
        with pytest.raises(RequestError, match=f"{field}: too slow") as refused:
            await check.take(Constraint(Grammar(kind="regex", text="b+"), field), _ready())
        assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    assert len(compiler.checks) == 2, "a refusal is remembered, too"
    compiler.verdict = CompileResult(job=0, reason="busy", message=GONE)
    with pytest.raises(RequestError) as gone:
        await check.take_patterns("c", "stop_regex")
    assert gone.value.status == 503
    compiler.verdict = CompileResult(job=0)
    await check.take_patterns("c", "stop_regex")
    assert len(compiler.checks) == 4, "that said nothing of the pattern"


async def test_hostile_patterns_are_refused_before_anything_is_compiled(tokenizer: Tokenizer) -> None:
    compiler = Counting()
    check = GrammarCheck(GrammarConfig(), tokenizer, compiler)
    began_s = time.thread_time()
    for pattern in ["(?:ab?c*){1500000}x", "(?:(?:(?:(?:xy){1000}){1000}){1000}){1000}z", "(" * 450 + "a" + ")" * 450]:
        with pytest.raises(RequestError, match="stop_regex") as refused:
            await check.take_patterns(pattern, "stop_regex")
        assert refused.value.field == "stop_regex" and compiler.checks == []
    assert time.thread_time() - began_s < 1.0


async def test_a_stop_pattern_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CheckPattern(job=0, pattern="a{9000}b")
    assert compile_one(check, JsonRules(), None).reason == "ok"
    for limit, value, said in (
        ("PATTERN_CPU_S", -1.0, "s to compile; the maximum is -1 s"),
        ("PATTERN_BYTES", -(1 << 40), "MiB when compiled; the maximum"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(compile_jobs, limit, value)
            verdict = compile_one(check, JsonRules(), None)
            assert verdict.reason == "refused" and verdict.message is not None and said in verdict.message
