"""Experts that lie whole on ranks of their own compute what the whole model does, wherever they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.memory.layout import KVGroup
from pdserve.model.config import kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.expert_ranks import LENGTHS, NUM_TOKENS, Outcome, build, in_bfloat16, moved, outcome
from tests.unit.executor.gang import Gang

TP2, TP4, BOTH = ParallelShape(tp_size=2), ParallelShape(tp_size=4), ParallelShape(tp_size=2, pp_size=2)
EP2, EP4 = ParallelConfig(tp_size=2, ep_size=2), ParallelConfig(tp_size=4, ep_size=4)
CASES: dict[str, tuple[ParallelShape, ParallelConfig, dict[str, Any]]] = {
    "ep2": (TP2, EP2, {}),
    "ep2, a dense layer, weights that do not add up to 1": (
        TP2, EP2, {"mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "ep4, six experts: two of them twice": (TP4, EP4, {}),
    "ep4, two experts": (TP4, EP4, {"num_experts": 2, "num_experts_per_tok": 1}),
    "ep4, columns that do not divide": (TP4, EP4, {"moe_intermediate_size": 49}),
    "ep2 with copies": (TP2, ParallelConfig(tp_size=2, ep_size=2, ep_num_redundant_experts=3), {}),
    "ep2 x pp2": (BOTH, ParallelConfig(tp_size=2, pp_size=2, ep_size=2), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(CASES, keep=3))
def test_experts_on_ranks_of_their_own_compute_what_the_whole_model_does(name: str, gang: Gang, tmp_path: Path) -> None:
    shape, experts, overrides = CASES[name]
    _check(gang, shape, experts, make_tiny("qwen3_moe", tmp_path, seed=5, **overrides))


def test_experts_start_where_a_file_says(gang: Gang, tmp_path: Path) -> None:
    path = make_tiny("qwen3_moe", tmp_path / "model")
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": [[5, 0, 3, 1, 4, 2]] * 3}))
    _check(gang, TP2, ParallelConfig(tp_size=2, ep_size=2, init_expert_location=str(tmp_path / "map.json")), path)


def test_experts_without_tokens_cost_nothing_and_change_nothing(gang: Gang, tmp_path: Path) -> None:
    """All tokens of the first layer go to experts 0 and 1: the second rank is sent nothing."""
    path = make_tiny("qwen3_moe", tmp_path, num_experts_per_tok=1)
    tensors = load_file(path / "model.safetensors")
    gate = tensors["model.layers.0.mlp.gate.weight"]
    gate[1] = -gate[0]
    gate[2:] = 0.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for rank in _check(gang, TP2, EP2, path):
        assert all(rank.counts[0][:2]) and not any(rank.counts[0][2:])


@pytest.mark.parametrize("kernels", rest_slow(["auto", "torch"]))
@pytest.mark.parametrize("name", ["ep2", "ep4, six experts: two of them twice"])
def test_deterministic_mode_holds_with_experts_on_ranks(name: str, kernels: str, gang: Gang, tmp_path: Path) -> None:
    """In bfloat16, where another order of adding up would show; each rank compares batches, and all ranks agree."""
    shape, experts, _ = CASES[name]
    ranks = gang.run(
        shape, in_bfloat16, make_tiny("qwen3_moe", tmp_path, seed=11), VOCAB_SIZE, experts, kernels, fixed_order=True
    )
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.parametrize(
    ("name", "overlap"),
    [("ep2", False), ("ep4, six experts: two of them twice", True), ("ep2 with copies", False), ("ep2 x pp2", True)],
)
def test_experts_that_move_in_the_middle_of_generation_change_no_token(
    name: str, overlap: bool, gang: Gang, tmp_path: Path
) -> None:
    shape, experts, _ = CASES[name]
    path = make_tiny("qwen3_moe", tmp_path, seed=7)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    ranks = gang.run(shape, moved, path, VOCAB_SIZE, experts, overlap)
    for index, rank in enumerate(ranks):
        stage = shape.tp_size * shape.coord(index).pp_rank
        assert rank.tokens == whole.greedy
        assert rank.after == ranks[stage].after != rank.before, "all ranks of a stage agree on something new"
        assert rank.sound, "a slot has other weights than it should"
        assert rank.balance[1] > rank.balance[0]
    assert sum(rank.num_moved for rank in ranks) > 0


@pytest.mark.parametrize(
    ("experts", "overrides", "field"),
    [
        (ParallelConfig(tp_size=2, ep_size=2, ep_num_redundant_experts=7), {}, "ep_num_redundant_experts"),
        (ParallelConfig(tp_size=2, ep_size=2, init_expert_location="/nowhere"), {}, "init_expert_location"),
        (ParallelConfig(tp_size=2, ep_size=2), {"mlp_only_layers": [0, 1, 2]}, "ep_size"),
        (ParallelConfig(tp_size=2, pp_size=2, ep_size=2, enable_eplb=True), {"mlp_only_layers": [0, 1]}, "enable_eplb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_that_cannot_lie_so_are_refused_by_name(
    experts: ParallelConfig, overrides: dict[str, Any], field: str, tmp_path: Path
) -> None:
    class Elsewhere(SingleRank):
        coord = ParallelShape(tp_size=experts.tp_size, pp_size=experts.pp_size).coord(0)

    with pytest.raises(ConfigError) as error:
        build(Elsewhere(), make_tiny("qwen3_moe", tmp_path, **overrides), experts)
    assert error.value.field == field


def _check(gang: Gang, shape: ParallelShape, experts: ParallelConfig, path: Path) -> list[Outcome]:
    whole = outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig())
    ranks = gang.run(shape, outcome, path, VOCAB_SIZE, experts)
    spec = read_spec(path)
    assert spec.moe is not None
    group: KVGroup = kv_layout(spec, 16, "float32").groups[0]
    num_tokens = sum(LENGTHS) + LENGTHS[1] + (NUM_TOKENS - 1) * (len(LENGTHS) + 1)
    for index, rank in enumerate(ranks):
        assert rank.greedy == whole.greedy and rank.single == whole.single
        layers, (heads, _) = group.layers_of(shape.coord(index)), group.heads_of(shape.coord(index))
        held = whole.pages[:, layers][:, :, :, heads]
        torch.testing.assert_close(rank.pages, held, atol=2e-4, rtol=0.0, equal_nan=True)
        assert rank.counts == {layer: counts for layer, counts in whole.counts.items() if layer in layers}
        assert all(sum(counts) == num_tokens * spec.moe.top_k for counts in rank.counts.values())
        assert rank.num_bytes < whole.num_bytes
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])
    return ranks
