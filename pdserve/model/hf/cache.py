"""`PagedCache`: the cache that a transformers model sees. Its tensors are pages and slots of pdserve's pools.

A layer whose attention reads keys and values as the cache returned them gets its new ones back, and attention reads the
context from the pages. An MLA layer gets its new latents back; see `latent`. Other layers get the whole context,
gathered. Recurrent states are gathered when a layer asks for them, and written to the slots when the layer is complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pdserve.memory.layout import GroupKind, PageSpace
from pdserve.model.attention.latents import LatentPlane, LatentProjection, attend_latents
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.paged_attention import PagedPlane, attend_pages, attend_rows
from pdserve.model.attention.paged_rows import PassRows, causal_mask
from pdserve.model.hf.interface import AttentionCall, MaskFunction
from pdserve.model.hf.probe import CacheProbe


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPlanes:
    """One layer's keys and values. `is_direct`: see `LayerCalls`."""

    space: PageSpace
    null_page: int
    k: PagedPlane
    v: PagedPlane
    is_direct: bool


class PagedCache(Cache):  # type: ignore[misc, unused-ignore]
    """Implements transformers' `Cache` and `ForwardHandler` over the pools of a model's groups.

    Call `begin` before each pass and `end` behind it. `found`: the probe of the model. `projections`: see
    `find_projections`.
    """

    def __init__(
        self, found: CacheProbe, pools: Sequence[GroupPool], projections: Mapping[int, LatentProjection]
    ) -> None:
        super().__init__(layers=[])
        self._is_sparse = found.is_sparse
        self._projections = projections
        self._attended: dict[int, LayerPlanes] = {}
        self._latents: dict[int, LatentPlane] = {}
        self._index: dict[int, Tensor] = {}
        self._states: dict[tuple[int, str], tuple[Tensor, tuple[int, ...]]] = {}
        for pool in pools:
            for local, number in enumerate(pool.group.layers):
                self._add(found, pool, local, number)
        self._rows: PassRows | None = None
        self._on_layer: Callable[[int], None] | None = None
        self._num_reported = 0
        self._returned: dict[int, tuple[Tensor, int]] = {}
        self._taken: dict[tuple[int, str], Tensor] = {}

    def _add(self, found: CacheProbe, pool: GroupPool, local: int, number: int) -> None:
        group, layer = pool.group, found.layers[number]
        match group.kind:
            case GroupKind.STATE:
                for index, plane in enumerate(group.planes):
                    shape = layer.states[plane.name][0]
                    self._states[number, plane.name] = pool.plane(local, index), shape
            case GroupKind.INDEX:
                self._index[number] = pool.plane(local, 0)
            case GroupKind.MLA:
                assert layer.kv is not None
                latents = PagedPlane(pool.plane(local, 0), pool.plane_blocks(local, 0))
                self._latents[number] = LatentPlane(
                    latents, layer.kv[0][1], pool.null_page, self._projections.get(number)
                )
            case _:
                k, v = (PagedPlane(pool.plane(local, i), pool.plane_blocks(local, i)) for i in range(2))
                self._attended[number] = LayerPlanes(group.space, pool.null_page, k, v, layer.is_direct)

    def begin(self, rows: PassRows, on_layer: Callable[[int], None] | None) -> None:
        """Begin a pass over `rows`. `on_layer(i)` is called once keys, values and states of layer i are written."""
        self._rows, self._on_layer, self._num_reported = rows, on_layer, 0
        self._returned.clear()
        self._taken.clear()

    def end(self) -> None:
        """Write the recurrent states that are left to their slots."""
        self._write_states(None)
        self._returned.clear()
        self._rows = None

    @property
    def rows(self) -> PassRows:
        """Rows of the pass under way."""
        assert self._rows is not None, "no pass is under way"
        return self._rows

    # ------------------------------------------------------------------ called by transformers' layers

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write new keys and values `[batch, heads, tokens, width]` to their pages."""
        self._report(layer_idx)
        rows = self.rows
        if layer_idx in self._latents:
            return self._update_latents(self._latents[layer_idx], key_states, value_states, layer_idx)
        layer = self._attended[layer_idx]
        pages, slots = rows.written[layer.space]
        for plane, states in ((layer.k.values, key_states), (layer.v.values, value_states)):
            plane[pages, :, slots] = _flat(states).to(plane.dtype)
        if layer.is_direct:
            self._returned[id(key_states)] = key_states, layer_idx
            return key_states, value_states
        pages, slots = rows.context
        return tuple(plane.values[pages, :, slots].transpose(0, 1)[None] for plane in (layer.k, layer.v))

    def _update_latents(
        self, layer: LatentPlane, latent: Tensor, rope: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Write new latents `[batch, 1, tokens, width]` and their rotary keys; see `update`."""
        plane = layer.plane.values
        pages, slots = self.rows.written[PageSpace.TOKENS]
        plane[pages, 0, slots] = torch.cat([_flat(latent), _flat(rope)], -1)[:, 0].to(plane.dtype)
        if layer.projection is not None:
            self._returned[id(latent)] = latent, layer_idx
            return latent, rope
        pages, slots = self.rows.context
        context = plane[pages, 0, slots][None, None]
        return context[..., : layer.rank], context[..., layer.rank :]

    def expands(self, latent: Tensor) -> bool:
        """True when a layer must expand `latent`; False for new latents of this pass, which stay as they are."""
        return id(latent) not in self._returned

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write new index keys `[batch, tokens, width]`; returns those of the context, `[1, tokens, width]`."""
        plane = self._index[layer_idx]
        pages, slots = self.rows.written[PageSpace.TOKENS]
        plane[pages, 0, slots] = indexer_key_states.flatten(0, 1).to(plane.dtype)
        pages, slots = self.rows.context
        return plane[pages, 0, slots][None]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the convolution states of the rows, `[rows, ...]`; None at position 0."""
        return self._take(layer_idx, f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent states of the rows, `[rows, ...]`; None at position 0."""
        return self._take(layer_idx, f"state{state_idx}")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append the inputs of a convolution; returns the earlier ones that it needs, and the new ones."""
        name = f"conv{state_idx}"
        before = self._take(layer_idx, name)
        width = self._states[layer_idx, name][1][-1]
        if before is None:
            full = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            full = torch.cat([before, conv_states], -1)
        self._taken[layer_idx, name] = full[..., -width:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the recurrent states of the rows."""
        self._taken[layer_idx, f"state{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True when the rows have computed tokens before."""
        return self.rows.has_state

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: no state can be taken back."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the first row before this pass. Positions are passed explicitly, so only its sign matters."""
        return int(self.rows.starts[0])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens of all rows' contexts, and 0."""
        return int(self.rows.ends.sum()), 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Always 0: queries of several rows have no common offset."""
        return 0

    # ------------------------------------------------------------------ `ForwardHandler`

    def mask(self, function: MaskFunction, dtype: Any) -> Tensor | None:
        """See `ForwardHandler.mask`. A mask of all rows' contexts where an indexer reads it; None elsewhere."""
        if not self._is_sparse:
            return None
        rows = self.rows
        device = rows.indices.device
        mask = torch.full((rows.num_tokens, int(rows.ends.sum())), torch.finfo(dtype).min, dtype=dtype, device=device)
        for start, end, offset, first in zip(rows.starts, rows.ends, rows.offsets, rows.context_starts, strict=True):
            part = mask[offset : offset + end - start, first : first + end]
            part.masked_fill_(causal_mask(int(start), int(end), 0, int(end), None, device), 0.0)
        return mask[None, None]

    def attend(self, call: AttentionCall) -> Tensor:
        """See `ForwardHandler.attend`."""
        returned = self._returned.get(id(call.key))
        query = call.query.transpose(1, 2).flatten(0, 1)
        if returned is None:
            out = attend_rows(query, call.key, call.value, call, self.rows)
        elif returned[1] in self._latents:
            new = torch.cat([_flat(call.key), _flat(call.value)], -1)[:, 0]
            out = attend_latents(query, new, call, self.rows, self._latents[returned[1]])
        else:
            layer = self._attended[returned[1]]
            new_k, new_v = _flat(call.key), _flat(call.value)
            out = attend_pages(query, new_k, new_v, call, self.rows, layer.k, layer.v, layer.space, layer.null_page)
        batch, heads, tokens, _ = call.query.shape
        return out.view(batch, tokens, heads, -1)

    # ------------------------------------------------------------------

    def _take(self, layer_idx: int, name: str) -> Tensor | None:
        self._report(layer_idx)
        key = (layer_idx, name)
        if key in self._taken:
            return self._taken[key]
        if not self.rows.has_state or key not in self._states:
            return None
        plane, shape = self._states[key]
        state = plane[self.rows.slots].reshape(-1, *shape)
        self._taken[key] = state
        return state

    def _report(self, layer_idx: int) -> None:
        """Report the layers before `layer_idx`, which are complete, after their states are written."""
        if self._on_layer is not None and layer_idx > self._num_reported:
            self._write_states(layer_idx)
            self._num_reported = layer_idx
            self._on_layer(layer_idx - 1)

    def _write_states(self, end: int | None) -> None:
        """Write the states of the layers before `end` to their slots; None: of all."""
        for key in [key for key in self._taken if end is None or key[0] < end]:
            state, (plane, _) = self._taken.pop(key), self._states[key]
            plane[self.rows.slots] = state.reshape(-1, *plane.shape[1:]).to(plane.dtype)


def _flat(states: Tensor) -> Tensor:
    """`[batch, heads, tokens, width]` as `[batch * tokens, heads, width]`."""
    return states.transpose(1, 2).flatten(0, 1)
