"""What each rank of a split model with experts does in `test_experts`: a module of its own, for processes import it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.weights import WeightsSource
from pdserve.model.eplb import Row
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.native.weights import Arena, Format, pack, pack_gated
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from pdserve.model.placement import slots_of
from pdserve.model.tensor_sources import TensorInMemory
from tests.driver import Driver, random_prompt

Precision = Literal["auto", "bfloat16", "int8"]
"""The checkpoint's, or what the CPU kernels compute in."""
LENGTHS = (1, 15, 40, 90)
NUM_TOKENS = 6
NOT_EXPERT = "model.norm.weight"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has come to; `counts` by layer of the model, `pages` its whole pool."""

    greedy: list[list[int]]
    single: list[int]
    pages: torch.Tensor
    counts: dict[int, list[int]]
    samples: WeightSamples
    num_bytes: int


def build(
    parallel: Parallel, path: Path, experts: ParallelConfig, *, overlap: bool = False, precision: Precision = "auto"
) -> LoadedEngine:
    """An executor with `experts`' expert flags, computed by torch, or in bfloat16 and int8 by the CPU kernels."""
    config = ServerConfig(
        model=model_config(path, precision),
        parallel=experts,
        memory=MemoryConfig(page_size=16, max_total_tokens=4096),
        schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels="auto" if precision == "auto" else "native"),
    )
    return build_executor(config, max_rows=8, parallel=parallel)


def model_config(path: Path, precision: Precision) -> ModelConfig:
    """The model at `path`."""
    if precision == "auto":
        return ModelConfig(model_path=str(path))
    return ModelConfig(model_path=str(path), dtype="bfloat16", quantization="int8" if precision == "int8" else None)


def outcome(
    parallel: Parallel, path: Path, vocab_size: int, experts: ParallelConfig, precision: Precision = "auto"
) -> Outcome:
    """Prompts of many lengths at once, and one alone: then a decode step has one token, and most ranks none.

    By the kernels, prompts only: where rounding leads to another token, all behind it differs.
    """
    built = build(parallel, path, experts, precision=precision)
    driver, num_tokens = Driver(built), NUM_TOKENS if precision == "auto" else 1
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    return Outcome(
        greedy=driver.generate(prompts, num_tokens),
        single=driver.generate([prompts[1]], num_tokens)[0],
        pages=built.executor.pools[0].pages.clone(),
        counts=built.executor.expert_counts(),
        samples=built.executor.weight_samples(),
        num_bytes=built.executor.weight_bytes,
    )


def in_bfloat16(
    parallel: Parallel, path: Path, vocab_size: int, experts: ParallelConfig, kernels: Literal["torch", "auto"]
) -> list[list[int]]:
    """Greedy tokens; deterministic, and computed together and alone: nothing may depend on the batch."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="bfloat16"),
        parallel=experts,
        memory=MemoryConfig(page_size=16, max_total_tokens=4096),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=kernels, enable_deterministic_inference=True),
    )
    driver = Driver(build_executor(config, max_rows=8, parallel=parallel))
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    together = driver.generate(prompts, NUM_TOKENS, chunk=33)
    assert together == [driver.generate([prompt], NUM_TOKENS)[0] for prompt in prompts]
    return together


@dataclasses.dataclass(frozen=True)
class Moved:
    """Tokens of a generation in whose middle experts moved; rows by layer of the model, before and after."""

    tokens: list[list[int]]
    before: dict[int, Row]
    after: dict[int, Row]
    num_moved: int
    balance: tuple[float, float]
    sound: bool


def moved(
    parallel: Parallel,
    path: Path,
    vocab_size: int,
    experts: ParallelConfig,
    overlap: bool,
    precision: Precision = "auto",
) -> Moved:
    """Plan after the prompts, move two steps later, plan and move once more at once; then check the weights."""
    built = build(parallel, path, experts, overlap=overlap, precision=precision)
    driver, balance = Driver(built), built.executor.experts
    assert balance is not None
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    before, were = rows_of(built), balance.facts()["expert_balancedness"]
    rows = [driver.open(prompt, len(prompt) + NUM_TOKENS) for prompt in prompts]
    ends, tokens = [len(prompt) for prompt in prompts], [[] for _ in prompts]
    starts = [0] * len(prompts)
    for step in range(NUM_TOKENS):
        if step in (1, 4):
            balance.plan()
        if step in (3, 4):
            balance.place()
        plan = [(row, start, end, True) for row, start, end in zip(rows, starts, ends, strict=True)]
        for index, token in enumerate(driver.step(*plan)):
            assert token is not None
            tokens[index].append(token.token_id)
            starts[index], ends[index] = ends[index], ends[index] + 1
        if step == 0:
            were = balance.facts()["expert_balancedness"]
        if step == 3:
            now = balance.facts()["expert_balancedness"]
    built.executor.close()
    return Moved(
        tokens, before, rows_of(built), balance.num_moved, (were, now), has_its_weights(built, path, precision)
    )


def rows_of(built: LoadedEngine) -> dict[int, Row]:
    """Where the experts of this rank's layers lie."""
    return {layer: mixture.row for layer, mixture in whole_experts(built).items()}


