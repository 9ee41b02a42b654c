"""What the ranks of `split_checks` run. Imported by their processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.memory.layout import GroupKind, PageSpace
from pdserve.model.config import kv_layout
from pdserve.model.eplb import Row
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from pdserve.transfer.plan import plan_flow, shard_flows
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
        if pool.group.kind is not GroupKind.STAMP
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


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """What a prefill rank has: each prompt's first token, its pages and its slot, and the rank's pools by group."""

    tokens: list[int]
    pages: list[dict[PageSpace, list[int]]]
    pools: dict[str, torch.Tensor]


def prefill(parallel: Parallel, path: Path, vocab_size: int, split: ParallelConfig) -> Prefilled:
    """Compute prompts, two of them in chunks."""
    built = build(parallel, path, split)
    driver = Driver(built)
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    rows = [driver.open(prompt, len(prompt) + 1) for prompt in prompts]
    cuts = [len(prompt) // 2 if index % 2 else 0 for index, prompt in enumerate(prompts)]
    driver.step(*[(row, 0, cut, False) for row, cut in zip(rows, cuts, strict=True) if cut])
    plan = [(row, cut, len(prompt), True) for row, cut, prompt in zip(rows, cuts, prompts, strict=True)]
    tokens = [token.token_id for token in driver.step(*plan) if token is not None]
    pages = [pages_of(built, row, len(prompt)) for row, prompt in zip(rows, prompts, strict=True)]
    pools = {pool.group.name: pool.pages_as_bytes.clone() for pool in built.executor.pools}
    built.executor.close()
    return Prefilled(tokens, pages, pools)


def pages_of(built: LoadedEngine, row: int, num_tokens: int) -> dict[PageSpace, list[int]]:
    """Return the pages of a row's first `num_tokens` tokens that the next token reads, and its slot."""
    count, layout = built.layout.pages_for(num_tokens), built.layout
    found = {
        PageSpace.TOKENS: built.table.pages[row, :count].tolist(),
        PageSpace.SLOTS: [int(built.table.slots[row])],
    }
    if layout.window:
        numbers = layout.window_pages(num_tokens, num_tokens)
        found[PageSpace.WINDOW] = built.table.window[row, numbers.start : numbers.stop].tolist()
    return found


def decode(
    parallel: Parallel,
    path: Path,
    vocab_size: int,
    split: ParallelConfig,
    source: ParallelShape,
    ranks: list[Prefilled],
) -> list[list[int]]:
    """Copy this rank's part from the pools of the prefill ranks, and generate the rest."""
    built = build(parallel, path, split)
    driver, coord = Driver(built, seed=1), built.coord
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    tokens = [[token] for token in ranks[0].tokens]
    driver.open([0], 1)  # so that slots differ from those of prefill
    rows = [
        driver.open([*prompt, *first], len(prompt) + NUM_TOKENS, num_prompt=len(prompt))
        for prompt, first in zip(prompts, tokens, strict=True)
    ]
    for row, prompt in zip(rows, prompts, strict=True):
        driver.cover(row, len(prompt), len(prompt))
    pools = {pool.group.name: pool for pool in built.executor.pools}
    for group in kv_layout(built.spec, 16, "float32").groups:
        for flow in shard_flows(group, source, coord.shape):
            if flow.destination_rank != coord.rank:
                continue
            taken, given = ranks[flow.source_rank].pools[group.name].flatten(), pools[group.name].pages_as_bytes
            for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                theirs = ranks[flow.source_rank].pages[index][group.space]
                ours = pages_of(built, row, len(prompt))[group.space]
                for copy in plan_flow(group, source.coord(flow.source_rank), coord, flow, theirs, ours):
                    part = taken[copy.source : copy.source + copy.num_bytes]
                    given.view(-1)[copy.destination : copy.destination + copy.num_bytes] = part
    for step in range(NUM_TOKENS - 1):
        plan = [(row, len(p) + step, len(p) + step + 1, True) for row, p in zip(rows, prompts, strict=True)]
        for found, token in zip(tokens, driver.step(*plan), strict=True):
            assert token is not None
            found.append(token.token_id)
    built.executor.close()
    return tokens
