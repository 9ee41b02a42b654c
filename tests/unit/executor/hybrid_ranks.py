"""What the ranks of `test_hybrid_split.py` run. Imported by their processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.model.eplb import Row
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from tests.driver import Driver, random_prompt

LENGTHS = (1, 64, 40, 130)
NUM_TOKENS = 6
NUM_PAGES = 120


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has come to. `planes` by layer of the model and name of the plane: all pages or slots."""

    greedy: list[list[int]]
    chunked: list[list[int]]
    planes: dict[tuple[int, str], torch.Tensor]
    samples: WeightSamples
    num_bytes: int


def build(parallel: Parallel, path: Path, split: ParallelConfig) -> LoadedEngine:
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="float32", model_impl="native"),
        parallel=split,
        memory=MemoryConfig(page_size=16, max_total_tokens=16 * NUM_PAGES),
        schedule=ScheduleConfig(disable_overlap_schedule=True),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels="torch"),
    )
    return build_executor(config, max_rows=8, parallel=parallel, agree=lambda most: min(most, NUM_PAGES))


def outcome(parallel: Parallel, path: Path, vocab_size: int, split: ParallelConfig) -> Outcome:
    """Prompts of many lengths at once (so there are micro-batches), and in chunks."""
    built = build(parallel, path, split)
    driver = Driver(built)
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    greedy = driver.generate(prompts, NUM_TOKENS)
    chunked = driver.generate(prompts, NUM_TOKENS, chunk=33)
    planes = {
        (number, plane.name): pool.plane(local, index)[: pool.num_pages].clone()
        for pool in built.executor.pools
        for local, number in enumerate(pool.group.layers)
        for index, plane in enumerate(pool.group.planes)
    }
    built.executor.close()
    return Outcome(greedy, chunked, planes, built.executor.weight_samples(), built.executor.weight_bytes)


def moved(parallel: Parallel, path: Path, vocab_size: int, split: ParallelConfig) -> tuple[list[list[int]], list[Row]]:
    """Greedy tokens of a generation in whose middle experts move, and where the experts lie at the end."""
    built = build(parallel, path, split)
    driver, balance = Driver(built), built.executor.experts
    assert balance is not None
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    rows = [driver.open(prompt, len(prompt) + NUM_TOKENS) for prompt in prompts]
    starts, ends = [0] * len(prompts), [len(prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(NUM_TOKENS):
        if step == 1:
            balance.plan()
        if step == 3:
            balance.place()
        plan = [(row, start, end, True) for row, start, end in zip(rows, starts, ends, strict=True)]
        for index, token in enumerate(driver.step(*plan)):
            assert token is not None
            tokens[index].append(token.token_id)
            starts[index], ends[index] = ends[index], ends[index] + 1
    built.executor.close()
    mixtures = built.executor.moe_layers.values()
    return tokens, [mixture.row for mixture in mixtures if isinstance(mixture, ExpertParallelMoe)]
