"""What each rank of a split model with experts does in `test_experts`: a module of its own, for processes import it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ScheduleConfig, ServerConfig
from pdserve.executor.factory import Built, build_executor
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from tests.driver import Driver, random_prompt

LENGTHS = (1, 15, 40, 90)
NUM_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has come to; `counts` by layer of the model, `pages` its whole pool."""

    greedy: list[list[int]]
    single: list[int]
    pages: torch.Tensor
    counts: dict[int, list[int]]
    samples: WeightSamples
    num_bytes: int


def build(parallel: Parallel, path: Path, experts: ParallelConfig, *, overlap: bool = False) -> Built:
    """An executor with `experts`' expert flags."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path)),
        parallel=experts,
        memory=MemoryConfig(max_total_tokens=4096),
        schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    return build_executor(config, max_rows=8, parallel=parallel)


def outcome(parallel: Parallel, path: Path, vocab_size: int, experts: ParallelConfig) -> Outcome:
    """Prompts of many lengths at once, and one alone: then a decode step has one token, and most ranks none."""
    built = build(parallel, path, experts)
    driver = Driver(built)
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    return Outcome(
        greedy=driver.generate(prompts, NUM_TOKENS),
        single=driver.generate([prompts[1]], NUM_TOKENS)[0],
        pages=built.executor.pools[0].pages.clone(),
        counts=built.executor.expert_counts(),
        samples=built.executor.weight_samples(),
        num_bytes=built.executor.weight_bytes,
    )
