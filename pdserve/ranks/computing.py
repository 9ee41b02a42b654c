"""The computing half of a follower: obeys the leader's orders to its executor, one after the other, on one thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable

from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.interface import Executor, HostPages, StepHandle
from pdserve.executor.kv_hasher import KVHasher
from pdserve.memory.page_table import PageTable
from pdserve.ranks.orders import (
    CloseRow,
    Computing,
    Digest,
    Digested,
    DropHost,
    Launch,
    Offload,
    Offloaded,
    OpenRow,
    Rebalance,
    Report,
    Restore,
    StepDone,
    Stop,
    plan_of,
    unpack,
)
from pdserve.ranks.pages import PageCopybook
from pdserve.ranks.steps import StepLog


@dataclasses.dataclass(frozen=True)
class StepFailed:
    """What went wrong in a step that nobody waited for."""

    error: BaseException


Orders = queue.SimpleQueue[Computing | Stop | StepFailed]


class Computer:
    """Drives `executor`, whose page table is `table`. What it computes is known to `steps`.

    With `overlap`, where `launch` returns before the step is computed, a thread "steps" waits for each step's end, so
    that the next one is launched meanwhile. With `reports_steps` the leader hears of these ends. `experts` are the
    executor's that may be moved, None when it has none.
    """

    def __init__(
        self,
        executor: Executor,
        table: PageTable,
        steps: StepLog,
        report: Callable[[Report], None],
        *,
        overlap: bool = False,
        reports_steps: bool = False,
        experts: ExpertBalance | None = None,
        hasher: KVHasher | None = None,
    ) -> None:
        self._executor = executor
        self._pages = PageCopybook(table)
        self._steps = steps
        self._report = report
        self._overlap = overlap
        self._reports_steps = reports_steps
        self._experts = experts
        self._hasher = hasher
        self._launched: queue.Queue[StepHandle | None] = queue.Queue()
        self._saved: dict[int, HostPages] = {}

    @property
    def num_saved(self) -> int:
        """How many times pages were saved and not dropped yet."""
        return len(self._saved)

    def run(self, orders: Orders) -> None:
        """Obey until `Stop`. Raises what the executor raises."""
        if self._overlap:
            threading.Thread(target=self._follow_steps, args=(orders,), name="steps", daemon=True).start()
        while True:
            match orders.get():
                case Stop():
                    self._launched.put(None)
                    if self._overlap:
                        self._launched.join()
                    return
                case StepFailed(error=error):
                    raise error
                case order:
                    self.obey(order)

    def obey(self, order: Computing) -> None:
        """One order."""
        match order:
            case Launch():
                self._launch(order)
            case OpenRow(row=row):
                self._pages.begin(row)
                tokens = unpack(order.token_ids)
                self._executor.open_row(row, tokens, order.num_prompt_tokens, order.sampling, order.logprobs)
            case CloseRow(row=row):
                self._executor.close_row(row)
            case Offload(saved=saved, pages=pages):
                self._launched.join()
                self._saved[saved] = self._executor.offload(unpack(pages))
                self._report(Offloaded(saved))
            case Restore(saved=saved, pages=pages):
                self._launched.join()
                self._executor.restore(self._saved[saved], unpack(pages))
            case DropHost(saved=saved):
                del self._saved[saved]
            case Digest(number=number, pages=pages, first=first, num_tokens=num_tokens):
                assert self._hasher is not None, "a follower that has nothing to hash"
                self._launched.join()
                (digest,) = self._hasher.digest(unpack(pages), first, num_tokens)
                self._report(Digested(number, digest))
            case Rebalance(do=do):
                if self._experts is not None:
                    (self._experts.plan if do == "plan" else self._experts.place)()

    def _launch(self, order: Launch) -> None:
        for row in order.rows:
            self._pages.write(row.row, row.pages)
        handle = self._executor.launch(plan_of(order), layer_marks=order.layer_marks)
        self._steps.begun(order.step, handle.marks)
        if self._overlap:
            self._launched.put(handle)
        else:
            self._resolve(handle)

    def _follow_steps(self, orders: Orders) -> None:
        """Thread "steps"."""
        going_on = True
        while going_on:
            handle = self._launched.get()
            try:
                if handle is None:
                    going_on = False
                else:
                    self._resolve(handle)
            except BaseException as error:
                orders.put(StepFailed(error))
            finally:
                self._launched.task_done()

    def _resolve(self, handle: StepHandle) -> None:
        self._executor.resolve(handle)
        self._steps.done(handle.plan.step)
        if self._reports_steps:
            self._report(StepDone(handle.plan.step))
