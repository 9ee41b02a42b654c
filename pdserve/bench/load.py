"""Sends the requests of a run at their times, with a limit of requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pdserve.bench.client import BenchClient, BenchRecord, Clock, Prompt

Sleep = Callable[[float], Awaitable[None]]
OnDone = Callable[[BenchRecord], None]
BACKGROUND_RETRY_S = 1.0
"""A background client waits so long after a request that failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTurn:
    """One request: its prompt (of a later turn: what the user says then) and the length of its answer in tokens."""

    prompt: Prompt
    output_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSession:
    """A conversation of one or more turns; each turn waits for the answer to the turn before.

    `at_s`: arrival in seconds after the start where the dataset has its own times, else None. `system`: the system
    prompt of a conversation. `pause_s`: seconds between an answer and the next turn.
    """

    turns: tuple[BenchTurn, ...]
    at_s: float | None = None
    system: str | None = None
    pause_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackgroundLoad:
    """Requests beside those of a run, with figures of their own.

    `concurrency` clients take the next of `turns`, which never ends, each after the answer to its last one, from
    `start_s` seconds after the start until the run ends.
    """

    turns: Iterator[BenchTurn]
    concurrency: int
    start_s: float = 0.0
    _drawing: asyncio.Lock = dataclasses.field(init=False, repr=False, default_factory=asyncio.Lock)

    async def draw(self) -> BenchTurn | None:
        """Return the next turn, None behind the last one. A thread makes it: a long text takes tens of milliseconds."""
        async with self._drawing:
            return await asyncio.to_thread(next, self.turns, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """Records in the order of the sessions, those of the background, and the seconds from the start to the end."""

    records: list[BenchRecord]
    duration_s: float
    background: list[BenchRecord] = dataclasses.field(default_factory=list)


def single(prompts: Sequence[Prompt], output_len: int) -> list[BenchSession]:
    """Return sessions of one turn with answers of one length."""
    return [BenchSession(turns=(BenchTurn(prompt=prompt, output_len=output_len),)) for prompt in prompts]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds, at `rate` per second: all 0 for an infinite rate.

    Gaps have a gamma distribution of shape `burstiness` (1: a Poisson process; below 1 more bursty; above 1 more even),
    and are scaled so that the last request arrives at `count / rate`, as in `vllm bench serve`.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    scale = count / rate / now if now > 0 else 0.0
    return [at * scale for at in times]


async def run_load(
    client: BenchClient,
    sessions: Sequence[BenchSession],
    *,
    arrivals_s: Sequence[float],
    max_concurrency: int | None = None,
    duration_s: float | None = None,
    background: BackgroundLoad | None = None,
    on_done: OnDone = lambda record: None,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> LoadOutcome:
    """Run all sessions; return when each has ended, or `duration_s` has passed. Requests that run then are cut, as are
    those of the background. Every request is bounded by the target's timeout.

    Args:
        arrivals_s: seconds after the start, one for each session.
        max_concurrency: requests in flight at most; later ones wait, and their times begin when they are sent.
        duration_s: seconds; None: until the last answer.
        background: requests beside those of the sessions.
        on_done: called after each request of the sessions that was not cut.
    """
    gate: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if max_concurrency is not None:
        gate = asyncio.Semaphore(max_concurrency)
    start = clock()
    found: list[list[BenchRecord]] = [[] for _ in sessions]
    beside: list[BenchRecord] = []

    async def run_session(session: BenchSession, at_s: float, records: list[BenchRecord]) -> None:
        if (left := start + at_s - clock()) > 0:
            await sleep(left)
        talk = _Talk(session, chat=client.target.backend == "openai-chat")
        for turn in session.turns:
            if records and session.pause_s > 0:
                await sleep(session.pause_s)
            async with gate:
                records.append(record := BenchRecord())
                await client.send(talk.prompt(turn), turn.output_len, start, record)
            on_done(record)
            if record.error_kind is not None:
                break  # a later turn has no answer to follow
            talk.heard(record.text)

    async def run_background(load: BackgroundLoad) -> None:
        if load.start_s > 0:
            await sleep(load.start_s)
        while (turn := await load.draw()) is not None:
            beside.append(record := BenchRecord())
            await client.send(turn.prompt, turn.output_len, start, record)
            if record.error_kind is not None:
                await sleep(BACKGROUND_RETRY_S)

    runs = [run_session(*each) for each in zip(sessions, arrivals_s, found, strict=True)]
    others: list[Awaitable[None]] = []
    if background is not None:
        others += [run_background(background) for _ in range(background.concurrency)]
    if duration_s is not None:
        others.append(sleep(duration_s))
    await _until_all(runs, others)
    return LoadOutcome(
        records=[record for records in found for record in records], duration_s=clock() - start, background=beside
    )


async def _until_all(runs: Sequence[Awaitable[None]], others: Sequence[Awaitable[None]]) -> None:
    """Wait for the end of all `runs`, or of one of `others`; then cancel the rest. Raises what one of them raised."""
    tasks = [asyncio.ensure_future(run) for run in (*runs, *others)]
    whole: asyncio.Future[Any] = asyncio.gather(*tasks[: len(runs)])
    try:
        waited: list[asyncio.Future[Any]] = [whole, *tasks[len(runs) :]]
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(whole, *tasks, return_exceptions=True)


class _Talk:
    """The prompts of a session's turns, each with what was said before it."""

    def __init__(self, session: BenchSession, *, chat: bool) -> None:
        self._alone = len(session.turns) == 1 and session.system is None
        self._chat = chat
        self._messages = [] if session.system is None else [{"role": "system", "content": session.system}]

    def prompt(self, turn: BenchTurn) -> Prompt:
        """Return the prompt of the next turn: messages for chat, else the whole text so far."""
        if self._alone:
            return turn.prompt
        self._messages.append({"role": "user", "content": str(turn.prompt)})
        return list(self._messages) if self._chat else " ".join(self._texts())

    def heard(self, answer: str) -> None:
        """Take the answer to the last turn."""
        self._messages.append({"role": "assistant", "content": answer})

    def _texts(self) -> Iterator[str]:
        return (message["content"] for message in self._messages)
