"""A GatedDeltaNet layer and its tensor ranks compute what transformers' module does, from either checkpoint layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.errors import ModelError
from pdserve.model.attention.interface import LayerStates, StateRows
from pdserve.model.attention.state_slots import state_rows
from pdserve.model.config import state_planes
from pdserve.model.forward_batch import HostRows
from pdserve.model.gated_delta_net import GatedDeltaNet
from pdserve.model.layer_spec import GatedDeltaSpec, LayerNames
from pdserve.model.layers.kernels import FastKernels
from pdserve.model.parallel import SingleRank
from pdserve.model.params import ParamSlots, fingerprint_of
from pdserve.model.tensor_sources import TensorInMemory

CPU = torch.device("cpu")
HIDDEN, EPS = 24, 1e-5
SPEC = GatedDeltaSpec(num_key_heads=2, num_value_heads=8, key_dim=8, value_dim=6, conv_kernel=4)
LENGTHS = (70, 1)
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "rms_norm_eps": EPS, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "layer_types": ["linear_attention"], "num_hidden_layers": 1,
}  # fmt: skip


class Standing(SingleRank):
    """A rank whose sums are its own part."""

    def __init__(self, coord: RankCoord) -> None:
        self.coord = coord


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank's layer and its planes of three slots."""

    layer: GatedDeltaNet
    params: ParamSlots
    planes: dict[str, Tensor]

    def step(self, x: Tensor, rows: StateRows) -> Tensor:
        with torch.inference_mode():
            return self.layer(x, LayerStates(rows, self.planes))


def make_rank(spec: GatedDeltaSpec, tensors: dict[str, Tensor], coord: RankCoord) -> Rank:
    params = ParamSlots(torch.float32, CPU)
    names = LayerNames()
    layer = GatedDeltaNet(spec, 0, HIDDEN, EPS, names, params, FastKernels(), Standing(coord))
    for name, tensor in tensors.items():
        params.fill(f"linear_attn.{name}", TensorInMemory(tensor))
    params.check_filled("here")
    planes = [plane.of_rank(coord) for plane in state_planes(spec, "float32")]
    shapes = {plane.name: (3, plane.num_heads, plane.rows, plane.width) for plane in planes}
    return Rank(layer, params, {name: torch.full(shape, math.nan) for name, shape in shapes.items()})


def make_reference(interleaved: bool) -> Any:
    torch.manual_seed(4)
    module: Any
    if interleaved:
        module = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**CONFIG), 0)
    else:
        module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**CONFIG), 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4)
    return module.eval()


def rows_of(starts: list[int], ends: list[int], prompts: list[int]) -> StateRows:
    first, last = np.array(starts), np.array(ends)
    offsets = np.cumsum(last - first) - (last - first)
    slots = np.array([2, 0], dtype=np.int32)[: len(starts)]
    return state_rows(HostRows(first, last, offsets, np.array(prompts), np.zeros((2, 1), np.int32), slots=slots), CPU)


@pytest.mark.parametrize("interleaved", [True, False], ids=["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_add_up_to_the_module_of_transformers(interleaved: bool, tp_size: int) -> None:
    """Two rows: a prompt and a token, then a token each. With four ranks two of them have each key head."""
    module = make_reference(interleaved)
    spec = dataclasses.replace(SPEC, interleaved=interleaved)
    shape = ParallelShape(tp_size=tp_size)
    ranks = [make_rank(spec, module.state_dict(), shape.coord(rank)) for rank in range(tp_size)]
    whole = make_rank(spec, module.state_dict(), ParallelShape().coord(0))
    x = [torch.randn(length + 1, HIDDEN) for length in LENGTHS]
    expected = []
    for row in x:
        cache = DynamicCache(config=module_config(interleaved))
        with torch.no_grad():
            expected.append([module(part[None], cache_params=cache)[0] for part in (row[:-1], row[-1:])])
    for turn, rows in enumerate((rows_of([0, 0], [*LENGTHS], [*LENGTHS]), rows_of([70, 1], [71, 2], [*LENGTHS]))):
        batch = torch.cat([row[:-1] if turn == 0 else row[-1:] for row in x])
        found = sum(rank.step(batch, rows) for rank in ranks)
        torch.testing.assert_close(found, torch.cat([parts[turn] for parts in expected]), atol=2e-5, rtol=1e-4)
        whole.step(batch, rows)
    for plane in state_planes(spec, "float32"):
        for index, rank in enumerate(ranks):
            heads = plane.heads_of(shape.coord(index))
            torch.testing.assert_close(rank.planes[plane.name], whole.planes[plane.name][:, heads], equal_nan=True)
    merged = fingerprint_of([rank.params.samples() for rank in ranks])
    assert merged == fingerprint_of([whole.params.samples()])


def module_config(interleaved: bool) -> Any:
    return Qwen3NextConfig(**CONFIG) if interleaved else Qwen3_5TextConfig(**CONFIG)


def test_a_tensor_of_several_projections_is_checked_and_named() -> None:
    tensors = make_reference(False).state_dict()
    coord = ParallelShape().coord(0)
    with pytest.raises(ModelError, match=r"linear_attn.in_proj_qkv.weight is \[80, 23\], expected \[80, 24\]"):
        make_rank(SPEC, tensors | {"in_proj_qkv.weight": tensors["in_proj_qkv.weight"][:, 1:]}, coord)
    del tensors["conv1d.weight"]
    with pytest.raises(ModelError, match=r"3 tensors are missing, .* may be a part of linear_attn.conv1d.weight"):
        make_rank(SPEC, tensors, coord)
