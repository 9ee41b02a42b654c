"""The backends of a rank's layers: which group and kind each layer's call goes to, and what a step offers to states."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace
from pdserve.model.attention.interface import AttentionBackend, Heads
from pdserve.model.attention.layer_backends import LayerBackends, make_backends, states_of
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.config import ModelSpec, kv_layout, spec_from_config
from pdserve.model.forward_batch import NOWHERE, Filling, ForwardBatch, HostRows, fill
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, GatedDeltaSpec, SublayerSpec

CPU = torch.device("cpu")
PAGE, WINDOW = 4, 6
NUM_PAGES = {PageSpace.TOKENS: 20, PageSpace.WINDOW: 10, PageSpace.SLOTS: 5}
CONFIG = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None,
}  # fmt: skip
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_kernel=4)


def spec_of() -> ModelSpec:
    """Layers: state, window, full, state, full with other KV heads, full with other query heads."""
    spec = spec_from_config(CONFIG, {}, where="here")
    (full,) = spec.attentions
    window = dataclasses.replace(full, window=WINDOW)
    other, wide = dataclasses.replace(full, num_kv_heads=1), dataclasses.replace(full, num_heads=8)
    kinds = (DELTA, window, full, DELTA, other, wide)
    return dataclasses.replace(spec, layers=tuple(DecoderLayerSpec((SublayerSpec("norm", op),)) for op in kinds))


def pools_of(layout: KVLayout) -> list[GroupPool]:
    return [
        (GroupPool if group.kind is GroupKind.STATE else KVPool)(group, NUM_PAGES[group.space], CPU)
        for group in layout.groups
    ]


class Noted:
    """A capturable backend that notes its calls."""

    def __init__(self, pool: KVPool, op: AttentionSpec) -> None:
        self.pool, self.op = pool, op
        self.calls: list[tuple[int, HostRows]] = []
        self.batch: ForwardBatch | None = None
        self.writes: Tensor | None = None

    def begin(self, batch: ForwardBatch) -> Noted:
        self.batch = batch
        return self

    def capturing(self) -> Noted:
        return self

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> Noted:
        self.writes = write_pages
        return self

    def filling(self, rows: HostRows) -> list[Filling]:
        self.calls.append((-1, rows))
        return []

    def attend(self, layer: int, heads: Heads) -> Tensor:
        assert self.batch is not None
        self.calls.append((layer, self.batch.host))
        return torch.tensor([layer])


def backends_of(spec: ModelSpec, first: int, layout: KVLayout) -> tuple[AttentionBackend, list[Noted]]:
    made: list[Noted] = []

    def make(pool: KVPool, op: AttentionSpec) -> Noted:
        made.append(Noted(pool, op))
        return made[-1]

    count = len({layer for group in layout.groups for layer in group.layers})
    attended = [next(iter(spec.layers[first + i].operations)) for i in range(count)]
    ops = [op if isinstance(op, AttentionSpec) else None for op in attended]
    return make_backends(ops, first, pools_of(layout), make, CPU), made


def rows_of() -> HostRows:
    """A row of a decode step in position 9, one of padding, and one of the first token of a prompt."""
    tables = np.array([[3, 4, 5], [20, 20, 20], [7, 0, 0]], dtype=np.int32)
    return HostRows(
        starts=np.array([9, 0, 0]), ends=np.array([10, 1, 1]), offsets=np.arange(3),
        prompts=np.zeros(3, dtype=np.int64), pages=tables,
        window=np.array([[99, 8, 9], [10, 10, 10], [2, 0, 0]], dtype=np.int32),
        slots=np.array([4, NOWHERE, 1], dtype=np.int32),
    )  # fmt: skip


HEADS = cast(Heads, None)


def test_layers_that_cache_alike_are_a_group_and_kinds_of_attention_have_backends() -> None:
    spec = spec_of()
    layout = kv_layout(spec, PAGE, "float32")
    assert [(group.name, group.layers) for group in layout.groups] == [
        ("full", (2, 5)), ("full2", (4,)), ("window", (1,)), ("state", (0, 3)),
    ]  # fmt: skip
    planes = layout.groups[3].planes
    assert [(plane.name, plane.num_heads, plane.rows, plane.width, plane.dtype) for plane in planes] == [
        ("conv_q", 2, 8, 3, "float32"), ("conv_k", 2, 8, 3, "float32"), ("conv_v", 4, 8, 3, "float32"),
        ("state", 4, 8, 8, "float32"),
    ]  # fmt: skip
    backend, made = backends_of(spec, 0, layout)
    assert [(each.op.num_heads, each.op.num_kv_heads, each.op.window) for each in made] == [
        (4, 2, None), (8, 2, None), (4, 1, None), (4, 2, WINDOW),
    ]  # fmt: skip
    host = rows_of()
    columns = torch.tensor([[5, 6, 7], [9, 0, 0], [5, NOWHERE, 7], [1, 0, 0]])
    step = backend.begin(ForwardBatch(columns, torch.arange(3), host))
    for layer, (index, at) in {2: (0, 0), 5: (1, 1), 4: (2, 0), 1: (3, 0)}.items():
        assert step.attend(layer, HEADS).item() == at
        assert made[index].calls[-1][0] == at
    of_window = made[3].batch
    assert of_window is not None and of_window.host.pages is host.window
    assert of_window.write_pages.tolist() == [9, NOWHERE, 2], "the window's pages, and none for padding"
    assert made[0].batch is not None and made[0].batch.write_pages.tolist() == [5, NOWHERE, 7]


def test_layers_with_states_get_their_planes_and_the_rows_of_the_step() -> None:
    spec = spec_of()
    layout = kv_layout(spec, PAGE, "float32")
    backend, _ = backends_of(spec, 0, layout)
    columns = torch.zeros(4, 3, dtype=torch.int64)
    step = backend.begin(ForwardBatch(columns, torch.arange(3), rows_of()))
    first, second = states_of(step, 0), states_of(step, 3)
    assert first.rows is second.rows and first.rows.is_decode
    assert first.rows.slots.tolist() == [4, NOWHERE, 1] and first.rows.starts.tolist() == [9, 0, 0]
    assert first.rows.offsets.tolist() == [0, 1, 2, 3]
    assert first.planes["state"].shape == (NUM_PAGES[PageSpace.SLOTS] + 1, 4, 8, 8)
    first.planes["state"].fill_(1.0)
    assert not second.planes["state"].any() and not first.planes["conv_v"].any()
    made = [first.rows.once("x", lambda: object()), second.rows.once("x", lambda: object())]
    assert made[0] is made[1], "made once a step"


def test_captured_steps_get_window_pages_and_slots_at_fixed_addresses() -> None:
    spec = spec_of()
    backend, made = backends_of(spec, 0, kv_layout(spec, PAGE, "float32"))
    capturable = backend.capturing()
    assert isinstance(capturable, LayerBackends)
    writes = torch.zeros(3, dtype=torch.int64)
    step = capturable.capturable(3, 3, writes, writes)
    assert made[0].writes is writes and made[3].writes is not writes
    rows = states_of(step, 0).rows
    assert rows.slots.tolist() == [NOWHERE] * 3 and rows.host is None and rows.is_decode
    host = rows_of()
    fill(step.filling(host))
    assert made[3].writes is not None and made[3].writes.tolist() == [9, NOWHERE, 2]
    assert rows.slots.tolist() == [4, NOWHERE, 1] and rows.starts.tolist() == [9, 0, 0]
    assert made[0].calls[-1][1] is host and made[3].calls[-1][1].pages is host.window


@pytest.mark.parametrize(("stage", "kinds"), [(0, [4]), (1, [4]), (2, [4, 8])])
def test_a_stage_has_backends_of_its_own_layers(stage: int, kinds: list[int]) -> None:
    spec, shape = spec_of(), ParallelShape(pp_size=3)
    coord = shape.coord(stage)
    layout = kv_layout(spec, PAGE, "float32").of_rank(coord)
    first = kv_layout(spec, PAGE, "float32").layers_of(coord).start
    backend, made = backends_of(spec, first, layout)
    assert sorted(each.op.num_heads for each in made) == kinds
    columns = torch.zeros(4, 3, dtype=torch.int64)
    step = backend.begin(ForwardBatch(columns, torch.arange(3), rows_of()))
    for local in range(2):
        op = next(iter(spec.layers[first + local].operations))
        if isinstance(op, AttentionSpec):
            assert step.attend(local, HEADS).item() == 0
        else:
            assert set(states_of(step, local).planes) == {"conv_q", "conv_k", "conv_v", "state"}


def test_a_rank_with_one_kind_over_token_pages_has_that_backend_alone() -> None:
    spec = spec_from_config(CONFIG, {}, where="here")
    backend, made = backends_of(spec, 0, kv_layout(spec, PAGE, "float32"))
    assert backend is made[0]  # type: ignore[comparison-overlap]
