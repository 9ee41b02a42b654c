"""Weights and KV pools of an executor that are given back to the system, and taken again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ModelError
from pdserve.executor import device_memory
from pdserve.executor.device_memory import DeviceMemory, WeightsCopy, copy_directory, whole_pages
from pdserve.memory import shared
from pdserve.model.named_weights import MemoryRange
from pdserve.protocol.engine_memory import KV_CACHE, WEIGHTS
from tests.driver import Driver, build, random_prompt
from tests.mtp import write_with_mtp
from tests.tiny import VOCAB_SIZE, make_tiny

PROMPT = random_prompt(40, VOCAB_SIZE)
BOTH = (KV_CACHE, WEIGHTS)
ROOMY = {"hidden_size": 128, "linear_key_head_dim": 32, "linear_value_head_dim": 16}


def release_and_restore(driver: Driver, *, is_mapped: bool = False) -> None:
    """The tokens are the same afterwards. The memory is zero meanwhile, unless it is a mapped checkpoint."""
    expected = driver.generate([PROMPT], 8)
    memory = DeviceMemory(driver.built.executor)
    memory.prepare(BOTH)
    assert memory.release(BOTH) > 0
    for one in whole_pages(driver.built.executor.weight_memory()):
        assert is_mapped or ctypes.string_at(one.address, 64) == bytes(64)
    with pytest.raises(ModelError, match="are released"):
        memory.read("model.norm.weight", 1)
    memory.restore(BOTH)
    assert driver.generate([PROMPT], 8) == expected


@pytest.mark.parametrize(
    "flags",
    [{"cpu_kernels": "native"}, {"cpu_kernels": "torch"}, {"quantization": "int8"}],
    ids=lambda flags: "".join(flags.values()),
)
def test_an_executor_computes_the_same_afterwards(flags: dict[str, Any], tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, hidden_size=256, intermediate_size=1024)
    release_and_restore(Driver(build(path, dtype="bfloat16", **flags)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen2_5_vl", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_models_of_all_kinds_do(family: str, family_checkpoint: Callable[[str], Path]) -> None:
    release_and_restore(Driver(build(family_checkpoint(family))), is_mapped=family in ("lfm2", "qwen2_5_vl"))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_drafter_drafts_the_same_afterwards(kernels: Literal["native", "torch"], tmp_path: Path) -> None:
    path = write_with_mtp("qwen3_next", tmp_path, **ROOMY)
    nextn = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2)
    driver = Driver(build(path, dtype="bfloat16", cpu_kernels=kernels, speculative=nextn))

    def drafts() -> object:
        row = driver.open(PROMPT, len(PROMPT) + 4)
        result = driver.result((row, 0, len(PROMPT), True))
        driver.close(row)
        return result.tokens, result.drafts

    expected, memory = drafts(), DeviceMemory(driver.built.executor)
    memory.prepare(BOTH)
    memory.release(BOTH)
    memory.restore(BOTH)
    assert drafts() == expected


def test_ranges_are_whole_pages_each_once() -> None:
    page = 4096
    found = whole_pages([MemoryRange(page + 1, 3 * page), MemoryRange(2 * page, page), MemoryRange(9 * page, 10)])
    assert found == [MemoryRange(2 * page, 2 * page)]


def test_shared_memory_is_freed_in_its_file() -> None:
    memory = shared.allocate(1 << 20)
    memory[:] = b"\1" * len(memory)
    segment = shared.find(shared.address_of(memory), 1 << 20)
    assert segment is not None
    shared.give_back(segment.address, segment.num_bytes)
    assert memory[:] == bytes(1 << 20)
    again = shared.map_whole(segment.descriptor, 1 << 20)
    assert again[:10] == bytes(10)


def test_a_copy_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.ones(1 << 16)
    ranges = whole_pages([MemoryRange(held.data_ptr(), held.nbytes)])

    def full(descriptor: int, piece: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device_memory, "_write", full)
    with pytest.raises(ModelError, match="no copy of the weights"):
        WeightsCopy(ranges)
    assert bool((held == 1).all())
    monkeypatch.setattr(device_memory, "file_system_of", lambda directory: "tmpfs")
    with pytest.raises(ModelError, match="set TMPDIR"):
        copy_directory()
