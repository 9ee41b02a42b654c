"""Other weights in an executor: they compute what a fresh executor computes, and a failure leaves the present ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ConfigError, ModelError
from pdserve.executor.weights import WeightsSource
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, make_tiny

PROMPT = random_prompt(40, VOCAB_SIZE)
NUM_NEW = 12


def tokens(driver: Driver) -> list[int]:
    return driver.generate([PROMPT], NUM_NEW)[0]


def swap(driver: Driver, source: WeightsSource) -> None:
    weights = driver.built.weights
    assert weights is not None
    weights.install(weights.prepare(source).result(timeout=60))


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
