"""`TritonLatents`: attention over latents (MLA), dense and sparse, by Triton kernels. For CUDA; see `backend_choice`.

Queries are absorbed, and the kernels read latents and index keys in their pages. A row whose prompt chunk is long
enough expands the latents of its context once, as with torch, and attends with torch; see `LatentProjection.is_worth`.
A token of a row with drafts counts as a decode row.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from pdserve.memory.layout import PageSpace
from pdserve.model.attention.interface import CapturableBackend
from pdserve.model.attention.latent_index import NO_TOKEN, Index, IndexInputs
from pdserve.model.attention.latent_pages import LatentAttention, LatentOptions, LatentPages
from pdserve.model.attention.latents import LatentProjection, attend_expanded
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.paged_attention import PagedPlane
from pdserve.model.attention.paged_rows import ExtendSpan, PassRows
from pdserve.model.attention.triton_pages import pack_to_device
from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows, IntArray, to_device
from pdserve.model.gpu.decode_attention import counters, num_parts
from pdserve.model.gpu.latent_attention import LatentTiling, PagedContext, attend_latents, index_scores, place_latents

MAX_SCORES = 1 << 26
"""Index scores that are in memory at once."""


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Tiles of one launch, int32 `[T, 2]` on the device; see `attend_latents` of the kernels."""

    tiles: Tensor
    tiling: LatentTiling
    parts: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The launches of a step, and the rows whose latents are expanded instead.

    `absorbed` int64: the tokens of the launches; None: all tokens of the step.
    """

    launches: list[_Launch]
    expanded: list[ExtendSpan]
    absorbed: Tensor | None = None


class TritonLatents(LatentPages):
    """The `triton` attention backend over one pool of latents. Implements `CapturableBackend` if it has no index."""

    def __init__(self, pool: GroupPool, index: GroupPool | None = None) -> None:
        super().__init__(pool, index)
        self._device = pool.plane(0, 0).device
        self._through = counters(1, 1, self._device)
        self._captured: Tensor | None = None
        """Page table of captured steps; smaller sizes use its first lines. None before the first capture."""

    def begin(self, batch: ForwardBatch) -> TritonLatentStep:
        """See `AttentionBackend.begin`."""
        return TritonLatentStep(self, dataclasses.replace(batch, host=batch.host.apart()))

    def capturing(self) -> CapturableBackend | None:
        """See `AttentionBackend.capturing`. A selection depends on the rows' lengths: None for layers with an index."""
        return None if self._index else self

    def capturable(
        self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor
    ) -> TritonLatentCaptured:
        """See `CapturableBackend.capturable`."""
        if self._captured is None or self._captured.shape[0] < num_rows:
            shape = (num_rows, max_pages)
            self._captured = torch.full(shape, self._pool.null_page, dtype=torch.int32, device=self._device)
        ends = torch.ones(num_rows, dtype=torch.int32, device=self._device)
        every = torch.arange(num_rows, dtype=torch.int32, device=self._device)
        context = PagedContext(self._captured[:num_rows], torch.zeros_like(ends), ends, every)
        return TritonLatentCaptured(self, context, self._pool.group.tokens_in(max_pages), write_pages, write_slots)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._pool.group.page_tokens

    def counters(self, number: int) -> Tensor:
        """Return at least `number` counters, zeros. Steps run one after the other and share them."""
        if len(self._through) < number:
            self._through = counters(number, 1, self._device)
        return self._through


