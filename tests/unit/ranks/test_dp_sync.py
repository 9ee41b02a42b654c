"""Ranks 0 in DP sync: one with work announces a round to the others, no wait is endless, and a loss ends all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from torch.distributed import HashStore

from pdserve.base.mailbox import Mailbox, Woken
from pdserve.errors import ConfigError, ModelError, PdserveError, RankError
from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.interface import BatchPlan, BatchRow, StepHandle, StepResult
from pdserve.ranks.dp_sync import DpSync, WeightsReport, meet_leaders
from pdserve.ranks.pre_step import IdleBatches, PreStepExecutor, RoundRebalancer
from tests.unit.ranks.kit import HOST, MEET_S, TIMES, TOKEN, Losses
from tests.waiting import wait_until

ROUND_S = 20.0
WORK = (BatchRow("r", 0, 0, 1, True),)


@contextmanager
def leaders(count: int, losses: Sequence[Losses] | None = None) -> Iterator[list[DpSync]]:
    """The leaders of `count` replicas, over real sockets in one process."""
    store = HashStore()
    on_lost = losses or [Losses() for _ in range(count)]

    def meet(number: int) -> DpSync:
        return meet_leaders(
            count, number, store, TOKEN, host=HOST, on_lost=on_lost[number], times=TIMES, timeout_s=MEET_S
        )

    with ThreadPoolExecutor(count) as pool:
        met = list(pool.map(meet, range(count)))
    try:
        yield met
    finally:
        for dp_sync in met:
            dp_sync.close()


class Collective:
    """Stands for an executor whose steps are exchanges with all other replicas: one ends when all have begun it.

    `tokens` are what each step was asked to compute; it counts as computed when it is resolved.
    """

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self.tokens: list[int] = []

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        assert plan.step == len(self.tokens) + 1
        self.tokens.append(len(plan.rows))
        return StepHandle(plan, None, lambda: StepResult(plan.step, ()))

    def resolve(self, handle: StepHandle) -> StepResult:
        self._barrier.wait(ROUND_S)
        return handle.finish()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Rows and pages: not of interest here."""
        return lambda *_, **__: None


class Replica:
    """The scheduler's loop without a scheduler: `work` steps with something to compute, posted one by one.

    A text is the query id of a swap: from then on no work is started, until "go on" is posted.
    """

    def __init__(self, dp_sync: DpSync, barrier: threading.Barrier, *, overlap: bool) -> None:
        self.mailbox: Mailbox[Woken | int | str | None] = Mailbox()
        dp_sync.wake = lambda: self.mailbox.post(Woken())
        self.inner = Collective(barrier)
        self._idle = IdleBatches(dp_sync)
        self._executor = PreStepExecutor(self.inner, dp_sync.enter, dp_sync.root_cause)  # type: ignore[arg-type]
        self._overlap, self._dp_sync = overlap, dp_sync
        self._swap = ""
        self.swaps: list[int] = []
        """The last round before each swap."""
        self.num_turns = 0
        self.todo = 0

    def run(self) -> None:
        step, under_way, stopping = 0, None, False
        while not stopping:
            for event in self.mailbox.drain():
                stopping = stopping or event is None
                self.todo += event if isinstance(event, int) else 0
                self._swap = event if isinstance(event, str) else self._swap
            self.num_turns += 1
            if self._swap not in ("", "go on", "swapped") and under_way is None and self._dp_sync.may_swap(self._swap):
                self.swaps.append(step)
                self._swap = "swapped"
            works = self.todo and self._swap in ("", "go on")
            plan = BatchPlan(step + 1, WORK) if works else self._idle.plan(step + 1)
            before, under_way = under_way, None
            if plan is not None:
                step += 1
                self.todo -= min(self.todo, len(plan.rows))
                under_way = self._executor.launch(plan)
            for handle in (before, None if self._overlap else under_way):
                if handle is not None:
                    self._executor.resolve(handle)
            under_way = under_way if self._overlap else None
            if plan is None and before is None and not stopping:
                self.mailbox.wait(ROUND_S)
        if under_way is not None:
            self._executor.resolve(under_way)
        self._idle.run_idle_until_all_stop(step, self._executor, self.mailbox)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_all_replicas_do_the_same_rounds_whoever_has_work(count: int, overlap: bool) -> None:
    chance = random.Random(count)
    with leaders(count) as met, ThreadPoolExecutor(count) as pool:
        barrier = threading.Barrier(count)
        replicas = [Replica(dp_sync, barrier, overlap=overlap) for dp_sync in met]
        ends = [pool.submit(replica.run) for replica in replicas]
        work = [0] * count
        for _ in range(60):
            number, amount = chance.randrange(count), chance.randrange(1, 6)
            work[number] += amount
            replicas[number].mailbox.post(amount)
        wait_until(lambda: [sum(replica.inner.tokens) for replica in replicas] == work, "all work done")
        for replica in chance.sample(replicas, count):
            replica.mailbox.post(None)
        for end in ends:
            end.result(timeout=60.0)
        done = [replica.inner.tokens for replica in replicas]
        assert [sum(tokens) for tokens in done] == work
        assert len({len(tokens) for tokens in done}) == 1
        assert all(any(tokens[step] for tokens in done) for step in range(len(done[0]))), "a round for nobody"


