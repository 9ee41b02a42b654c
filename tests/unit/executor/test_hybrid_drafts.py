"""Whole models with recurrent layers compute rows with drafts: logits and slots are those of single decode steps.

The model is driven without the executor; see `draft_kit` for the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.base.startup_times import StartupTimes
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.errors import ConfigError
from pdserve.executor.model_loading import LoadedModel, load, read_model
from pdserve.executor.pools import PoolSizes, make_pools
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.layout import GroupKind, PageSpace
from pdserve.model.attention.interface import StateBackend
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.parallel import SingleRank
from tests.model_families import FAMILIES, KIMI
from tests.tiny import VOCAB_SIZE
from tests.unit.executor.test_native_hybrid import with_heads
from tests.unit.model.draft_kit import LONGEST, MAX_DRAFTS, NUM_SLOTS, PROMPTS, SLOTS, Row, check_drafts, host_rows
from tests.unit.model.native_kit import needs_kernels

CPU = torch.device("cpu")
PAGE = 16
ROW_PAGES = -(-LONGEST // PAGE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny checkpoint of a family, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("drafts") / name
            with_heads(name).write(made[name])
        return made[name]

    return make


def loaded_model(path: Path, dtype: str, kernels: str, quantization: str | None = None) -> LoadedModel:
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype, quantization=quantization),  # type: ignore[arg-type]
        memory=MemoryConfig(page_size=PAGE),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=kernels),  # type: ignore[arg-type]
    )
    return load(read_model(config, path, CPU, SingleRank(), StartupTimes()))


def empty_pools(loaded: LoadedModel) -> list[GroupPool]:
    """Pools whose bytes are all NaN; without that of the stamps."""
    held = loaded.layout.of_rank(SingleRank().coord)
    sizes = PoolSizes(len(PROMPTS) * ROW_PAGES, GroupPoolSizes(num_slots=NUM_SLOTS))
    pools = [pool for pool in make_pools(held, sizes, CPU, shareable=False) if pool.group.kind is not GroupKind.STAMP]
    for pool in pools:
        pool.pages_as_bytes.fill_(255)
    return pools


class ModelEngine:
    """Implements `draft_kit.Engine` by a whole model: inputs are token ids, outputs logits.

    With `at_once` outputs are the likeliest tokens, and steps without drafts are one call of the kernels.
    """

    def __init__(self, loaded: LoadedModel, *, at_once: bool = False) -> None:
        self._model, self._kernels, self._at_once = loaded.model, loaded.kernels, at_once
        self._pools = empty_pools(loaded)
        self._attention = loaded.bind(self._pools, max_drafts=MAX_DRAFTS)
        self._table = np.arange(len(PROMPTS) * ROW_PAGES, dtype=np.int32)[::-1].reshape(len(PROMPTS), -1).copy()
        self._tokens = np.zeros((len(PROMPTS), LONGEST + MAX_DRAFTS), dtype=np.int32)
        self._slots = np.array(SLOTS, dtype=np.int32)

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randint(VOCAB_SIZE, (num_tokens, 1))

    def step(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        requests, ids = np.array([row.request for row in rows]), x[:, 0] % VOCAB_SIZE
        host = dataclasses.replace(host_rows(rows), pages=self._table[requests])
        if self._at_once and self._kernels is not None and all(row.num_tokens == 1 and row.start for row in rows):
            self._tokens[requests, host.starts] = ids.numpy()
            facts = np.stack((requests, host.starts))
            found = self._kernels.decode(
                facts, self._tokens, self._table, slots=self._slots, folded=host.num_folded
            )  # fmt: skip
            return torch.tensor(found)[:, None].double()
        lines = np.arange(len(rows)).repeat([row.num_tokens for row in rows])
        positions = np.arange(len(ids)) + (host.starts - host.offsets)[lines]
        pages = host.pages[lines, positions // PAGE]
        columns = torch.from_numpy(np.stack((ids.numpy(), positions, pages, positions % PAGE)))
        batch = ForwardBatch(columns, torch.arange(len(ids)), host)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._attention.begin(batch)).double()
        return logits.argmax(1, keepdim=True).double() if self._at_once else logits

    def fold(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        assert isinstance(self._attention, StateBackend)
        self._attention.fold(np.array(slots), np.array(counts))

    def slot(self, slot: int) -> list[Tensor]:
        return [
            pool.plane(layer, plane)[slot].clone()
            for pool in self._pools
            if pool.group.space is PageSpace.SLOTS
            for layer in range(pool.group.num_layers)
            for plane in range(len(pool.group.planes))
        ]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "quantization", "at_once", "seed"),
    [
        ("qwen3_next", None, False, 0), ("qwen3_5_text", "int8", False, 1), ("qwen3_5_moe_text", None, True, 2),
        ("qwen3_next", None, True, 3), (KIMI, None, False, 4),
    ],
)  # fmt: skip
def test_a_model_by_the_kernels_gives_the_bits_of_single_steps(
    name: str, quantization: str | None, at_once: bool, seed: int, checkpoint: Callable[[str], Path]
) -> None:
    single, drafted = (
        ModelEngine(loaded_model(checkpoint(name), "bfloat16", "native", quantization), at_once=at_once)
        for _ in range(2)
    )
    check_drafts(single, drafted, seed, folds=seed % 2 == 0)


@pytest.mark.parametrize("name", ["qwen3_next", KIMI])
def test_a_model_by_torch_gives_what_single_steps_give(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Up to rounding: torch's matrix products depend on the number of rows."""
    path = checkpoint(name)
    single, drafted = (ModelEngine(loaded_model(path, "float32", "torch")) for _ in range(2))

    def alike(got: Tensor, wanted: Tensor) -> bool:
        return torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)

    check_drafts(single, drafted, 4, folds=True, same=alike)


@pytest.mark.slow  # the import of transformers' models takes seconds
def test_a_model_through_transformers_refuses_drafts(tmp_path: Path) -> None:
    FAMILIES["qwen3_next"].write(tmp_path / "model")
    config = ServerConfig(
        model=ModelConfig(model_path=str(tmp_path / "model"), dtype="float32", model_impl="transformers"),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    loaded = load(read_model(config, tmp_path / "model", CPU, SingleRank(), StartupTimes()))
    with pytest.raises(ConfigError, match="runs through transformers and has recurrent layers") as refused:
        loaded.bind(empty_pools(loaded), max_drafts=3)
    assert refused.value.field == "speculative_algorithm"