def whole_experts(built: LoadedEngine) -> dict[int, ExpertParallelMoe]:
    """This rank's layers whose experts lie whole on ranks."""
    moe_layers = built.executor.moe_layers
    return {layer: mixture for layer, mixture in moe_layers.items() if isinstance(mixture, ExpertParallelMoe)}


def has_its_weights(built: LoadedEngine, path: Path, precision: Precision) -> bool:
    """Whether every slot has the checkpoint's weights of the expert that the row says."""
    tensors = load_file(path / "model.safetensors")
    coord = built.coord
    for layer, mixture in whole_experts(built).items():
        for slot, expert in enumerate(slots_of(mixture.row, coord.shape.tp_size, coord.tp_rank)):
            gate, up, down = (
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            wanted = [torch.cat((gate, up)), down]
            if precision != "auto":
                kind: Format = "int8" if precision == "int8" else "bf16"
                wide, deep = (weight.bfloat16() for weight in wanted)
                packed = (pack_gated(Arena(), kind, wide), pack(Arena(), kind, deep))
                wanted = [tensor[0] for one in packed for tensor in one.tensors]
            if not all(torch.equal(held[slot], one) for held, one in zip(mixture.experts.tensors, wanted, strict=True)):
                return False
    return True


@dataclasses.dataclass(frozen=True)
class Changed:
    """Tokens with the former and the other weights; placements before and after the change, and behind one more plan.

    `sound`: every slot had the weights that it should, after each of these.
    """

    tokens: list[list[list[int]]]
    before: dict[int, Row]
    after: dict[int, Row]
    last: dict[int, Row]
    counted: bool
    sound: bool
    refusal: str
    """Of tensors without those of experts."""


def changed(
    parallel: Parallel, paths: tuple[Path, Path], vocab_size: int, experts: ParallelConfig, precision: Precision
) -> Changed:
    """Move experts, take the weights of the second checkpoint while a plan is made, and carry that plan out."""
    built = build(parallel, paths[0], experts, precision=precision)
    driver, balance, weights = Driver(built), built.executor.experts, built.weights
    assert balance is not None and weights is not None
    Path(experts.init_expert_location).unlink(missing_ok=True)  # all ranks have read it
    prompts, num_tokens = [random_prompt(length, vocab_size) for length in LENGTHS], NUM_TOKENS
    tokens = [driver.generate(prompts, num_tokens)]
    balance.plan()
    balance.place()
    before, sound = rows_of(built), has_its_weights(built, paths[0], precision)
    driver.generate([[token] * 60 for token in (3, 5, 7)], num_tokens)
    balance.plan()
    counts = built.executor.expert_counts()
    prepared = weights.prepare(WeightsSource(str(paths[1]))).result(60)
    assert prepared is not None
    weights.install(prepared)
    one = {NOT_EXPERT: TensorInMemory(torch.zeros(1))}
    partial = weights.prepare(dataclasses.replace(weights.source, read_tensors=lambda: one)).exception(60)
    after, counted = rows_of(built), built.executor.expert_counts() == counts
    sound &= has_its_weights(built, paths[1], precision)
    tokens.append(driver.generate(prompts, num_tokens))
    balance.place()
    sound &= has_its_weights(built, paths[1], precision)
    tokens.append(driver.generate(prompts, num_tokens))
    last = rows_of(built)
    built.executor.close()
    return Changed(tokens, before, after, last, counted, sound, str(partial))
