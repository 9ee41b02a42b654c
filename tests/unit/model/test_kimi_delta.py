"""Kimi Delta Attention in torch: held against its definition in float64 and transformers, in any chunking and split."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.model.attention.interface import LayerStates
from pdserve.model.attention.state_slots import StateSlots, state_rows
from pdserve.model.config import state_planes
from pdserve.model.gated_delta_net import DeltaInputs, GatedDeltaNet, TorchDelta
from pdserve.model.layer_spec import GatedDeltaSpec, LayerNames
from pdserve.model.layers.kernels import FastKernels
from pdserve.model.params import ParamSlots, fingerprint_of
from pdserve.model.tensor_sources import TensorInMemory
from tests.unit.model.delta_kit import (
    defined,
    delta_spec,
    fill_slots,
    host_rows,
    inputs_of,
    part_of,
    planes_of,
    state_pool,
)
from tests.unit.model.test_gated_delta_net import Standing, rows_of

CPU = torch.device("cpu")
HIDDEN, EPS, HEADS, DIM = 24, 1e-5, 4, 8
SPEC = delta_spec((HEADS, HEADS), DIM, DIM, channel_decay=True)
NAMES = LayerNames(
    delta_b="self_attn.b_proj", delta_a_log="self_attn.A_log", delta_dt_bias="self_attn.dt_bias",
    delta_norm="self_attn.o_norm", delta_out="self_attn.o_proj",
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        delta_spec((2, 2), 16, 16, channel_decay=True),
        delta_spec((1, 2), 24, 40, channel_decay=True),
        delta_spec((1, 1), 128, 32, taps=2, channel_decay=True),
    ],
    ids=str,
)
def test_steps_are_the_definition(spec: GatedDeltaSpec) -> None:
    """Prompts of all lengths that begin anywhere, and single tokens; decays from almost none to almost all."""
    spans = [(0, 130), (37, 100), (0, 1), (64, 65), (20, 22), (0, 16)]
    slots = [5, 0, 3, 1, 6, 2]
    host, pool = host_rows(spans, slots), state_pool(spec, 8, torch.float32)
    fill_slots(pool, 1, host, 1)
    inputs = inputs_of(spec, sum(end - start for start, end in spans), torch.float32, 2)
    expected, kept, states = defined(inputs, host, planes_of(pool, 1))
    step = StateSlots(pool, CPU).begin(state_rows(host, CPU)).states(1)
    out = TorchDelta().mix(inputs, step)
    torch.testing.assert_close(out.double(), expected, atol=5e-5, rtol=1e-4)
    planes = planes_of(pool, 1)
    for row, slot in enumerate(slots):
        assert torch.equal(torch.cat([plane[slot].flatten(0, 1) for plane in planes[:3]]).double(), kept[row])
        torch.testing.assert_close(planes[3][slot].double(), states[row], atol=5e-5, rtol=1e-4)
    assert all(bool(plane[slot].isnan().all()) for plane in planes for slot in (4, 7)), "slots of no row"


def in_parts(inputs: DeltaInputs, cuts: Sequence[int], num_prompt: int) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a request whose steps end at `cuts`."""
    pool = state_pool(SPEC, 1, torch.float32)
    outs = []
    for start, end in itertools.pairwise((0, *cuts)):
        host = host_rows([(start, end)], [0])
        host = dataclasses.replace(host, prompts=host.ends.clip(max=num_prompt))
        step = StateSlots(pool, CPU).begin(state_rows(host, CPU)).states(0)
        outs.append(TorchDelta().mix(part_of(inputs, slice(start, end)), step))
    return torch.cat(outs), pool.plane(0, 3)[0].clone()


