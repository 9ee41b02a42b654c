"""Weights are read back by their names in the checkpoint, whatever the ranks and the kernels keep of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pdserve.base import native
from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.config.groups import ModelConfig
from pdserve.errors import ModelError
from pdserve.executor.backend_choice import make_native
from pdserve.model.config import read_model_spec
from pdserve.model.families import FAMILIES as NATIVE
from pdserve.model.loader import empty_model, fill_model
from pdserve.model.named_weights import MAX_VALUES, check_size, joined
from pdserve.model.parallel import SingleRank
from pdserve.model.params import ParamSlots
from tests.model_families import FAMILIES
from tests.tiny import make_tiny
from tests.unit.model.native_kit import needs_kernels

IGNORED = ("model.visual", "visual", "mtp.", "vision_tower", "multi_modal_projector", "model.vision_tower")
CPU = torch.device("cpu")
ONE, TP2, BOTH = ParallelShape(), ParallelShape(tp_size=2), ParallelShape(tp_size=2, pp_size=2)


class Standing(SingleRank):
    """A rank that exchanges nothing."""

    def __init__(self, coord: RankCoord) -> None:
        self.coord = coord


def loaded(path: Path, shape: ParallelShape, *, kernels: bool, quantization: str | None = None) -> list[ParamSlots]:
    """The parameters of all ranks of a model in bfloat16."""
    found = []
    for rank in range(shape.num_ranks):
        decoder = empty_model(read_model_spec(path), "bfloat16", CPU, parallel=Standing(shape.coord(rank)))
        if kernels:
            config = ModelConfig(model_path=str(path), quantization=quantization)  # type: ignore[arg-type]
            decoder.kept = make_native(decoder, config, native.best_level(), nullcontext)  # type: ignore[attr-defined]
        fill_model(decoder, path, load_format="auto", seed=0)
        found.append(decoder.params)
    return found


def rows_of(ranks: list[ParamSlots], name: str, max_rows: int) -> np.ndarray:
    return joined(name, [part for params in ranks for part in params.read(name, max_rows)], max_rows)


def check_all(ranks: list[ParamSlots], path: Path, max_rows: int, tolerance: float = 0.0) -> int:
    num_read = 0
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.startswith(IGNORED):
            continue
        found = torch.from_numpy(rows_of(ranks, name, max_rows))
        wanted = tensor.bfloat16().float()[:max_rows]
        assert found.shape == wanted.shape, name
        close = tensor.float()[:max_rows] if "A_log" in name or "correction" in name or "dt_bias" in name else wanted
        assert torch.allclose(found, close, atol=tolerance * float(tensor.abs().max()), rtol=1e-2), name
        num_read += 1
    return num_read


SEVERAL = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next")
NATIVE_FAMILIES = [name for name in FAMILIES if FAMILIES[name].architecture in NATIVE]


def some_by_default(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SEVERAL else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("family", some_by_default(NATIVE_FAMILIES))
def test_every_tensor_of_a_family_is_read_back(
    family: str, kernels: bool, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(family)
    assert check_all(loaded(path, ONE, kernels=kernels), path, 10_000) > 5


@needs_kernels
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("shape", [TP2, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["tp2", "tp2 pp2"])
@pytest.mark.parametrize("family", some_by_default(["qwen3_moe", "phi3", *SEVERAL]))
def test_ranks_have_parts_of_it(
    family: str, shape: ParallelShape, kernels: bool, family_checkpoint: Callable[[str], Path]
) -> None:
    path = family_checkpoint(family)
    ranks = loaded(path, shape, kernels=kernels)
    assert check_all(ranks, path, 10_000) > 5
    check_all(ranks, path, 3)


@needs_kernels
def test_weights_in_8_bits_are_read_near_their_values(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    ranks = loaded(path, ONE, kernels=True, quantization="int8")
    assert check_all(ranks, path, 10_000, tolerance=0.02) > 5


def test_names_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ranks = loaded(make_tiny("llama", tmp_path), ONE, kernels=False)
    with pytest.raises(ModelError, match="has no tensor"):
        rows_of(ranks, "model.layers.0.nothing", 10)
    with pytest.raises(ModelError, match="a truncate_size of at most 8192"):
        check_size("a", (100_000, 1024), 10_000)
    with pytest.raises(ModelError, match="a single row has more"):
        check_size("a", (2, MAX_VALUES + 1), 1)
    split = loaded(make_tiny("llama", tmp_path / "again"), TP2, kernels=False)
    with pytest.raises(ModelError, match="only a part"):
        rows_of(split[:1], "model.layers.0.mlp.down_proj.weight", 10)
