"""`Drafter`: runs a draft model beside the target's steps, and proposes tokens for the next step of each row.

`LocalExecutor` calls it in every step, on the thread that computes. In a step that computes positions [start, known) of
a row and samples the token at `known`, the target's hidden states h of these positions are new:

    slot    start    start + 1   ...   known - 1    known        known + 1    ...
    token   known    known             known        sampled      draft 1
    hidden  kept     h(start)          h(known - 2) h(known - 1) draft model's
            `------- one pass of the draft model ---------'      `- a pass for each further draft -'

The pass over the new slots also drafts the first token, and each further pass drafts one more. Without drafts the new
slots are filled all the same. The last h is kept by table row for the row's next step. Slots from `known` on are
computed again by later steps: their content only serves this step's drafts. Where they lie behind the row's pages, they
are in pages of the drafter's own (scratch pages).

A row without a kept hidden state (the first tokens of a prompt, or the tokens behind a prefix hit) takes zeros at the
start of a page. Within a page it leaves the slot as it is: the step that sampled that token has filled it. A wrong slot
costs acceptance of drafts, and never changes a token. Between servers with equal drafters a transfer carries the kept
hidden state (`kept`, `resume`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.executor.input_batch import HostBatch, build_batch
from pdserve.memory.layout import GroupKind, KVLayout
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.drafting.interface import Drafted, DraftModel
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray, to_device
from pdserve.model.interface import LayerTaps
from pdserve.model.named_weights import MemoryRange
from pdserve.model.params import WeightSamples, fingerprint_of

Pages = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Proposals:
    """Drafts for the next step of some rows. `rows`: their indices in the plan. `token_ids` int64 `[rows, drafts]`."""

    rows: IntArray
    token_ids: Tensor

    def by_row(self) -> dict[int, tuple[int, ...]]:
        """Return the drafts by row index; waits for the device."""
        return dict(zip(self.rows.tolist(), map(tuple, self.token_ids.tolist()), strict=True))


class ModelDrafter(Protocol):
    """Drafts with a model, on one rank. All ranks of a replica call it alike, so all have the same drafts."""

    def open(self, row: int) -> None:
        """Forget what is kept of table row `row`: a new request has it."""
        ...

    def kept(self, row: int) -> bytes:
        """Return the hidden state that is kept of table row `row`; empty: none is, or the model takes none."""
        ...

    def resume(self, arrived: Mapping[int, tuple[int, bytes]]) -> None:
        """Keep hidden states from other servers: by table row, the position that takes it, and what `kept` returned
        there. Called in a step, before the first one of these rows is computed.
        """
        ...

    @property
    def hidden_bytes(self) -> int:
        """Bytes that `kept` returns; 0: the model takes no hidden states."""
        ...

    def weight_samples(self) -> WeightSamples:
        """Return samples of this rank's weights of the model, as `Model.params` has them."""
        ...

    def weight_memory(self) -> list[MemoryRange]:
        """See `DraftModel.weight_memory`."""
        ...

    @property
    def taps(self) -> LayerTaps | None:
        """Keeps the outputs of the target's layers that the model reads, in each step; None: it reads none."""
        ...

    def propose(
        self, host: HostBatch, num_accepted: IntArray | None, tokens: Tensor, num_proposals: int | None
    ) -> Proposals | None:
        """Write the draft KV of the step's known tokens, and draft for the rows that sampled. Called after sampling.

        Args:
            host: the step that the target has just computed with `taps`.
            num_accepted: int64 `[R]`, drafts of each row that were accepted; None: the step had no drafts.
            tokens: int32 `[table rows, context]`, known tokens on the device, the sampled ones included.
            num_proposals: most drafts of a row; None: as many as the drafter is configured for.
        """
        ...