def test_chunks_on_the_grid_and_tokens_computed_again_have_the_same_bits() -> None:
    inputs = inputs_of(SPEC, 204, torch.float32, 3)
    whole, *others = (in_parts(inputs, cuts, 200) for cuts in ((200, 201, 202, 203, 204), (64, 192, 204), (128, 204)))
    for other in others:
        assert all(map(torch.equal, other, whole))
    cut = in_parts(inputs, (50, 51, 150, 204), 200)
    for got, wanted in zip(cut, whole, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_strong_decays_lose_nothing() -> None:
    """Channels that forget everything within a token beside channels that keep all: no exponent overflows."""
    inputs = inputs_of(SPEC, 130, torch.float32, 4)
    inputs.a[:, ::2] = 60.0
    inputs.a[:, 1::2] = -60.0
    inputs.dt_bias.zero_()
    inputs.a_log.fill_(math.log(16.0))
    host, pool = host_rows([(0, 130)], [0]), state_pool(SPEC, 1, torch.float32)
    expected, _, states = defined(inputs, host, planes_of(pool, 0))
    out = TorchDelta().mix(inputs, StateSlots(pool, CPU).begin(state_rows(host, CPU)).states(0))
    torch.testing.assert_close(out.double(), expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(pool.plane(0, 3)[0].double(), states[0], atol=5e-5, rtol=1e-4)


def make_reference() -> KimiLinearDeltaAttention:
    torch.manual_seed(4)
    module = KimiLinearDeltaAttention(module_config(), 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4)
    return module.eval()


def module_config() -> KimiLinearConfig:
    return KimiLinearConfig(
        hidden_size=HIDDEN, rms_norm_eps=EPS, linear_head_dim=DIM, linear_num_heads=HEADS,
        layer_types=["linear_attention"], num_hidden_layers=1,
    )  # fmt: skip


def in_checkpoint(module: KimiLinearDeltaAttention) -> dict[str, Tensor]:
    """The module's weights by their names in checkpoints."""
    found = {name.removeprefix("forget_gate."): tensor for name, tensor in module.state_dict().items()}
    convs = found.pop("conv1d.weight").chunk(3)
    return found | {f"{part}_conv1d.weight": conv for part, conv in zip("qkv", convs, strict=True)}


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank's layer and its planes of three slots."""

    layer: GatedDeltaNet
    params: ParamSlots
    planes: dict[str, Tensor]


def make_rank(tensors: dict[str, Tensor], coord: RankCoord) -> Rank:
    params = ParamSlots(torch.float32, CPU)
    layer = GatedDeltaNet(SPEC, 0, HIDDEN, EPS, NAMES, params, FastKernels(), Standing(coord))
    for name, tensor in tensors.items():
        params.fill(f"self_attn.{name}", TensorInMemory(tensor))
    params.check_filled("here")
    planes = [plane.of_rank(coord) for plane in state_planes(SPEC, "float32")]
    shapes = {plane.name: (3, plane.num_heads, plane.rows, plane.width) for plane in planes}
    return Rank(layer, params, {name: torch.full(shape, math.nan) for name, shape in shapes.items()})


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_add_up_to_the_module_of_transformers(tp_size: int) -> None:
    """Two rows: a prompt and a token, then a token each."""
    module, lengths = make_reference(), (70, 1)
    tensors, shape = in_checkpoint(module), ParallelShape(tp_size=tp_size)
    ranks = [make_rank(tensors, shape.coord(rank)) for rank in range(tp_size)]
    x = [torch.randn(length + 1, HIDDEN) for length in lengths]
    expected = []
    for row in x:
        cache = DynamicCache(config=module_config())
        with torch.no_grad():
            expected.append([module(part[None], cache_params=cache)[0] for part in (row[:-1], row[-1:])])
    for turn, rows in enumerate((rows_of([0, 0], [*lengths], [*lengths]), rows_of([70, 1], [71, 2], [*lengths]))):
        batch = torch.cat([row[:-1] if turn == 0 else row[-1:] for row in x])
        with torch.inference_mode():
            found = sum(rank.layer(batch, LayerStates(rows, rank.planes)) for rank in ranks)
        torch.testing.assert_close(found, torch.cat([parts[turn] for parts in expected]), atol=2e-5, rtol=1e-4)
    whole = make_rank(tensors, ParallelShape().coord(0))
    merged = fingerprint_of([rank.params.samples() for rank in ranks])
    assert merged == fingerprint_of([whole.params.samples()])