@pytest.mark.parametrize("overlap", [False, True])
def test_all_replicas_swap_behind_the_same_round(overlap: bool) -> None:
    """Those without work are still in rounds of the others when they are told."""
    chance = random.Random(7)
    with leaders(3) as met, ThreadPoolExecutor(3) as pool:
        barrier = threading.Barrier(3)
        replicas = [Replica(dp_sync, barrier, overlap=overlap) for dp_sync in met]
        ends = [pool.submit(replica.run) for replica in replicas]
        for number in range(8):
            for replica in chance.sample(replicas, 3):
                replica.mailbox.post(chance.randrange(4))
                replica.mailbox.post(f"swap {number}")
            wait_until(lambda: all(len(replica.swaps) == number + 1 for replica in replicas), "all have swapped")  # noqa: B023
            for replica in replicas:
                replica.mailbox.post("go on")
        for replica in replicas:
            replica.mailbox.post(None)
        for end in ends:
            end.result(timeout=60.0)
        assert replicas[0].swaps == replicas[1].swaps == replicas[2].swaps and replicas[0].swaps[-1] > 0


def test_a_swap_waits_for_all_replicas_and_for_rounds_that_have_begun() -> None:
    with leaders(3) as met:
        first, second, third = met
        first.enter(1)
        assert not first.may_swap("a") and not second.may_swap("b")
        third.may_swap("a")
        second.may_swap("a")
        wait_until(lambda: first.may_swap("a"), "all are there")
        wait_until(lambda: second.is_behind and third.is_behind, "the round is known")
        assert not second.may_swap("a") and not third.may_swap("a")
        for one in (second, third):
            one.enter(1)
        wait_until(lambda: second.may_swap("a") and third.may_swap("a"), "they have caught up")
        assert not first.may_swap("c")


def test_reports_of_other_weights_reach_all() -> None:
    with leaders(3) as met:
        for number, one in enumerate(met):
            one.report_weights(WeightsReport("a", "no memory" * (number == 1), ({"w": {number: 1.5}},)))
        wait_until(lambda: all(one.weights_reports("a") for one in met), "all have reported")
        reports = met[0].weights_reports("a")
        assert reports is not None and [one.failure for one in reports] == ["no memory", ""]
        assert met[0].weights_reports("b") is None