class Drafter:
    """Implements `ModelDrafter` with one draft model, which drafts up to `num_drafts` tokens of a row.

    `layout` is this rank's, with the DRAFT group. `pool` is the pool of that group: `num_pages` pages of the row's
    tokens, and behind them `num_scratch_pages` for each of `num_rows` table rows. `dtype` is that of hidden states.
    """

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,
        layout: KVLayout,
        *,
        num_drafts: int,
        num_pages: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_drafts >= 1, num_drafts
        self._model, self._layout, self._device = model, layout, device
        self._num_drafts = num_drafts
        self._scratch = num_pages, num_scratch_pages(layout, num_drafts)
        assert pool.num_pages >= num_pages + num_rows * self._scratch[1], (pool.num_pages, num_pages, num_rows)
        self._kept = torch.zeros(num_rows + 1, model.hidden_size, dtype=dtype, device=device)
        """Hidden states by table row; zeros in the last line."""
        self._kept_for = np.full(num_rows, -1, dtype=np.int64)
        """By table row: the position that takes its kept hidden state; -1: none is kept."""
        self.taps = LayerTaps(model.taps) if model.taps else None
        model.bind(pool)

    def open(self, row: int) -> None:
        """See `ModelDrafter.open`."""
        self._kept_for[row] = -1

    def kept(self, row: int) -> bytes:
        """See `ModelDrafter.kept`."""
        has_state = self.hidden_bytes > 0 and self._kept_for[row] >= 0
        return self._kept[row].cpu().view(torch.uint8).numpy().tobytes() if has_state else b""

    def resume(self, arrived: Mapping[int, tuple[int, bytes]]) -> None:
        """See `ModelDrafter.resume`. Content of another length is ignored."""
        for row, (position, hidden) in arrived.items():
            if len(hidden) == self.hidden_bytes > 0:
                content = np.frombuffer(bytearray(hidden), dtype=np.uint8)
                self._kept[row] = torch.from_numpy(content).view(self._kept.dtype).to(self._device)
                self._kept_for[row] = position

    @property
    def hidden_bytes(self) -> int:
        """See `ModelDrafter.hidden_bytes`."""
        return self._kept.shape[1] * self._kept.element_size()

    def weight_samples(self) -> WeightSamples:
        """See `ModelDrafter.weight_samples`."""
        return self._model.weight_samples()

    def weight_memory(self) -> list[MemoryRange]:
        """See `ModelDrafter.weight_memory`."""
        return self._model.weight_memory()

    @property
    def num_bytes(self) -> int:
        """See `DraftModel.num_bytes`."""
        return self._model.num_bytes

    @property
    def num_weights(self) -> int:
        """See `DraftModel.num_weights`."""
        return self._model.num_weights

    def propose(
        self, host: HostBatch, num_accepted: IntArray | None, tokens: Tensor, num_proposals: int | None
    ) -> Proposals | None:
        """See `ModelDrafter.propose`."""
        hidden = self._kept.new_empty(host.columns.shape[1], 0)
        if self.taps is not None:
            hidden = self._model.take(self.taps.hidden)
        num_drafts = self._num_drafts if num_proposals is None else min(num_proposals, self._num_drafts)
        rows = host.rows
        known = rows.ends if num_accepted is None else _known(rows, num_accepted)
        sampled = np.zeros(len(known), dtype=np.bool_)
        sampled[host.sampled] = True
        drafting = np.flatnonzero(sampled) if num_drafts else np.empty(0, dtype=np.int64)
        kept_for = self._kept_for[host.table_rows]
        skips = (kept_for != rows.starts) & (rows.starts % self._layout.page_tokens > 0)
        if self.taps is None:
            skips[:] = False  # the token is all that its slot depends on
        spans = _Spans(rows.starts + skips, known + sampled, drafting)
        proposals = None
        present = np.flatnonzero(spans.ends > spans.starts)
        if len(present):
            pages = self._pages(host, int(spans.ends.max()) + num_drafts)
            batch = self._batch(host, spans, present, pages, tokens)
            lines = np.where(kept_for == rows.starts, host.table_rows, len(self._kept_for))
            drafted = self._model.forward(batch, self._inputs(host, spans, present, skips, lines, hidden))
            if drafted is not None:
                proposals = self._draft_more(host, drafting, known[drafting], pages, drafted, num_drafts)
        self._keep(host, known, hidden)
        return proposals

    def _pages(self, host: HostBatch, end: int) -> Pages:
        """Return the pages of the draft KV of positions before `end`, by row: the row's own, then scratch pages."""
        layout, (first, count) = self._layout, self._scratch
        own = host.rows.pages
        num_own = layout.pages_for(host.rows.ends)
        pages = np.zeros((len(own), max(own.shape[1], layout.pages_for(end))), dtype=np.int32)
        pages[:, : own.shape[1]] = own
        behind = np.arange(pages.shape[1]) - num_own[:, None]
        line, column = np.nonzero((behind >= 0) & (behind < count))
        pages[line, column] = first + host.table_rows[line] * count + behind[line, column]
        return pages

    def _batch(
        self,
        host: HostBatch,
        spans: _Spans,
        present: IntArray,
        pages: Pages,
        tokens: Tensor,
    ) -> ForwardBatch:
        """Return the batch of the rows `present` over their spans; those that draft are at `sample_index`."""
        starts, ends = spans.starts[present], spans.ends[present]
        lengths = ends - starts
        offsets = lengths.cumsum() - lengths
        line = np.arange(len(present)).repeat(lengths)
        positions = np.arange(int(lengths.sum())) - (offsets - starts).repeat(lengths)
        index, slots = self._layout.page_and_slot(positions)
        columns = np.stack((host.table_rows[present][line], positions, pages[present][line, index], slots))
        sampled = np.flatnonzero(np.isin(present, spans.drafting))
        rows = HostRows(starts, ends, offsets, host.rows.prompts[present], pages[present])
        last = (offsets + lengths - 1)[sampled]
        return build_batch(HostBatch(columns, sampled, last, host.table_rows[present], rows), tokens)

    def _inputs(
        self, host: HostBatch, spans: _Spans, present: IntArray, skips: IntArray, lines: IntArray, hidden: Tensor
    ) -> Tensor:
        """Return the hidden state before each token of the spans: kept ones (`lines` of `self._kept`), then new ones.

        The new states lie in the order of the step's tokens: that before position p of row r is number
        `offsets[r] + p - 1 - starts[r]`.
        """
        lengths = (spans.ends - spans.starts)[present]
        firsts = lengths.cumsum() - lengths
        base = (host.rows.offsets + skips)[present]
        source = np.arange(int(lengths.sum())) - (firsts - base).repeat(lengths) - 1
        begins = firsts[~skips[present]]
        source[begins] = 0
        found = hidden.index_select(0, to_device(source, self._device))
        if len(begins):
            kept = self._kept.index_select(0, to_device(lines[present][~skips[present]], self._device))
            found.index_copy_(0, to_device(begins, self._device), kept)
        return found

    def _draft_more(
        self,
        host: HostBatch,
        rows: IntArray,
        positions: IntArray,
        pages: Pages,
        drafted: Drafted,
        num_drafts: int,
    ) -> Proposals:
        """Draft the tokens behind the first. `positions` of the sampled tokens, in the order of `rows`."""
        found, every = [drafted.token_ids], np.arange(len(rows))
        samples, own, prompts = to_device(every, self._device), pages[rows], host.rows.prompts[rows]
        for step in range(1, num_drafts):
            at = positions + step
            index, slots = self._layout.page_and_slot(at)
            numbers = to_device(np.stack((at, at, own[every, index], slots)), self._device)
            numbers[0] = drafted.token_ids
            batch = ForwardBatch(numbers, samples, HostRows(at, at + 1, every, prompts, own))
            more = self._model.forward(batch, drafted.hidden)
            assert more is not None, "all rows draft"
            drafted = more
            found.append(drafted.token_ids)
        return Proposals(rows, torch.stack(found, 1))

    def _keep(self, host: HostBatch, known: IntArray, hidden: Tensor) -> None:
        """Keep the hidden state of each row's last known position."""
        rows = host.rows
        last = to_device(rows.offsets + known - rows.starts - 1, self._device)
        where = to_device(host.table_rows, self._device)
        self._kept.index_copy_(0, where, hidden.index_select(0, last).to(self._kept.dtype))
        self._kept_for[host.table_rows] = known


