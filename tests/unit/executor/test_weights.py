"""Other weights in an executor: they compute what a fresh executor computes, and a failure leaves the present ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ModelError
from pdserve.executor.weights import WeightsSource
from pdserve.model.tensor_sources import TensorInMemory
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES, KIMI
from tests.mtp import write_with_mtp
from tests.quantized import SCHEMES, make_groups, write_quantized
from tests.tiny import VOCAB_SIZE, make_tiny

PROMPT = random_prompt(40, VOCAB_SIZE)
NUM_NEW = 12


def tokens(driver: Driver) -> list[int]:
    return driver.generate([PROMPT], NUM_NEW)[0]


def swap(driver: Driver, source: WeightsSource) -> None:
    weights = driver.built.weights
    assert weights is not None
    prepared = weights.prepare(source).result(timeout=60)
    assert prepared is not None
    weights.install(prepared)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return make_tiny("qwen3", root / "a", seed=1), make_tiny("qwen3", root / "b", seed=2)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_executor_computes_with_the_other_weights_and_back(
    pair: tuple[Path, Path], kernels: Literal["native", "torch"]
) -> None:
    expected = [tokens(Driver(build(path, cpu_kernels=kernels, dtype="bfloat16"))) for path in pair]
    assert expected[0] != expected[1]
    driver = Driver(build(pair[0], cpu_kernels=kernels, dtype="bfloat16"))
    fingerprint = driver.built.executor.weights_fingerprint
    assert tokens(driver) == expected[0]
    swap(driver, WeightsSource(str(pair[1])))
    assert tokens(driver) == expected[1] and driver.built.executor.weights_fingerprint != fingerprint
    swap(driver, WeightsSource(str(pair[0])))
    assert tokens(driver) == expected[0] and driver.built.executor.weights_fingerprint == fingerprint


def changed(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, or fields of its config."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    return target


NAME = "model.layers.1.mlp.down_proj.weight"


def test_weights_that_do_not_fit_are_named_and_those_in_use_stay(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[NAME]

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[NAME] = tensors[NAME][:-1].contiguous()

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.extra.weight"] = torch.zeros(2)

    def keep(tensors: dict[str, Tensor]) -> None:
        pass

    driver = Driver(build(pair[0], dtype="bfloat16"))
    weights = driver.built.weights
    assert weights is not None
    expected = tokens(driver)
    for name, path, message in (
        ("missing", changed(pair[1], tmp_path / "missing", drop), f"1 tensors are missing, the first is {NAME}"),
        ("shape", changed(pair[1], tmp_path / "shape", cut), f"tensor {NAME} is "),
        ("extra", changed(pair[1], tmp_path / "extra", add), "model.extra.weight"),
        ("config", changed(pair[1], tmp_path / "config", keep, rms_norm_eps=1e-3), "rms_norm_eps differs"),
        ("nowhere", tmp_path / "nowhere", "there is no model at"),
    ):
        error = weights.prepare(WeightsSource(str(path))).exception(timeout=60)
        assert isinstance(error, ModelError) and message in str(error), (name, error)
    (tmp_path / "missing" / "model.safetensors").write_bytes(b"damaged")
    error = weights.prepare(WeightsSource(str(tmp_path / "missing"))).exception(timeout=60)
    assert isinstance(error, ModelError) and "not a readable safetensors file" in str(error)
    assert tokens(driver) == expected and weights.source.path == str(pair[0])


def test_tensors_replace_those_of_the_files(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = load_file(pair[1] / "model.safetensors")
    driver = Driver(build(pair[0], dtype="bfloat16"))
    swap(driver, WeightsSource(str(pair[0]), overlay={name: TensorInMemory(one) for name, one in other.items()}))
    assert tokens(driver) == tokens(Driver(build(pair[1], dtype="bfloat16")))
    weights = driver.built.weights
    assert weights is not None
    unknown = WeightsSource(str(pair[0]), overlay={"model.extra": TensorInMemory(torch.zeros(2))})
    error = weights.prepare(unknown).exception(timeout=60)
    assert isinstance(error, ModelError) and "model.extra" in str(error)


def test_the_digest_of_sent_tensors_covers_the_weights_that_stay(pair: tuple[Path, Path]) -> None:
    """So servers that began with different weights share no stored pages behind equal updates."""
    name = "model.norm.weight"
    sent = {name: TensorInMemory(load_file(pair[0] / "model.safetensors")[name])}
    digests = []
    for path in pair:
        weights = build(path, dtype="bfloat16").weights
        assert weights is not None
        config = weights._wanted.config
        storage = dataclasses.replace(config.storage, hicache_storage_backend="file")
        weights._wanted = dataclasses.replace(weights._wanted, config=dataclasses.replace(config, storage=storage))
        for _ in range(2):
            prepared = weights.prepare(dataclasses.replace(weights.source, read_tensors=lambda: sent)).result(60)
            assert prepared is not None
            weights.install(prepared)
            digests.append(weights.digest)
    assert len(set(digests)) == 4 and all(digests)


def test_a_second_copy_needs_memory(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = build(pair[0], dtype="bfloat16").weights
    assert weights is not None
    monkeypatch.setattr("pdserve.executor.weights.free_bytes", lambda device: 1 << 10)
    error = weights.prepare(WeightsSource(str(pair[1]))).exception(timeout=60)
    assert isinstance(error, ModelError) and "this host has 0 MB free" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v32", "gpt_oss", "qwen3_moe", "gemma3_text", KIMI])
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_families_take_other_weights(name: str, impl: Literal["native", "transformers"], tmp_path: Path) -> None:
    """Recurrent layers, latents, experts and windows, by the kernels and by transformers."""
    if impl == "transformers" and name in ("deepseek_v32", KIMI):
        pytest.skip("transformers does not run it")
    family = FAMILIES[name]
    paths = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(paths):
        family.write(path, seed)
    expected = [tokens(Driver(build(path, model_impl=impl, dtype="bfloat16"))) for path in paths]
    driver = Driver(build(paths[0], model_impl=impl, dtype="bfloat16"))
    assert tokens(driver) == expected[0] != expected[1]
    swap(driver, WeightsSource(str(paths[1])))
    assert tokens(driver) == expected[1]


@pytest.mark.slow
def test_the_model_that_drafts_changes_with_its_target(tmp_path: Path) -> None:
    speculative = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2)
    paths = [write_with_mtp("qwen3_next", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    fresh = Driver(build(paths[1], dtype="bfloat16", speculative=speculative))
    driver = Driver(build(paths[0], dtype="bfloat16", speculative=speculative))
    swap(driver, WeightsSource(str(paths[1])))
    ours, theirs = driver.built.drafter, fresh.built.drafter
    assert ours is not None and theirs is not None and ours.weight_samples() == theirs.weight_samples()
    assert tokens(driver) == tokens(fresh)


def send_halves(driver: Driver, path: Path) -> None:
    """Send all tensors of the checkpoint at `path`, each second one at a time."""
    weights, tensors = driver.built.weights, sorted(load_file(path / "model.safetensors").items())
    assert weights is not None
    for half in (tensors[::2], tensors[1::2]):
        sent = {name: TensorInMemory(tensor) for name, tensor in half}
        swap(driver, dataclasses.replace(weights.source, read_tensors=lambda sent=sent: sent))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v32", "gpt_oss", "qwen3_moe", "gemma3_text", KIMI])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_families_take_tensors_beside_those_in_use(
    name: str, kernels: Literal["auto", "torch"], tmp_path: Path
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    wide = {"linear_key_head_dim": 16, "linear_value_head_dim": 16} if name == "qwen3_next" else {}
    family = dataclasses.replace(FAMILIES[name], changes={**FAMILIES[name].changes, **wide})
    for seed, path in enumerate(paths):
        family.write(path, seed)
    expected = [tokens(Driver(build(path, cpu_kernels=kernels, dtype="bfloat16"))) for path in paths]
    driver = Driver(build(paths[0], cpu_kernels=kernels, dtype="bfloat16"))
    assert tokens(driver) == expected[0] != expected[1]
    send_halves(driver, paths[1])
    assert tokens(driver) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tensors_of_the_model_that_drafts_are_taken_and_stay(kernels: Literal["auto", "torch"], tmp_path: Path) -> None:
    speculative = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2)
    paths = [write_with_mtp("qwen3_next", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    fresh = Driver(build(paths[1], dtype="bfloat16", cpu_kernels=kernels, speculative=speculative))
    driver = Driver(build(paths[0], dtype="bfloat16", cpu_kernels=kernels, speculative=speculative))
    send_halves(driver, paths[1])
    ours, theirs = driver.built.drafter, fresh.built.drafter
    assert ours is not None and theirs is not None and ours.weight_samples() == theirs.weight_samples()
    assert tokens(driver) == tokens(fresh)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8, block of groups", "awq"])
def test_quantized_weights_stay_packed(scheme: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(paths):
        write_quantized(make_groups("qwen3", tmp_path / f"plain-{seed}", seed=seed), path, SCHEMES[scheme])
    driver = Driver(build(paths[0], dtype="bfloat16"))
    expected = tokens(Driver(build(paths[1], dtype="bfloat16")))
    before = driver.built.executor.weight_bytes
    swap(driver, WeightsSource(str(paths[1])))
    assert tokens(driver) == expected and driver.built.executor.weight_bytes == before
