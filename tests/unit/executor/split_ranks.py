"""What the ranks of `test_split.py` run. Imported by their processes, so nothing heavy but torch is imported here."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.errors import RankError
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.input_batch import MIN_TOKENS, cut_plan, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepHandle, run
from pdserve.executor.model_runner import ModelRunner
from pdserve.executor.token_outputs import TokenOutputParams
from pdserve.memory.kv_memory import PageTable
from pdserve.model.attention.interface import Heads, StepAttention
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.config import kv_layout
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.loader import load_model, read_spec
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs, join
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver, random_prompt
from tests.waiting import wait_until

LoadFormat = Literal["auto", "dummy"]
NUM_PAGES = 120
NUM_TOKENS = 5
CHANCE = CoreSamplingParams(temperature=1.3, seed=7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has come to. `logprobs` `[vocab]` of one row, by token id; `pages` its whole pool of all tokens."""

    greedy: list[list[int]]
    chunked: list[list[int]]
    chance: list[int]
    following: list[int]
    """Tokens after a grammar, and 1 for each step in which another one, which is none, failed."""
    logprobs: torch.Tensor
    prompt: tuple[torch.Tensor, ...]
    """Log probabilities of two prompts' tokens: own, ranks, top ids, top, picked."""
    pages: torch.Tensor
    samples: WeightSamples
    num_bytes: int


def outcome(parallel: Parallel, path: Path, vocab_size: int, overlap: bool, load_format: LoadFormat) -> Outcome:
    """Prompts of many lengths at once (so there are micro-batches), chunked, drawn by chance, and one distribution."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), load_format=load_format),
        memory=MemoryConfig(page_size=16, max_total_tokens=16 * NUM_PAGES * (1 + parallel.coord.rank)),
        schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    built = build_executor(config, max_rows=8, parallel=parallel, agree=lambda most: min(most, NUM_PAGES))
    driver = Driver(built)
    prompts = [random_prompt(length, vocab_size) for length in (1, 15, 40, 90)]
    greedy = driver.generate(prompts, NUM_TOKENS)
    chunked = driver.generate(prompts, NUM_TOKENS, chunk=33)
    return Outcome(
        greedy=greedy,
        chunked=chunked,
        chance=_by_chance(driver, prompts[2]),
        following=_following(driver, prompts[2]),
        logprobs=_distribution(driver, prompts[3], vocab_size),
        prompt=_prompt_logprobs(driver, prompts[2:], vocab_size),
        pages=_end(built),
        samples=built.executor.weight_samples(),
        num_bytes=built.executor.weight_bytes,
    )


def _following(driver: Driver, prompt: list[int]) -> list[int]:
    grammars = [Grammar(kind="regex", text=pattern) for pattern in ("[0-9]{30}", "(")]
    rows = [
        driver.open(prompt, len(prompt) + NUM_TOKENS, CoreSamplingParams(temperature=1.0, seed=3, grammar=grammar))
        for grammar in grammars
    ]
    found, start, end = [], 0, len(prompt)
    for step in range(NUM_TOKENS):
        plan = BatchPlan(100_000 + step, tuple(BatchRow(str(row), row, start, end, True) for row in rows))
        result = run(driver.built.executor, plan)
        found += [_token(result.tokens[0]).token_id, *(1 for index in result.failed if index == 1)]
        start, end = end, end + 1
    for row in rows:
        driver.close(row)
    return found


def _by_chance(driver: Driver, prompt: list[int]) -> list[int]:
    row = driver.open(prompt, len(prompt) + NUM_TOKENS, CHANCE)
    tokens, start, end = [], 0, len(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(_token(driver.step((row, start, end, True))[0]).token_id)
        start, end = end, end + 1
    return tokens


def _distribution(driver: Driver, prompt: list[int], vocab_size: int) -> torch.Tensor:
    row = driver.open(prompt, len(prompt) + 1, top_logprobs=vocab_size)
    token = _token(driver.step((row, 0, len(prompt), True))[0])
    logprobs = torch.full((vocab_size,), float("nan"))
    logprobs[[entry[0] for entry in token.top]] = torch.tensor([entry[1] for entry in token.top])
    return logprobs


def _prompt_logprobs(driver: Driver, prompts: list[list[int]], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Of prompts whose rows are cut by micro-batches and chunks, with wishes of different widths."""
    prompt_logprob_params = [
        Logprobs(top=5, token_ids=(vocab_size - 1, 2), prompt_from=0),
        Logprobs(top=3, prompt_from=7),
    ]
    rows = [
        driver.open(prompt, len(prompt) + 1, logprobs=logprob_params)
        for prompt, logprob_params in zip(prompts, prompt_logprob_params, strict=True)
    ]
    told: list[list[PromptLogprobs]] = [[], []]
    for start, end in ((0, 33), (33, 90)):
        plan = [(row, start, min(end, len(p)), len(p) <= end) for row, p in zip(rows, prompts, strict=True)]
        for index, part in driver.result(*plan).prompts.items():
            told[index].append(part)
    arrays: list[torch.Tensor] = []
    for parts, prompt, logprob_params in zip(told, prompts, prompt_logprob_params, strict=True):
        whole = join(parts, (logprob_params.prompt_from or 0) + 1, len(prompt))
        assert whole is not None, "every token is told of"
        arrays += [torch.from_numpy(array.copy()) for array in whole.arrays()]
    for row in rows:
        driver.close(row)
    return tuple(arrays)


def _end(built: LoadedEngine) -> torch.Tensor:
    built.executor.close()
    return built.executor.pools[0].pages.clone()