@dataclasses.dataclass(frozen=True)
class _Spans:
    """By row of the plan: the positions `[starts, ends)` that the draft model computes. `drafting`: rows that draft."""

    starts: IntArray
    ends: IntArray
    drafting: IntArray


def _known(rows: HostRows, num_accepted: IntArray) -> IntArray:
    """Return the end of each row's known tokens that have KV: without the drafts that were not accepted."""
    assert rows.num_drafts is not None, "rows with drafts tell their number"
    return rows.ends - rows.num_drafts + num_accepted


def draft_facts(drafter: ModelDrafter, others: Iterable[WeightSamples]) -> dict[str, str | int]:
    """Return what a peer's drafter must have alike beside its KV layout, so that draft KV is of use there.

    `others`: `weight_samples` of the other ranks.

    Raises:
        ModelError: ranks loaded different weights.
    """
    weights = fingerprint_of((drafter.weight_samples(), *others))
    return {"draft.weights": weights, "draft.hidden_bytes": drafter.hidden_bytes}


def but_last(on_layer: Callable[[int], None] | None, last: int) -> Callable[[int], None] | None:
    """Return a function that reports the target's layers to `on_layer`, except layer `last`.

    The caller reports that one once the draft KV, which is sent with it, is written. None stays None.
    """
    if on_layer is None:
        return None

    def report(layer: int) -> None:
        if layer != last:
            on_layer(layer)

    return report


def num_scratch_pages(layout: KVLayout, num_drafts: int) -> int:
    """Return the pages of a table row's slots behind its own pages: of the sampled token and all drafts but the last.

    They begin with a page.
    """
    return layout.pages_for(num_drafts)


def draft_pool(pools: Sequence[GroupPool]) -> KVPool:
    """Return the pool of the DRAFT group of a layout that has one."""
    pool = next(pool for pool in pools if pool.group.kind is GroupKind.DRAFT)
    assert isinstance(pool, KVPool)
    return pool
