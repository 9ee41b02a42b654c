"""The KV layouts of the hash model, heads of one 64-bit number in groups of all kinds, and stamps of its slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.memory.draft_groups import with_draft
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, Plane, Shard, attention_group
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.sim.hash_layers import CONV_COLUMNS, VALUES_PER_KEY


def hash_layout(
    page_tokens: int,
    num_layers: int = 3,
    num_heads: int = 1,
    window: int = 0,
    *,
    has_state: bool = False,
    is_hybrid: bool = True,
) -> KVLayout:
    """Return the KV layout of the hash model.

    With `window` the model is a hybrid: its layers are full attention, attention over `window` tokens, and a recurrent
    state, in turn; without `is_hybrid` full attention and attention over `window` tokens only. With `has_state` and no
    window they are full attention and a recurrent state, in turn.
    """

    def attention(layers: Sequence[int], kind: GroupKind, window: int | None = None) -> KVGroup:
        return attention_group(
            kind=kind,
            num_layers=num_layers,
            layers=layers,
            page_tokens=page_tokens,
            num_kv_heads=num_heads,
            head_dim=1,
            dtype="uint64",
            window=window,
        )

    if not window and not has_state:
        return KVLayout((attention(range(num_layers), GroupKind.FULL),))
    assert num_layers >= 3, "a layer of each kind"
    if window and not is_hybrid:
        of_window = attention(range(1, num_layers, 2), GroupKind.WINDOW, window)
        return KVLayout((attention(range(0, num_layers, 2), GroupKind.FULL), of_window))
    kinds = 3 if window else 2
    state = KVGroup(
        name="state",
        kind=GroupKind.STATE,
        layers=tuple(range(kinds - 1, num_layers, kinds)),
        num_model_layers=num_layers,
        page_tokens=0,
        planes=(
            _state_plane("conv", num_heads, CONV_COLUMNS, Shard.KEY_HEAD),
            _state_plane("state", VALUES_PER_KEY * num_heads, 1, Shard.VALUE_HEAD),
        ),
    )
    full = attention(range(0, num_layers, kinds), GroupKind.FULL)
    if not window:
        return KVLayout((full, state)).with_stamps()
    return KVLayout((full, attention(range(1, num_layers, 3), GroupKind.WINDOW, window), state)).with_stamps()


def _state_plane(name: str, num_heads: int, width: int, shard: Shard) -> Plane:
    return Plane(
        name=name, num_heads=num_heads, num_heads_total=num_heads, rows=1, width=width, dtype="uint64", shard=shard
    )


def hash_draft_layout(layout: KVLayout) -> KVLayout:
    """Return `layout` with the DRAFT group of the hash model's drafter, which has one layer."""
    heads = layout.groups[0].planes[0].num_heads_total
    group = attention_group(
        kind=GroupKind.DRAFT,
        num_layers=layout.num_layers,
        layers=(layout.num_layers - 1,),
        page_tokens=layout.page_tokens,
        num_kv_heads=heads,
        head_dim=1,
        dtype="uint64",
    )
    return with_draft(layout, group)


class HashStamps:
    """Mixin of `HashExecutor`: the stamps in the state slots. `pools`: by rank and group."""

    pools: list[list[npt.NDArray[np.uint64]]]

    @property
    def layout(self) -> KVLayout:
        """The whole model's layout."""
        raise NotImplementedError

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor`; compares the stamps of all ranks."""
        index = self.layout.stamp_group
        return index is None or all(stamp.fills(pools[index][slot].tobytes()) for pools in self.pools)

    def put_stamp(self, slot: int, stamp: SlotStamp) -> None:
        """Stamp a slot of all ranks; does nothing in a model without states."""
        index = self.layout.stamp_group
        if index is not None:
            for pools in self.pools:
                pools[index][slot] = stamp.words
