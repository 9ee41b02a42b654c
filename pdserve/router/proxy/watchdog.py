"""Probes whether a token comes through each pair: idle pairs, and pairs whose requests wait too long.

    every interval   each worker in at least one pair, or all pairs if they are few; not pairs that served recently
    at once          a pair with a waiting request, once an interval; a pair whose last probe failed
    every 2 s        a pair that is down, or whose requests fail

A probe is `POST /health_pair` at both halves with the same bootstrap room. A busy half is no failure, unless the other
half is stalled: it has work and does not progress. After `FAILURES` failed probes in a row the pair gets no requests,
and its waiting requests are retried at other pairs. Workers without `/health_pair`, such as SGLang's, are not probed.
Pairs whose workers report different control tokens are down from the start (`compare_tokens`).
Created by `app`; not on the request path.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import orjson

from pdserve.base.env import SAME_TOKEN
from pdserve.base.proof import NO_TOKEN_ID
from pdserve.protocol.messages import MAX_ROOM
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.proxy.attempts import Drain
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import error_of, own_headers, read_at_most
from pdserve.router.workers.workers import Pair, Pairs, Registry, Worker

T = TypeVar("T")
log = logging.getLogger(__name__)

PATH = "/health_pair"
TICK_S = 0.5
WAITS_S = 2.0
"""A request without a first byte for this time makes its pair suspect."""
RECHECK_S = 2.0
"""Interval of probes of a pair that is down."""
FEW_PAIRS = 64
"""Up to this number, all pairs are probed in each interval."""
MAX_AT_ONCE = 64
"""Limit of concurrent probes: at least `FEW_PAIRS`, so that no pair waits for pairs that are down."""
SLACK_S = 0.5
"""Seconds that the router waits beyond a worker's own probe timeout."""
ASK_AGAIN_S = 60.0
"""Seconds after which a worker that cannot be probed is probed again."""
MAX_ANSWER_BYTES = 1 << 16
SHOWN_CHARS = 300
"""Characters of a worker's error that are shown."""
CANNOT = frozenset({401, 403, 404, 405, 501})
"""Statuses of workers without the path, or that refuse the router's key."""
NO_NEWS = frozenset({"engine_starting", "engine_dead", "engine_stuck", "server_shutting_down", "role_switching"})
"""Error codes that health checks handle; probes ignore them."""


STALLED = "stalled"
"""Error code of a worker that has work and does not progress."""


class ProbeResult(enum.Enum):
    """Result of one half of a probe."""

    OK = "ok"
    NO_NEWS = "no news"
    CANNOT = "cannot be probed"


@dataclasses.dataclass(frozen=True)
class ProbeFailure:
    """Failure of one half of a probe. `conclusive`: the pair fails also if the other half is busy."""

    text: str
    conclusive: bool = False


def probe_outcome(answers: Sequence[ProbeResult | ProbeFailure]) -> Literal["ok", "no_news", "failed"]:
    """Return the outcome of a probe whose halves gave `answers`, decode's last."""
    if answers[-1] is ProbeResult.OK:
        return "ok"
    failures = [answer for answer in answers if isinstance(answer, ProbeFailure)]
    if ProbeResult.CANNOT in answers or not failures:
        return "no_news"
    conclusive = any(failure.conclusive for failure in failures)
    return "failed" if conclusive or ProbeResult.NO_NEWS not in answers else "no_news"