def _token(token: SampledToken | None) -> SampledToken:
    assert token is not None
    return token


def in_bfloat16(parallel: Parallel, path: Path, vocab_size: int) -> list[list[int]]:
    """Greedy tokens of a prompt long enough for micro-batches."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="bfloat16"),
        memory=MemoryConfig(page_size=16, max_total_tokens=1024),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    built = build_executor(config, max_rows=4, parallel=parallel)
    return Driver(built).generate([random_prompt(70, vocab_size)], 12)


class Recorded:
    """An attention backend that notes which layers have been written, micro-batch by micro-batch."""

    def __init__(self, inner: TorchAttention) -> None:
        self._inner = inner
        self.written: list[int] = []

    def begin(self, batch: ForwardBatch) -> StepAttention:
        return RecordedStep(self._inner.begin(batch), self.written)


@dataclasses.dataclass
class RecordedStep:
    """One micro-batch of it."""

    inner: StepAttention
    written: list[int]

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        self.written.append(layer)
        return self.inner.attend(layer, heads)


def marked(parallel: Parallel, path: Path) -> tuple[int, int, list[tuple[int, int]]]:
    """Micro-batches, layers, and for each mark `(layer, how many micro-batches had written it)`."""
    spec, cpu = read_spec(path), torch.device("cpu")
    model = load_model(path, spec, "float32", cpu, load_format="auto", seed=0, parallel=parallel)
    layout = kv_layout(spec, 16, "float32")
    pool = KVPool(layout.groups[0].of_rank(parallel.coord), 12, cpu)
    attention, table = Recorded(TorchAttention(pool, spec.attentions[0].num_heads, cpu)), PageTable(1, 12)
    row = table.open(list(range(12)))
    assert row is not None
    parts = cut_plan(BatchPlan(0, (BatchRow("r", row, 0, 150, True),)), parallel.coord.shape.pp_size, MIN_TOKENS["cpu"])
    batches = [read_plan(part, table, np.array([150]), layout) for part in parts]
    marks: list[tuple[int, int]] = []
    tokens = torch.arange(150, dtype=torch.int32).view(1, -1)
    with torch.inference_mode():
        stage = ModelRunner(model, attention)
        logits = stage.logits(
            batches,
            tokens,
            lambda layer: marks.append((layer, attention.written.count(layer))),
            (TokenOutputParams(),) * len(batches),
        )
    assert (logits is not None) == stage.is_sampler
    return len(batches), model.num_layers, marks


def fixed_logprobs(
    parallel: Parallel, path: Path, vocab_size: int, dtype: Literal["float32", "bfloat16"]
) -> tuple[list[float], list[float]]:
    """Deterministic mode: the first tokens' logprobs of prompts that are computed together, and one by one."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1, enable_deterministic_inference=True),
    )
    driver = Driver(build_executor(config, max_rows=8, parallel=parallel))
    prompts = [random_prompt(length, vocab_size) for length in (3, 40, 77)]
    rows = [driver.open(prompt, len(prompt) + 1, top_logprobs=0) for prompt in prompts]
    together = driver.step(*[(row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)])
    rows = [driver.open(prompt, len(prompt) + 1, top_logprobs=0) for prompt in prompts]
    alone = [driver.step((row, 0, len(prompt), True))[0] for row, prompt in zip(rows, prompts, strict=True)]
    return _logprobs(together), _logprobs(alone)


def _logprobs(tokens: list[SampledToken | None]) -> list[float]:
    return [token.logprob for token in tokens if token is not None and token.logprob is not None]


def leave(parallel: Parallel) -> bool:
    """Rank 1 goes; the others want to compute."""
    if parallel.coord.rank == 1:
        return True
    try:
        parallel.all_reduce(torch.ones(3))
    except RankError:
        return True
    return False


def in_turns(parallel: Parallel, path: Path, vocab_size: int, launched: Path) -> list[list[int]]:
    """Greedy tokens of four prompts, a step for each pair of them in turn, as many under way as there are stages.

    Only when the first stage has launched that many does the last one compute its part of the first.
    """
    config = ServerConfig(
        model=ModelConfig(model_path=str(path)),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    driver = Driver(build_executor(config, max_rows=4, parallel=parallel))
    prompts = [random_prompt(length, vocab_size) for length in (1, 15, 40, 9)]
    rows = [driver.open(prompt, len(prompt) + NUM_TOKENS) for prompt in prompts]
    starts, found = [0] * len(prompts), [list[int]() for _ in prompts]
    under_way: deque[StepHandle] = deque()
    coord, executor = parallel.coord, driver.built.executor

    def settle() -> None:
        handle = under_way.popleft()
        for row, token in zip(handle.plan.rows, executor.resolve(handle).tokens, strict=True):
            found[int(row.rid)].append(_token(token).token_id)

    for step in range(2 * NUM_TOKENS):
        if step == coord.shape.pp_size and coord.rank == 0:
            launched.touch()
        elif step == 0 and coord.is_last_stage and coord.rank:
            wait_until(launched.exists, "the first stage goes on before it has tokens", 60.0)
        if len(under_way) == min(2, coord.shape.pp_size):
            settle()
        plan = []
        for index in (0, 1) if step % 2 == 0 else (2, 3):
            end = len(prompts[index]) + len(found[index])
            plan.append(BatchRow(str(index), rows[index], starts[index], end, True))
            starts[index] = end
        under_way.append(executor.launch(BatchPlan(step + 1, tuple(plan))))
    while under_way:
        settle()
    executor.close()
    return found
