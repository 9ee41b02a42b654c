"""A family is data: torch and the CPU kernels follow the names and the order of sublayers that it gives."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file, save_file

import pdserve
from pdserve.errors import ModelError
from pdserve.model.families import FAMILIES
from pdserve.model.families.family import Family, HFConfig, read_windows
from pdserve.model.families.llama import LLAMA
from pdserve.model.families.qwen3_moe import QWEN3_MOE
from pdserve.model.layer_spec import DecoderLayerSpec, LayerNames, WeightNames
from pdserve.model.loader import read_spec
from pdserve.model.rope import RopeSpec
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.native_kit import needs_kernels

PACKAGE = Path(pdserve.__file__).parent
PROMPT = random_prompt(50, VOCAB_SIZE)
NAMES = WeightNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    head="out",
    layers="transformer.h.{layer}.",
    layer=LayerNames(
        q="attn.query",
        k="attn.key",
        v="attn.value",
        o="attn.out",
        q_norm="attn.query_ln",
        k_norm="attn.key_ln",
        gate="mlp.w1",
        up="mlp.w3",
        down="mlp.w2",
        router="moe.router",
        expert_gate="moe.{expert}.w1",
        expert_up="moe.{expert}.w3",
        expert_down="moe.{expert}.w2",
    ),
)


def reversed_layers(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    """Llama's layers with the feed-forward before attention."""
    layers = LLAMA.read_layers(config, rope, where)
    return tuple(DecoderLayerSpec(layer.sublayers[::-1]) for layer in layers)


def renamed(name: str) -> str:
    """The name in `NAMES` of a tensor that has one of Qwen3-MoE's names."""
    old, new = WeightNames(), NAMES
    stem, _, kind = name.rpartition(".")
    for field in ("embedding", "norm", "head"):
        if stem == getattr(old, field):
            return f"{getattr(new, field)}.{kind}"
    layer, expert = stem.split(".")[2], stem.split(".")[5] if ".experts." in stem else ""
    inside = stem.removeprefix(old.layers.format(layer=layer))
    known = {value.format(expert=expert): vars(new.layer)[field] for field, value in vars(old.layer).items()}
    return f"{new.layers.format(layer=layer)}{known.get(inside, inside).format(expert=expert)}.{kind}"


def with_family(path: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register `family` and make it the checkpoint's."""
    monkeypatch.setitem(FAMILIES, family.architecture, family)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [family.architecture]}))
    return path


def tokens_of(path: Path, kernels: Literal["native", "torch"]) -> list[list[int]]:
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if kernels == "native" else "float32"
    return Driver(build(path, dtype=dtype, cpu_kernels=kernels)).generate([PROMPT], 6)


@needs_kernels
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_family_names_its_tensors(
    kernels: Literal["native", "torch"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("qwen3_moe", tmp_path, mlp_only_layers=[1], tie_word_embeddings=False)
    expected = tokens_of(path, kernels)
    tensors = load_file(path / "model.safetensors")
    save_file({renamed(name): value for name, value in tensors.items()}, path / "model.safetensors")
    assert not {renamed(name) for name in tensors} & tensors.keys()
    with_family(path, dataclasses.replace(QWEN3_MOE, architecture="Renamed", names=NAMES), monkeypatch)
    assert tokens_of(path, kernels) == expected


@needs_kernels
def test_both_decoders_run_sublayers_in_the_order_of_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama", tmp_path)
    usual = tokens_of(path, "torch")
    with_family(path, dataclasses.replace(LLAMA, architecture="Other", read_layers=reversed_layers), monkeypatch)
    native, torchs = tokens_of(path, "native"), tokens_of(path, "torch")
    assert native == torchs != usual


def test_layers_of_equal_kinds_are_one_object(tmp_path: Path) -> None:
    spec = read_spec(make_tiny("qwen3_moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[2]))
    assert len({id(layer) for layer in spec.layers}) == 2
    assert [type(op).__name__ for op in spec.operations] == ["AttentionSpec", "MoeSpec", "MLPSpec"]
    assert spec.moe_layers == (0, 1, 3)


def test_a_family_is_found_by_its_folder_and_listed_nowhere_else() -> None:
    folders = [path.parent.name for path in PACKAGE.glob("model/families/*/__init__.py")]
    declared = [importlib.import_module(f"pdserve.model.families.{folder}").FAMILIES for folder in folders]
    assert all(declared)
    assert {family.architecture for families in declared for family in families} == FAMILIES.keys()
    others = [path for path in PACKAGE.rglob("*.py") if "families" not in path.parts]
    assert len(others) > 300
    listed = re.compile(rf"\b({'|'.join(FAMILIES)})\b")
    assert [path for path in others if listed.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (8, 8, None)),
        ({"use_sliding_window": False}, (None, None, None)),
        ({"sliding_window": None}, (None, None, None)),
        ({"layer_types": None, "max_window_layers": 1}, (None, 8, 8)),
        ({"layer_types": None}, (None, None, None)),
    ],
)
def test_windows_are_read_by_layer(changes: dict[str, object], windows: tuple[int | None, ...]) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    assert read_windows(config | changes, "here") == windows


def test_layer_types_that_are_not_as_many_as_the_layers_are_refused() -> None:
    config = {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"],
    }  # fmt: skip
    with pytest.raises(ModelError, match="layer_types has 1 entries"):
        read_windows(config, "here")