class PairWatchdog:
    """The probes of one router. `on_change` is called whenever a pair goes down or serves again."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        pairs: Pairs,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        drain: Drain,
        rng: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._probes = config.probes
        self._registry = registry
        self._pairs = pairs
        self._session = session
        self._metrics = metrics
        self._drain = drain
        self._rng = rng
        self._on_change = on_change
        self._running: dict[Pair, asyncio.Task[None]] = {}
        self._cannot: dict[Worker, float] = {}
        self._round = 0
        self._round_began = self._next_round = 0.0
        self._turn_of: list[Pair] = []
        self._loop: asyncio.Task[None] | None = None
        registry.on_forgotten.append(self._forget)

    def start(self) -> None:
        """Start probing, unless probes are disabled."""
        if self._probes.enabled:
            self._loop = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel all probes."""
        tasks = [*self._running.values(), *([] if self._loop is None else [self._loop])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def recheck(self) -> None:
        """Probe the pairs that are down or have failed, because a command has changed workers.

        Returns when at most `MAX_AT_ONCE` are probed. A running probe may have seen the workers before the command, so
        another one follows it.
        """
        if not self._probes.enabled:
            return
        if running := [self._running[pair] for pair in self._failing() if pair in self._running]:
            await asyncio.wait(running)
        now = asyncio.get_running_loop().time()
        probes: list[asyncio.Task[None]] = []
        for pair in self._failing():
            if pair in self._running:
                probes.append(self._running[pair])
            elif len(self._running) < MAX_AT_ONCE and self._can(pair, now):
                probes.append(self._begin(pair, now))
        if probes:
            await asyncio.wait(probes)

    def _failing(self) -> list[Pair]:
        return [pair for pair, state in self._pairs if state.num_failed or state.down]

    async def _run(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            for pair in self.due(now)[: MAX_AT_ONCE - len(self._running)]:
                self._begin(pair, now)
            await asyncio.sleep(min(TICK_S, self._probes.interval_s / 2))

    def due(self, now: float) -> list[Pair]:
        """Return the pairs to probe now: suspects first, pairs that are down last."""
        found = dict.fromkeys([*self._suspects(now), *self._turn(now), *self._down(now)])
        return [pair for pair in found if pair not in self._running and self._can(pair, now)]

    def _suspects(self, now: float) -> Iterator[Pair]:
        """Yield pairs to probe at once."""
        for pair, state in self._pairs:
            failed_once = state.num_failed > 0 and not state.down
            if failed_once or (state.wanted and _age(state.probed_at, now) >= RECHECK_S):
                yield pair
        for one in self._drain.attempts:
            if one.waits and now - one.begun >= WAITS_S:
                state = self._pairs.state(one.pair)
                if min(_age(state.served_at, now), _age(state.probed_at, now)) >= self._probes.interval_s:
                    yield one.pair

    def _turn(self, now: float) -> Iterator[Pair]:
        """Yield the pairs of this interval that were not probed yet and have not served recently."""
        if now >= self._next_round:
            self._round_began, self._next_round = now, now + self._probes.interval_s
            self._round += 1
            self._turn_of = self._round_of_pairs()
        for pair in self._turn_of:
            state = self._pairs.state(pair)
            had_it = state.probed_at is not None and state.probed_at >= self._round_began
            if not had_it and _age(state.served_at, now) >= self._probes.interval_s / 2:
                yield pair

    def _down(self, now: float) -> Iterator[Pair]:
        """Yield pairs that are down, each every `RECHECK_S`."""
        for pair, state in self._pairs:
            if state.down and _age(state.probed_at, now) >= RECHECK_S:
                yield pair

    def _round_of_pairs(self) -> list[Pair]:
        """Return the pairs of this round: each worker in at least one pair, in changing combinations."""
        if WorkerRole.REGULAR in self._config.roles:
            return [Pair(None, worker) for worker in self._registry.usable(WorkerRole.REGULAR)]
        prefills, decodes = self._registry.usable(WorkerRole.PREFILL), self._registry.usable(WorkerRole.DECODE)
        return [Pair(*chosen) for chosen in rotation(prefills, decodes, self._round)]

    def _can(self, pair: Pair, now: float) -> bool:
        """Whether both workers accept requests and probes."""
        return all(
            worker.usable and not worker.forgotten and self._cannot.get(worker, now) <= now for worker in _workers(pair)
        )

    def _begin(self, pair: Pair, now: float) -> asyncio.Task[None]:
        state = self._pairs.state(pair)
        state.probed_at, state.wanted = now, False
        task = asyncio.create_task(self._probe(pair, now))
        self._running[pair] = task
        task.add_done_callback(lambda _: self._running.pop(pair, None))
        return task

    async def _probe(self, pair: Pair, begun: float) -> None:
        """Run one probe and update the state of the pair."""
        body: dict[str, Any] = {"timeout": self._probes.timeout_s}
        if pair.prefill is not None:
            body |= {
                "bootstrap_host": pair.prefill.spec.host,
                "bootstrap_port": pair.prefill.bootstrap_port,
                "bootstrap_room": self._rng.randrange(MAX_ROOM),
            }
        workers = _workers(pair)
        answers = await asyncio.gather(*(self._ask(worker, orjson.dumps(body)) for worker in workers))
        now = asyncio.get_running_loop().time()
        for worker, answer in zip(workers, answers, strict=True):
            if answer is ProbeResult.CANNOT:
                self._note_cannot(worker, now)
        outcome = probe_outcome(answers)
        if outcome == "failed" and not all(worker.usable for worker in workers):
            return
        self._metrics.probes.labels(outcome).inc()
        if outcome == "ok":
            self._came(pair, now)
        elif outcome == "failed":
            failures = [(w, a) for w, a in zip(workers, answers, strict=True) if isinstance(a, ProbeFailure)]
            error = "; ".join(f"{worker.spec.url}: {failure.text}" for worker, failure in failures)
            self._failed(pair, begun, error, now)

    def _came(self, pair: Pair, now: float) -> None:
        if self._pairs.served(pair, now):
            log.info("%s serves requests again", _named(pair))
            self._on_change()

    def _failed(self, pair: Pair, begun: float, error: str, now: float) -> None:
        if self._pairs.failed(pair, begun, error, now):
            log.warning("%s serves no requests: %s", _named(pair), error)
            self._on_change()
        if not self._pairs.serves(pair):
            for one in list(self._drain.attempts):
                if one.pair == pair and one.waits and one.begun <= begun:
                    one.lost(pair.decode, f"no token came through {_named(pair)}")

    async def _ask(self, worker: Worker, body: bytes) -> ProbeResult | ProbeFailure:
        """Probe one half; returns its result or its failure."""
        timeout = aiohttp.ClientTimeout(total=self._probes.timeout_s + SLACK_S)
        headers = own_headers(worker, self._config.access.key_for_workers) | {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                worker.spec.url + PATH, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                raw = await read_at_most(response, MAX_ANSWER_BYTES)
        except TimeoutError:
            return ProbeFailure(f"no answer within {self._probes.timeout_s + SLACK_S:g} s")
        except (aiohttp.ClientError, OSError):
            return ProbeResult.NO_NEWS  # health checks detect it, too
        if response.status in CANNOT:
            return ProbeResult.CANNOT
        if response.status != 200:
            code, message = error_of(raw)
            if code in NO_NEWS:
                return ProbeResult.NO_NEWS
            text = f"status {response.status}, {code}: {message[:SHOWN_CHARS]}"
            return ProbeFailure(text, conclusive=code == STALLED)
        return ProbeResult.OK if _status(raw) == "ok" else ProbeResult.NO_NEWS

    def compare_tokens(self, worker: Worker) -> None:
        """Take the pairs of `worker` down whose two workers report different control tokens, or bring them up again.

        Probes of these pairs go on: they make both servers log the cause, and the one that succeeds ends it. Without
        probes a difference is logged only.
        """
        role = worker.spec.role
        if role is WorkerRole.REGULAR or worker.token_id is None:
            return
        now = asyncio.get_running_loop().time()
        others = WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
        for other in self._registry.workers:
            if other.spec.role is not others or other.token_id is None:
                continue
            pair = Pair(worker, other) if role is WorkerRole.PREFILL else Pair(other, worker)
            if worker.token_id == other.token_id:
                if self._pairs.state(pair).other_tokens:
                    self._came(pair, now)
                continue
            error = token_error(pair)
            if not self._probes.enabled or self._pairs.differ(pair, error, now):
                log.warning("%s serves no requests: %s", _named(pair), error)

    def _forget(self, worker: Worker) -> None:
        self._cannot.pop(worker, None)

    def _note_cannot(self, worker: Worker, now: float) -> None:
        if worker not in self._cannot:
            log.info(
                "%s %s has no %s that accepts the router: it is not probed", worker.spec.role, worker.spec.url, PATH
            )
        if not worker.forgotten:
            self._cannot[worker] = now + ASK_AGAIN_S


def token_error(pair: Pair) -> str:
    """Return what differs between the control tokens that the workers of a pair report."""
    assert pair.prefill is not None
    without = [worker.spec.url for worker in _workers(pair) if worker.token_id == NO_TOKEN_ID]
    what = f"{without[0]} has no control token, and the other has one" if without else "their control tokens differ"
    return f"{what}; {SAME_TOKEN}"


def rotation(prefills: Sequence[T], decodes: Sequence[T], number: int) -> list[tuple[T, T]]:
    """Return the pairs of round `number`: all if they are few, else each worker in at least one, and all in turn."""
    if len(prefills) * len(decodes) <= FEW_PAIRS:
        return [(prefill, decode) for prefill in prefills for decode in decodes]
    fewer, more = sorted((prefills, decodes), key=len)
    chosen = [(fewer[(i + number) % len(fewer)], one) for i, one in enumerate(more)]
    return chosen if fewer is prefills else [(one, other) for other, one in chosen]


def _age(at: float | None, now: float) -> float:
    """Return the seconds since `at`; infinite for None."""
    return math.inf if at is None else now - at


def _workers(pair: Pair) -> list[Worker]:
    """Return the pair's workers, prefill first if the pair has one."""
    return [pair.decode] if pair.prefill is None else [pair.prefill, pair.decode]


def _named(pair: Pair) -> str:
    here = pair.decode.spec.url
    return here if pair.prefill is None else f"the pair of prefill {pair.prefill.spec.url} and decode {here}"


def _status(raw: bytes) -> str | None:
    with contextlib.suppress(orjson.JSONDecodeError):
        body = orjson.loads(raw)
        return body.get("status") if isinstance(body, dict) else None
    return None