class _TritonLatentStep(LatentAttention):
    """What steps share that are captured and that are not."""

    def __init__(self, backend: TritonLatents, context: PagedContext, pages: Tensor, slots: Tensor) -> None:
        self._backend, self._context, self._pages, self._slots = backend, context, pages, slots
        self._planes, self._index = backend.planes
        self._device = context.table.device

    def _attend(
        self, plane: PagedPlane, query: Tensor, plan: _Plan, projection: LatentProjection, scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend with the tokens of the launches; other tokens' outputs are undefined."""
        num_tokens, num_heads, _ = query.shape
        some, width = plan.absorbed, plane.values.shape[-1]
        attended = query.new_empty(num_tokens, num_heads, projection.rank)
        if some is None:
            absorbed = projection.absorb(query)
        else:
            absorbed = query.new_empty(num_tokens, num_heads, width)
            absorbed[some] = projection.absorb(query[some])
        for launch in plan.launches:
            through = self._counters(len(launch.tiles) * launch.tiling.blocks(num_heads))
            attend_latents(
                absorbed, attended, plane.values[:, 0], self._context, launch.tiles, launch.tiling,
                scale=scale, parts=launch.parts, through=through, selected=selected,
            )  # fmt: skip
        if some is None:
            return projection.project(attended)
        out = query.new_empty(num_tokens, num_heads, projection.v_width)
        out[some] = projection.project(attended[some])
        return out

    def _counters(self, number: int) -> Tensor:
        """Return at least `number` counters, zeros."""
        return self._backend.counters(number)

    def _of_tokens(self, tiles: Tensor, num_heads: int, longest: int) -> _Launch:
        """Return the launch of tokens, a tile for each, that attend to at most `longest` latents."""
        tiling = LatentTiling.of_one_token(num_heads)
        parts = num_parts(len(tiles), tiling.blocks(num_heads), longest, self._device)
        return _Launch(tiles, tiling, parts)


class TritonLatentStep(_TritonLatentStep):
    """Attention of one step over latents by Triton kernels. `batch` has no rows with drafts."""

    def __init__(self, backend: TritonLatents, batch: ForwardBatch) -> None:
        host, device = batch.host, batch.columns.device
        pieces = (host.starts, host.ends, host.offsets, host.pages.reshape(-1))
        starts, ends, offsets, table = pack_to_device(pieces, device)
        context = PagedContext(table.view(len(host.starts), -1), starts, ends, offsets)
        super().__init__(backend, context, batch.write_pages, batch.write_slots)
        self._batch, self._host = batch, host
        self._plans: dict[tuple[int, float], _Plan] = {}
        self._selected: Tensor | None = None
        """What the tokens select in the last layer with an index; None: all tokens that they may see."""

    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        latents: Tensor,
        projection: LatentProjection,
        scale: float,
        index: Index | None = None,
    ) -> Tensor:
        """See `LatentAttention.attend_latents`."""
        plane, num_heads = self._planes[layer], query.shape[1]
        place_latents(latents, plane.values[:, 0], self._pages, self._slots)
        if isinstance(index, IndexInputs):
            keys = self._index[layer]
            place_latents(index.key, keys.values[:, 0], self._pages, self._slots)
            self._selected = self._select(index, keys)
        selected = None if index is None else self._selected
        if selected is not None:
            tiles, _, _ = self._tokens_on_device
            launch = self._of_tokens(tiles, num_heads, selected.shape[1])
            return self._attend(plane, query, _Plan([launch], []), projection, scale, selected)
        plan = self._plan(num_heads, projection)
        out = self._attend(plane, query, plan, projection, scale)
        options = LatentOptions(scale)
        for span in plan.expanded:
            tokens = slice(span.offset, span.offset + span.end - span.start)
            out[tokens] = attend_expanded(query[tokens], latents[tokens], plane, span, options, projection)
        return out

    def _plan(self, num_heads: int, projection: LatentProjection) -> _Plan:
        """Return what computes the rows of this step, for all layers with such a projection."""
        key = (num_heads, projection.worth)
        if key not in self._plans:
            lengths = self._host.ends - self._host.starts
            is_one = lengths == 1
            is_worth = ~is_one & (lengths >= projection.worth)
            launches = []
            decoding, prompts = np.flatnonzero(is_one), np.flatnonzero(~is_one & ~is_worth)
            if len(decoding):
                longest = int(self._host.ends[decoding].max())
                tiles = self._tiles_of(decoding, np.zeros_like(decoding))
                launches.append(self._of_tokens(tiles, num_heads, longest))
            if len(prompts):
                tiling = LatentTiling.of_prompts(num_heads, self._planes[0].values.dtype)
                rows, new = _tiles(self._host, prompts, tiling.tokens)
                launches.append(_Launch(self._tiles_of(rows, new), tiling, 1))
            self._plans[key] = _Plan(launches, [])
            if is_worth.any():
                every = np.arange(len(lengths))
                pass_rows = PassRows(self._batch, every, self._backend.page_tokens, is_decode=False)
                spans = [span for span in pass_rows.extends(PageSpace.TOKENS, None) if is_worth[span.row]]
                rows, new = self._tokens
                absorbed = to_device(np.flatnonzero(~is_worth[rows]), self._device)
                self._plans[key] = _Plan(launches, spans, absorbed)
        return self._plans[key]

    @functools.cached_property
    def _tokens(self) -> tuple[IntArray, IntArray]:
        """Row of each token of the step, and its number among the row's new tokens, in flat order."""
        host, every = self._host, np.arange(len(self._host.starts))
        rows, new = _tiles(host, every, 1)
        order = np.argsort(host.offsets[rows] + new, kind="stable")
        return rows[order], new[order]

    @functools.cached_property
    def _tokens_on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tiles of single tokens, and row and position of each: int32 `[N, 2]` and `[N]`."""
        rows, new = self._tokens
        pieces = (np.stack((rows, new), 1).reshape(-1), rows, self._host.starts[rows] + new)
        tiles, row_of, positions = pack_to_device(pieces, self._device)
        return tiles.view(-1, 2), row_of, positions

    def _tiles_of(self, rows: IntArray, new: IntArray) -> Tensor:
        """Return the tiles with these rows and first new tokens on the device."""
        return pack_to_device([np.stack((rows, new), 1).reshape(-1)], self._device)[0].view(-1, 2)

    def _select(self, inputs: IndexInputs, keys: PagedPlane) -> Tensor | None:
        """Return the positions that each token selects, int32 `[N, K]`; see `attend_latents` of the kernels.

        None: all rows are so short that each token selects all that it may see.
        """
        longest = int(self._host.ends.max())
        if longest <= inputs.top_k:
            return None
        _, row_of, positions = self._tokens_on_device
        num_tokens, _, dim = inputs.query.shape
        found = torch.empty(num_tokens, inputs.top_k, dtype=torch.int32, device=self._device)
        together = max(1, MAX_SCORES // (16 * longest)) * 16  # parts begin aligned: see `pack_to_device`
        for begin in range(0, num_tokens, together):
            some = slice(begin, min(begin + together, num_tokens))
            scores = torch.empty(some.stop - begin, longest, device=self._device)
            index_scores(
                inputs.query[some].contiguous(), inputs.weights[some].contiguous(), keys.values[:, 0],
                self._context.table, row_of[some], positions[some], scores, scale=dim**-0.5,
            )  # fmt: skip
            best = scores.topk(inputs.top_k, -1)
            found[some] = best.indices.masked_fill(best.values == float("-inf"), NO_TOKEN).int()
        return found


class TritonLatentCaptured(_TritonLatentStep):
    """Implements `CapturedAttention`: decode rows whose tensors stay at fixed addresses."""

    def __init__(
        self, backend: TritonLatents, context: PagedContext, longest: int, pages: Tensor, slots: Tensor
    ) -> None:
        super().__init__(backend, context, pages, slots)
        self._longest = longest
        self._tiles = torch.stack((context.offsets, torch.zeros_like(context.offsets)), 1)
        self._through: Tensor | None = None

    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        latents: Tensor,
        projection: LatentProjection,
        scale: float,
        index: Index | None = None,
    ) -> Tensor:
        """See `LatentAttention.attend_latents`. There is no index."""
        assert index is None, "steps with a selection are not captured"
        plane = self._planes[layer]
        place_latents(latents, plane.values[:, 0], self._pages, self._slots)
        plan = _Plan([self._of_tokens(self._tiles, query.shape[1], self._longest)], [])
        return self._attend(plane, query, plan, projection, scale)

    def _counters(self, number: int) -> Tensor:
        """See the base class. They keep their address; the step that precedes the capture makes them."""
        if self._through is None:
            self._through = counters(number, 1, self._device)
        return self._through

    def filling(self, rows: HostRows) -> list[Filling]:
        """See `CapturedAttention.filling`."""
        mine, ends = self._context, rows.ends.astype(np.int32)
        return [(mine.starts, ends - 1), (mine.ends, ends), (mine.table[:, : rows.pages.shape[1]], rows.pages)]


def _tiles(host: HostRows, rows: IntArray, tokens: int) -> tuple[IntArray, IntArray]:
    """Return row and first new token of tiles of `tokens` tokens; tiles with the most keys come first."""
    counts = -(-(host.ends - host.starts)[rows] // tokens)
    of_row = rows.repeat(counts)
    new = (np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)) * tokens
    order = np.argsort(-(host.starts[of_row] + new), kind="stable")
    return of_row[order], new[order]
