"""One rank of several: its executor, page digests and aux slots, which return what a single rank would return.

Created by `engine` in each rank's process. Every rank's scheduler makes the same plans in the same order, and in each
step all ranks exchange tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from pdserve.base.parallel import RankCoord
from pdserve.executor.interface import BatchPlan, CopyHandle, Executor, HostPages, StepHandle, StepResult
from pdserve.executor.kv_pages import KVHasher
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.input_log import InputLog, RankGroup, guarded
from pdserve.ranks.rank_copies import RankCopyEnds
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from pdserve.transfer.checksum import RankDigest


@dataclasses.dataclass(frozen=True, eq=False)
class _AllRanksPages:
    """Implements `HostPages` for one rank's part. `num_bytes` counts all ranks, so that schedulers decide alike."""

    own: HostPages
    num_bytes: int

    def export(self) -> None:
        """See `HostPages.export`: no rank has all bytes."""
        return


@dataclasses.dataclass(eq=False)
class _Step:
    """A step under way. `result` is None until the step is computed here."""

    handle: StepHandle
    own: StepHandle
    result: StepResult | None = None


class RankExecutor:
    """Implements `Executor` over `local`, the executor of this rank, which is at `coord`. `layout` is the whole
    model's.

    `compute_at_launch`: compute a step at its launch, so that other ranks need not wait for `resolve`. For followers
    that compute on the calling thread.

    A step is resolved when every rank has computed it. Without pipeline stages the end of the local part proves that:
    each layer ends with an exchange between all ranks, after their writes. With stages the last stage reports it.
    """

    def __init__(
        self,
        local: Executor,
        table: PageTable,
        layout: KVLayout,
        coord: RankCoord,
        rank_group: RankGroup,
        log: InputLog,
        *,
        compute_at_launch: bool = False,
        adapter_of: Callable[[int], int] | None = None,
    ) -> None:
        """`adapter_of`: a number for the LoRA adapter of a table row, which all ranks must have alike; None: no row has
        adapters.
        """
        self.copy_ends: RankCopyEnds | None = None
        """Where the ranks agree on the ends of copies to and from the host tier; None: there is no tier."""
        self._local = local
        self._adapter_of = adapter_of
        self._table = table
        self._layout = layout
        self._rank_group = rank_group
        self._log = log
        self._computes_at_launch = compute_at_launch
        self._under_way: deque[_Step] = deque()
        self._offloads = itertools.count()
        coords = [coord.shape.coord(rank) for rank in range(coord.shape.num_ranks)]
        self._rank_layouts = [layout.of_rank(each) for each in coords]
        self._num_seen = [0] * table.num_rows
        """Number of pages of each row that a fingerprint has covered."""
        self.close_row, self.draft_hidden = local.close_row, local.draft_hidden

    @property
    def layout(self) -> KVLayout:
        """Layout of the whole model's pages."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor.buffers`; the buffers of this rank."""
        return self._local.buffers

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
        draft_hidden: bytes = b"",
        hidden: HiddenParams | None = None,
        input_embeds: bytes = b"",
    ) -> None:
        """See `Executor.open_row`: all ranks open the same rows."""
        self._num_seen[row] = 0
        self._local.open_row(row, token_ids, num_prompt_tokens, sampling, logprobs, draft_hidden, hidden, input_embeds)

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor.launch`.

        Raises:
            RankError: a rank is lost, or its scheduler has made another plan.
        """
        self._log.launched(plan.step, self._fingerprint(plan))
        own = guarded(lambda: self._local.launch(plan, layer_events=layer_events), self._rank_group.root_cause)
        step = _Step(StepHandle(plan, own.layer_events, own.finish), own)
        ahead = any(other.result is None for other in self._under_way)
        self._under_way.append(step)
        if self._computes_at_launch and own.layer_events is None and not ahead:
            self._compute(step)
        return step.handle

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: a rank is lost.
        """
        step = self._under_way.popleft()
        assert step.handle is handle, "steps are resolved once, in the order of their launch"
        return self._log.step_ended(step.result or self._compute(step))

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor.offload`. When rank 0's call returns, every rank has its copy."""
        saved = self._local.offload(pages)
        self._rank_group.offloaded(next(self._offloads))
        return _AllRanksPages(saved, sum(own.bytes_by_group(pages) for own in self._rank_layouts))

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor.restore`."""
        assert isinstance(saved, _AllRanksPages), "the pages were saved by another executor"
        self._local.restore(saved.own, pages)

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_save`. The handle is done in the turn in which all ranks agree on the end."""
        assert self.copy_ends is not None, "there is no host tier"
        return self.copy_ends.watch(self._local.start_save(copies))

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_load`; as `start_save`."""
        assert self.copy_ends is not None, "there is no host tier"
        return self.copy_ends.watch(self._local.start_load(copies))

    def poll_copies(self) -> None:
        """See `Executor.poll_copies`."""
        if self.copy_ends is not None:
            self.copy_ends.poll()

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor.copy_now`. When rank 0's call returns, every rank has copied."""
        self._local.copy_now(copies, to_host=to_host)
        self._rank_group.offloaded(next(self._offloads))

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor.zero`: zeroes this rank's part; every rank does the same."""
        self._local.zero(pages)

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor.has_stamp`."""
        return self._log.answer(lambda: self._local.has_stamp(slot, stamp))

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """See `Executor.seal`: completes this rank's slot; every rank does the same."""
        self._local.seal(slot, stamp)

    def _compute(self, step: _Step) -> StepResult:
        """Wait for the local part of a step, and report it."""
        step.result = guarded(lambda: self._local.resolve(step.own), self._rank_group.root_cause)
        self._rank_group.computed(step.handle.plan.step)
        return step.result

    def _fingerprint(self, plan: BatchPlan) -> int:
        """Return a hash of the plan and its new pages; differs between ranks with different plans, LoRA adapters of
        rows, or page tables so far.
        """
        seen: list[int] = [plan.step, -1 if plan.num_proposals is None else plan.num_proposals]
        if self._adapter_of is not None:
            seen += [self._adapter_of(row.row) for row in plan.rows]
        for row in plan.rows:
            seen += (row.row, row.start, row.end, row.sample, row.state_from, row.state_to, *row.drafts)
            before, count = self._num_seen[row.row], self._layout.pages_for(row.end)
            if count > before:
                seen += self._table.pages[row.row, before:count].tolist()
                seen += self._table.window[row.row, before:count].tolist()
                seen.append(int(self._table.slots[row.row]))
                self._num_seen[row.row] = count
        return hash(tuple(seen))


class SharedMetadata(MetadataBuffers):
    """Aux slots of one rank; reads return the content of rank 0's slots."""

    def __init__(
        self, num_slots: int, log: InputLog, *, shareable: bool = True, draft_hidden_bytes: int | None = None
    ) -> None:
        super().__init__(num_slots, shareable=shareable, draft_hidden_bytes=draft_hidden_bytes)
        self._log = log

    def read(self, slot: int) -> AuxRecord:
        """Return the content of rank 0's slot."""
        self.put_in(slot, self._log.answer(lambda: self.take_out(slot)))
        return super().read(slot)


class GroupHasher:
    """Implements `KVHasher` over `own`, this rank's hasher: returns the digests of all ranks, in rank order."""

    def __init__(self, own: KVHasher, rank_group: RankGroup, log: InputLog) -> None:
        self._own = own
        self._rank_group = rank_group
        self._log = log
        self._numbers = itertools.count()

    def digest(self, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`. Raises RankError when a rank is lost."""
        (own,) = self._own.digest(pages, firsts, num_tokens)
        found = self._rank_group.digested(next(self._numbers), own)
        return self._log.answer(lambda: found)