def test_replicas_without_work_are_called_once_a_round_and_sleep_between() -> None:
    with leaders(2) as met, ThreadPoolExecutor(2) as pool:
        barrier = threading.Barrier(2)
        busy, idle = (Replica(dp_sync, barrier, overlap=False) for dp_sync in met)
        ends = [pool.submit(replica.run) for replica in (busy, idle)]
        busy.mailbox.post(5)
        wait_until(lambda: len(idle.inner.tokens) == 5, "the other one followed")
        assert idle.inner.tokens == [0] * 5 and busy.inner.tokens == [1] * 5
        for replica in (busy, idle):
            replica.mailbox.post(None)
        for end in ends:
            end.result(timeout=60.0)
        assert idle.num_turns <= 3 * 5 + 10, "it turns without being called"


def test_samples_of_all_replicas_reach_all() -> None:
    with leaders(3) as met, ThreadPoolExecutor(3) as pool:
        every = list(pool.map(lambda one, rank: one.share_samples([{"w": {rank: 1.5}}]), met, range(3)))
    assert [sorted(next(iter(rank["w"])) for rank in others) for others in every] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize("error", [ConfigError("no such page", field="page_size"), ModelError("no weights")])
def test_a_replica_that_cannot_start_ends_those_that_wait_for_it(error: PdserveError) -> None:
    losses = [Losses(), Losses()]
    with leaders(2, losses) as met, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(met[0].share_samples, [])
        met[1].close(error)
        said = losses[0].wait()
        assert type(said) is type(error) and "replica 1" in str(said) and str(error) in str(said)
        with pytest.raises(type(error)):
            waiting.result(timeout=20.0)


def test_a_replica_that_ends_without_a_word_is_named() -> None:
    losses = [Losses(), Losses()]
    with leaders(2, losses) as met, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.share_samples([]), met))  # a connection that was never there is not closed
        met[1].close()
        assert isinstance(met[0].root_cause(), RankError)
        assert "replica 1" in str(losses[0].wait()) and "is gone" in str(losses[0].wait())


def test_another_token_or_flag_is_refused_by_name() -> None:
    store = HashStore()

    def meet(number: int, token: str, size: str) -> PdserveError:
        with pytest.raises(PdserveError) as caught:
            meet_leaders(
                2, number, store, token, host=HOST, facts={"ep_size": size}, on_lost=Losses(), timeout_s=MEET_S
            )
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        tokens = [pool.submit(meet, number, f"token {number}", "1") for number in range(2)]
        assert all("PDSERVE_CONTROL_TOKEN" in str(one.result(timeout=30.0)) for one in tokens)
        store = HashStore()
        sizes = [pool.submit(meet, number, TOKEN, str(number)) for number in range(2)]
        errors = [one.result(timeout=30.0) for one in sizes]
    assert all(isinstance(one, ConfigError) and one.field == "ep_size" for one in errors), errors


class Experts:
    """Stands for `ExpertBalance`: notes what it is told, and in which round."""

    def __init__(self) -> None:
        self.is_planning = False
        self.told: list[tuple[int, str]] = []
        self.round = 0

    def plan(self) -> None:
        assert not self.is_planning
        self.is_planning = True
        self.told.append((self.round, "plan"))

    def place(self) -> None:
        assert self.is_planning
        self.is_planning = False
        self.told.append((self.round, "place"))


@pytest.mark.parametrize(
    ("interval", "told"),
    [(6, [(6, "plan"), (9, "place"), (12, "plan")]), (1, [(1, "plan"), (2, "place"), (2, "plan"), (3, "place")])],
)
def test_experts_move_by_the_number_of_the_round_alone(interval: int, told: list[tuple[int, str]]) -> None:
    experts = Experts()
    rebalancer = RoundRebalancer(_as_balance(experts), interval)
    for experts.round in range(14 if interval > 1 else 4):
        rebalancer.before_step(experts.round + 1)
    assert experts.told[: len(told)] == told


def _as_balance(experts: Experts) -> ExpertBalance:
    return experts  # type: ignore[return-value]
