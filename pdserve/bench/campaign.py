"""The runs of a benchmark: each rate and concurrency, each round, one or two services in turn, and the search for the
highest rate within the limits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pdserve.base.hosts import without_credentials
from pdserve.bench.client import BenchClient, BenchRecord, Clock
from pdserve.bench.load import BackgroundLoad, BenchSession, BenchTurn, LoadOutcome, Sleep, arrival_times, run_load
from pdserve.bench.metrics import METRICS, PERCENTILES, Slo, detailed, summarize, summarize_background
from pdserve.errors import ConfigError

Json = dict[str, Any]
SEARCH_PRECISION = 0.1
"""The search ends when the best rate and the one that is too high differ by less than this share."""
MAX_SEARCH_RUNS = 12
READY_POLL_S = 1.0
NOT_READY = ("connection", "disconnected", "http_503")
"""Kinds of errors of a service that is starting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """A load: requests per second (inf: all at once), and requests in flight at most (None: no limit).

    `background`: clients that send the plan's background requests beside them; None: the plan has none.
    """

    rate: float = math.inf
    max_concurrency: int | None = None
    background: int | None = None

    def __str__(self) -> str:
        parts = ["all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"]
        parts += [] if self.max_concurrency is None else [f"{self.max_concurrency} in flight"]
        parts += [] if self.background is None else [f"{self.background} in the background"]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchService:
    """A service of the benchmark: its name in the results and its client."""

    label: str
    client: BenchClient


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to run.

    `sessions` makes the requests of a load for a seed, `background` those beside them, without an end; equal seeds must
    give equal requests. `duration_s`: seconds until a run ends. `warmup_s`: seconds at the start of a run that
    do not count, after which the background begins.
    """

    sessions: Callable[[int, LoadPoint], Sequence[BenchSession]]
    background: Callable[[int], Iterator[BenchTurn]] | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0
    points: Sequence[LoadPoint] = (LoadPoint(),)
    rounds: int = 1
    warmups: int = 1
    burstiness: float = 1.0
    seed: int = 0
    slo: Slo = dataclasses.field(default_factory=Slo)
    goodput_target: float = 0.9
    metrics: Sequence[str] = tuple(METRICS)
    percentiles: Sequence[float] = PERCENTILES
    save_detailed: bool = False
    facts: Json = dataclasses.field(default_factory=dict)


class BenchProgress:
    """Told what runs. This one shows nothing."""

    def begin(self, what: str, num_requests: int) -> None:
        """A run begins."""

    def done(self, record: BenchRecord) -> None:
        """A request has ended."""

    def end(self, result: Json | None) -> None:
        """The run has ended; None: it was a warm-up."""


class Campaign:
    """Runs a plan against one or two services, on one event loop."""

    def __init__(
        self,
        plan: BenchPlan,
        services: Sequence[BenchService],
        progress: BenchProgress | None = None,
        *,
        clock: Clock = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._plan, self._services = plan, services
        self._progress = progress or BenchProgress()
        self._clock, self._sleep = clock, sleep

    async def run(self) -> list[Json]:
        """Return the results of all runs, in the order in which they ran.

        In each round of a point the services get the same requests; their order changes from round to round. Each run
        of a service has requests of its own seed, so that its caches hold none of them.
        """
        await self.warm_up()
        return [
            await self._run_one(service, point, round_index, seed)
            for point, round_index, seed in self._steps()
            for service in (self._services[::-1] if round_index % 2 else self._services)
        ]

    def _steps(self) -> Iterator[tuple[LoadPoint, int, int]]:
        for point_index, point in enumerate(self._plan.points):
            for round_index in range(self._plan.rounds):
                yield point, round_index, self._plan.seed + point_index * self._plan.rounds + round_index

    async def warm_up(self) -> None:
        """Send each service its warm-up requests, one after the other, for at most the duration of a run.

        Raises ConfigError when one fails.
        """
        count = self._plan.warmups
        if count == 0:
            return
        sessions = list(self._plan.sessions(self._plan.seed - 1, self._plan.points[0]))
        chosen = (sessions[index % len(sessions)] for index in range(count))
        first = [dataclasses.replace(one, at_s=None, turns=one.turns[:1]) for one in chosen]
        for service in self._services:
            self._progress.begin(f"{service.label}: warm-up", count)
            outcome = await self._load(service, first, [0.0] * count, 1, duration_s=self._plan.duration_s)
            self._progress.end(None)
            failed = next((one for one in outcome.records if one.error_kind is not None), None)
            if failed is not None:
                text = f"{failed.error_kind}: {failed.error}"
                url = without_credentials(service.client.target.url)
                raise ConfigError(f"{url}: the warm-up failed: {text}", field="base_url")

    async def search(self, service: BenchService, first_rate: float, load: LoadPoint) -> tuple[Json, list[Json]]:
        """Search the highest rate at which the target's share of requests is within the limits.

        Doubles or halves the rate until one is within and one is not, then halves the interval between them; at most
        `MAX_SEARCH_RUNS` runs. Ends at a run beyond the limits whose requests were never two at a time: a lower rate is
        no better. `load` has what is the same at all rates.

        Returns:
            The best rate (None: none was within) with its share, and the results of all runs.
        """
        low, high = 0.0, math.inf
        best: Json | None = None
        results: list[Json] = []
        rate = first_rate
        while len(results) < MAX_SEARCH_RUNS:
            point = dataclasses.replace(load, rate=rate)
            found = await self._run_one(service, point, 0, self._plan.seed + 1000 + len(results))
            results.append(found)
            if found["goodput_share"] >= self._plan.goodput_target:
                low, best = rate, found
            else:
                high = rate
            both = low > 0 and math.isfinite(high)
            alone = found["max_concurrent_requests"] <= 1 and not low
            if (both and high - low <= SEARCH_PRECISION * high) or alone:
                break
            rate = (low + high) / 2 if both else rate * (2 if low else 0.5)
        return {
            "label": service.label,
            "goodput_target": self._plan.goodput_target,
            "goodput_slo_ms": dict(self._plan.slo.limits_ms),
            "max_rate_within_slo": None if best is None else best["request_rate"],
            "goodput_share": None if best is None else best["goodput_share"],
            "lowest_rate_beyond_slo": high if math.isfinite(high) else None,
            "num_runs": len(results),
        }, results

    async def _run_one(self, service: BenchService, point: LoadPoint, round_index: int, seed: int) -> Json:
        plan = self._plan
        sessions = plan.sessions(seed, point)
        drawn = arrival_times(len(sessions), point.rate, plan.burstiness, seed)
        arrivals = [at if one.at_s is None else one.at_s for one, at in zip(sessions, drawn, strict=True)]
        timed = any(one.at_s is not None for one in sessions)
        what = "times of the file" if timed else str(point)
        self._progress.begin(f"{service.label}: {what}", sum(len(session.turns) for session in sessions))
        background = None
        if plan.background is not None and point.background:
            turns = plan.background(seed)
            background = BackgroundLoad(turns=turns, concurrency=point.background, start_s=plan.warmup_s)
        outcome = await self._load(
            service, sessions, arrivals, point.max_concurrency, duration_s=plan.duration_s, background=background
        )
        whole_s = max(outcome.duration_s, 1e-9)
        found: Json = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": service.client.target.backend,
            "endpoint": without_credentials(service.client.target.url),
            "label": service.label,
            "model_id": service.client.target.model,
            **plan.facts,
            "num_prompts": len(outcome.records),
            "request_rate": "trace" if timed else "inf" if math.isinf(point.rate) else point.rate,
            "burstiness": plan.burstiness,
            "max_concurrency": point.max_concurrency,
            "background_concurrency": point.background,
            "round": round_index,
            "seed": seed,
        }
        found |= summarize(
            outcome.records,
            whole_s,
            since_s=plan.warmup_s,
            slo=plan.slo,
            metrics=plan.metrics,
            percentiles=plan.percentiles,
        )
        if background is not None:
            found |= summarize_background(outcome.background, whole_s, plan.warmup_s)
        if plan.save_detailed:
            found |= detailed(outcome.records)
        self._progress.end(found)
        if any(one.unfinished for one in (*outcome.records, *outcome.background)):
            await service.client.send("Hello", 1)  # what was cut ends before the next run begins
        return found

    async def _load(
        self,
        service: BenchService,
        sessions: Sequence[BenchSession],
        arrivals: Sequence[float],
        limit: int | None,
        *,
        duration_s: float | None = None,
        background: BackgroundLoad | None = None,
    ) -> LoadOutcome:
        return await run_load(
            service.client,
            sessions,
            arrivals_s=arrivals,
            max_concurrency=limit,
            duration_s=duration_s,
            background=background,
            on_done=self._progress.done,
            clock=self._clock,
            sleep=self._sleep,
        )


async def wait_serving(client: BenchClient, timeout_s: float, sleep: Sleep = asyncio.sleep) -> None:
    """Wait until a request of one token is served: a service may list its model while it is still starting.

    Returns at any other error than a refused connection and 503, which the warm-up tells; and after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        record = await client.send("Hello", 1)
        if record.error_kind not in NOT_READY or time.monotonic() >= deadline:
            return
        await sleep(READY_POLL_S)


async def wait_ready(client: BenchClient, timeout_s: float) -> str:
    """Return the service's first model, as soon as it answers. Raises ConfigError after `timeout_s` without one."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await client.first_model()
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(READY_POLL_S)
