"""The leader's executor and copy engine: what the scheduler asks of them is done here and on every follower.

Made by the composition root of the leader's process. Every order leaves before the leader obeys it itself, because
that may be an exchange of tensors with the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from pdserve.base.parallel import Place
from pdserve.executor.interface import BatchPlan, Executor, HostPages, LayerMarks, StepHandle, StepResult
from pdserve.executor.row_params import Seeds
from pdserve.memory.layout import KVLayout
from pdserve.memory.page_table import PageTable
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import SamplingParams
from pdserve.ranks.followers import Followers
from pdserve.ranks.orders import CloseRow, DropHost, Launch, Offload, OpenRow, PlannedRow, Restore, pack
from pdserve.ranks.pages import PageNews
from pdserve.ranks.rebalance import Rebalancer

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class GroupPages:
    """Implements `HostPages`: what the leader has saved, and `saved`, the name that followers know theirs by."""

    saved: int
    local: HostPages
    num_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class _OwnMarks:
    """Implements `LayerMarks` in numbers of the whole model: the leader has the first stage's layers."""

    local: LayerMarks
    num_own: int

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """See `LayerMarks.wait`; layers of later stages are no concern of ours."""
        return self.local.wait(min(num_layers, self.num_own), timeout_s)


class GroupExecutor:
    """Implements `Executor` over `local`, the leader's own, and all followers. `layout` is the whole model's. A
    `rebalancer` moves experts between steps.

    A step is resolved when every rank has computed it. Without stages the end of our own part says so: each layer ends
    with an exchange between all ranks, behind what they write. With stages the last one says so itself.
    """

    def __init__(
        self,
        local: Executor,
        table: PageTable,
        layout: KVLayout,
        followers: Followers,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        self._local = local
        self._layout = layout
        self._followers = followers
        self._rebalancer = rebalancer
        self._news = PageNews(table, layout.page_tokens)
        self._seeds = Seeds()
        self._launched: deque[tuple[StepHandle, StepHandle]] = deque()
        self._ids = itertools.count()
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        shape = followers.shape
        places = [shape.place(rank) for rank in range(shape.num_ranks)]
        self._staged = shape.pp_size > 1
        self._num_own = len(layout.groups[0].layers_of(places[0]))
        self._page_bytes = sum(_page_bytes(layout, place) for place in places)
        self.last_resolved: int | None = None
        """The newest step that every rank has computed."""
        followers.on_beat(self._let_go)

    @property
    def layout(self) -> KVLayout:
        """Geometry of the whole model's pages."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor.buffers`; the leader's."""
        return self._local.buffers

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        logprobs: Logprobs | None,
    ) -> None:
        """See `Executor.open_row`."""
        sampling = self._seeds.fix(sampling)
        self._news.begin(row)
        self._followers.order(
            OpenRow(
                row=row,
                token_ids=pack(token_ids),
                num_prompt_tokens=num_prompt_tokens,
                sampling=sampling,
                logprobs=logprobs,
            )
        )
        self._local.open_row(row, token_ids, num_prompt_tokens, sampling, logprobs)

    def close_row(self, row: int) -> None:
        """See `Executor.close_row`."""
        self._followers.order(CloseRow(row))
        self._local.close_row(row)

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """See `Executor.launch`. The marks count layers of the whole model, and open for the leader's part of them."""
        if self._rebalancer is not None:
            self._guarded(self._rebalancer.before_step)
        rows = tuple(
            PlannedRow(row.row, row.start, row.end, row.sample, self._news.take(row.row, row.end)) for row in plan.rows
        )
        self._followers.order(Launch(step=plan.step, rows=rows, layer_marks=layer_marks))
        inner = self._guarded(lambda: self._local.launch(plan, layer_marks=layer_marks))
        marks = None if inner.marks is None else _OwnMarks(inner.marks, self._num_own)
        handle = StepHandle(plan, marks, inner.finish)
        self._launched.append((handle, inner))
        return handle

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: a rank is lost.
        """
        outer, inner = self._launched.popleft()
        assert outer is handle, "steps are resolved once, in the order of their launch"
        result = self._guarded(lambda: self._local.resolve(inner))
        if self._staged:
            self._followers.wait_step(handle.plan.step)
        self.last_resolved = handle.plan.step
        return result

    def offload(self, pages: Sequence[int]) -> HostPages:
        """See `Executor.offload`. Every rank has its copy when it returns."""
        saved = next(self._ids)
        self._followers.order(Offload(saved, pack(pages)))
        local = self._local.offload(pages)
        self._followers.wait_offloaded(saved)
        found = GroupPages(saved, local, len(pages) * self._page_bytes)
        weakref.finalize(found, self._dropped.put, saved).atexit = False
        return found

    def restore(self, saved: HostPages, pages: Sequence[int]) -> None:
        """See `Executor.restore`."""
        assert isinstance(saved, GroupPages), "pages that another executor saved"
        self._followers.order(Restore(saved.saved, pack(pages)))
        self._local.restore(saved.local, pages)

    def _let_go(self) -> None:
        """Followers drop what we have dropped. Link thread: finalizers run anywhere, and must not send."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._followers.order(DropHost(self._dropped.get_nowait()))

    def _guarded(self, compute: Callable[[], T]) -> T:
        """Where it fails because another rank is lost, that is the error."""
        try:
            return compute()
        except Exception as error:
            lost = self._followers.blame()
            if lost is not None:
                raise lost from error
            raise


def _page_bytes(layout: KVLayout, place: Place) -> int:
    """Bytes of one page on one rank, over all groups."""
    return sum(group.page_bytes for group in layout.of_rank(place).groups)
