"""`LayerBackends`: the backends of all layers of a rank whose layout has several groups.

Each kind of attention in a group has a backend over the group's pool, each STATE group a `StateSlots`. A layer names
itself by its number on this rank, and its call goes to its backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, KVGroup, PageSpace
from pdserve.model.attention.interface import (
    AttentionBackend,
    CapturedAttention,
    Heads,
    LayerStates,
    ScoreRule,
    StateRows,
    StepAttention,
)
from pdserve.model.attention.latent_index import Index
from pdserve.model.attention.latent_pages import LatentAttention, LatentPages
from pdserve.model.attention.latents import LatentProjection
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.attention.state_slots import CapturedRows, StateSlots, StepSlots, fold_rows, state_rows
from pdserve.model.forward_batch import NOWHERE, Filling, ForwardBatch, HostRows, IntArray
from pdserve.model.layer_spec import AttentionSpec, MLASpec

Make = Callable[[KVPool, AttentionSpec], AttentionBackend]
"""Makes the backend of one kind of attention over one pool."""
MakeLatents = Callable[[GroupPool, GroupPool | None], AttentionBackend]
"""Makes the backend over a pool of latents, and one of index keys; None: its layers have no index."""
Places = Mapping[int, tuple[int, int]]
"""By layer of this rank: index of its backend, and the layer's index in the backend's pool."""


@dataclasses.dataclass(frozen=True)
class AttentionGroup:
    """A kind of attention over one pool."""

    backend: AttentionBackend
    group: KVGroup
    null_page: int

    @property
    def is_window(self) -> bool:
        """Whether its pages are window pages."""
        return self.group.space is PageSpace.WINDOW


def make_backends(
    layers: Sequence[AttentionSpec | MLASpec | None],
    first: int,
    pools: Sequence[GroupPool],
    make: Make,
    device: torch.device,
    max_drafts: int = 0,
    make_latents: MakeLatents = LatentPages,
    *,
    channel_decay: bool = False,
) -> AttentionBackend:
    """Make the backends of a rank's layers over its pools, one for each group of the layout.

    `layers`: the attention of each of this rank's layers; None: the layer has none. `first`: the model's number of the
    first of them. `max_drafts`: most draft tokens of a row. `channel_decay`: see `GatedDeltaSpec`. A rank with one kind
    of attention over token pages, and no states, gets its backend itself.
    """
    attended: dict[int, tuple[int, int]] = {}
    stateful: dict[int, tuple[int, int]] = {}
    kinds: dict[tuple[object, ...], int] = {}
    groups: list[AttentionGroup] = []
    slots: list[StateSlots] = []
    for index, pool in enumerate(pools):
        numbers = [number - first for number in pool.group.layers]
        if pool.group.space is PageSpace.SLOTS:
            stateful |= {local: (len(slots), at) for at, local in enumerate(numbers)}
            slots.append(StateSlots(pool, device, max_drafts, channel_decay=channel_decay))
            continue
        if pool.group.kind is GroupKind.INDEX:
            continue
        for at, local in enumerate(numbers):
            op = layers[local]
            assert op is not None, f"layer {local} caches keys and values, and has no attention"
            if isinstance(op, MLASpec):
                if (index,) not in kinds:
                    kinds[(index,)] = len(groups)
                    index_pool = None if op.index is None else _index_pool(pools, pool)
                    groups.append(AttentionGroup(make_latents(pool, index_pool), pool.group, pool.null_page))
                attended[local] = kinds[(index,)], at
                continue
            assert isinstance(pool, KVPool)
            kind = (index, op.num_heads, ScoreRule.of(op))
            if kind not in kinds:
                kinds[kind] = len(groups)
                groups.append(AttentionGroup(make(pool, op), pool.group, pool.null_page))
            attended[local] = kinds[kind], at
    if len(groups) == 1 and not stateful and not groups[0].is_window:
        return groups[0].backend
    return LayerBackends(attended, stateful, groups, slots, device)


def _index_pool(pools: Sequence[GroupPool], latents: GroupPool) -> GroupPool:
    """Return the pool of the index keys of the layers of an MLA group."""
    return next(
        pool
        for pool in pools
        if pool.group.kind is GroupKind.INDEX and set(pool.group.layers) <= set(latents.group.layers)
    )


class LayerBackends:
    """Implements `CapturableBackend` and `StateBackend` for the layers of a rank."""

    def __init__(
        self,
        attended: Places,
        stateful: Places,
        groups: Sequence[AttentionGroup],
        slots: Sequence[StateSlots],
        device: torch.device,
    ) -> None:
        self._attended, self._stateful = attended, stateful
        self._groups, self._slots, self._device = groups, slots, device

    def begin(self, batch: ForwardBatch) -> GroupedStep:
        """See `AttentionBackend.begin`."""
        windows = [group.group.page_tokens for group in self._groups if group.is_window]
        of_window = batch.in_window(windows[0]) if windows else batch
        steps = [group.backend.begin(of_window if group.is_window else batch) for group in self._groups]
        rows = state_rows(batch.host, self._device) if self._slots else None
        return GroupedStep(self._attended, self._stateful, steps, _opened(self._slots, rows))

    @torch.inference_mode()
    def fold(self, slots: IntArray, counts: IntArray) -> None:
        """See `StateBackend.fold`."""
        rows = fold_rows(slots, counts)
        for group in self._slots:
            group.fold(rows)

    def capturing(self) -> LayerBackends | None:
        """See `AttentionBackend.capturing`."""
        return self if all(group.backend.capturing() is not None for group in self._groups) else None

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> GroupedCaptured:
        """See `CapturableBackend.capturable`."""
        window_pages = torch.full_like(write_pages, NOWHERE)
        steps = []
        for group in self._groups:
            backend = group.backend.capturing()
            assert backend is not None, "not a backend whose steps can be captured"
            pages = window_pages if group.is_window else write_pages
            steps.append(backend.capturable(num_rows, max_pages, pages, write_slots))
        rows = CapturedRows(num_rows, self._device) if self._slots else None
        opened = _opened(self._slots, None if rows is None else rows.rows)
        return GroupedCaptured(self._attended, self._stateful, steps, opened, self._groups, window_pages, rows)


def _opened(slots: Sequence[StateSlots], rows: StateRows | None) -> list[StepSlots]:
    return [] if rows is None else [each.begin(rows) for each in slots]


class GroupedStep:
    """Implements `StepAttention` and `StepStates` for the layers of a rank."""

    def __init__(
        self, attended: Places, stateful: Places, steps: Sequence[StepAttention], slots: Sequence[StepSlots]
    ) -> None:
        self._attended, self._stateful, self._steps, self._slots = attended, stateful, steps, slots

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        index, at = self._attended[layer]
        return self._steps[index].attend(at, heads)

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
        number, at = self._attended[layer]
        step = self._steps[number]
        assert isinstance(step, LatentAttention), f"layer {layer} has no latents"
        return step.attend_latents(at, query, latents, projection, scale, index)

    def states(self, layer: int) -> LayerStates:
        """See `StepStates.states`."""
        index, at = self._stateful[layer]
        return self._slots[index].states(at)


class GroupedCaptured(GroupedStep):
    """Implements `CapturedAttention` for the layers of a rank."""

    def __init__(
        self,
        attended: Places,
        stateful: Places,
        steps: Sequence[CapturedAttention],
        slots: Sequence[StepSlots],
        groups: Sequence[AttentionGroup],
        window_pages: Tensor,
        rows: CapturedRows | None,
    ) -> None:
        super().__init__(attended, stateful, steps, slots)
        self._captured = tuple(zip(groups, steps, strict=True))
        self._window_pages, self._rows = window_pages, rows

    def filling(self, rows: HostRows) -> list[Filling]:
        """See `CapturedAttention.filling`. `rows` has the token pages, with the window's pages and the slots beside."""
        fillings: list[Filling] = []
        windows = [group for group, _ in self._captured if group.is_window]
        if windows:
            group = windows[0]
            pages = write_pages(rows.in_window(), group.group.page_tokens, group.null_page)
            fillings.append((self._window_pages, pages))
        for group, step in self._captured:
            fillings += step.filling(rows.in_window() if group.is_window else rows)
        if self._rows is not None:
            fillings += self._rows.filling(rows)
        return fillings


def write_pages(rows: HostRows, page_tokens: int, null_page: int) -> IntArray:
    """Return the page of each decode row's token; `NOWHERE` for rows of padding, whose pages are the null page."""
    pages = rows.pages[np.arange(len(rows.ends)), (rows.ends - 1) // page_tokens].astype(np.int64)
    return np.where(pages == null_page, NOWHERE, pages)


def states_of(step: StepAttention, layer: int) -> LayerStates:
    """Return the states of this rank's layer `layer` in a step of a model with STATE groups."""
    assert isinstance(step, GroupedStep), "the layout has no STATE group"
    return step.states(layer)


def latents_of(step: StepAttention) -> LatentAttention | GroupedStep:
    """Return a step of a model with MLA groups as what attends over latents."""
    assert isinstance(step, LatentAttention | GroupedStep), "the layout has no MLA group"
    return step
