"""What the ranks of tests of the CPU kernels run. Imported by their processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.model.parallel import Parallel
from tests.driver import Driver, random_prompt

CpuKernels = Literal["native", "torch"]
Dtype = Literal["bfloat16", "float32"]
LENGTHS = (70, 3, 1, 40)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank came to: log probabilities of the whole vocabulary `[prompts, vocab]`, greedy tokens."""

    logprobs: torch.Tensor
    greedy: list[list[int]]


def divergence(logprobs: torch.Tensor, wanted: torch.Tensor) -> float:
    """Kullback-Leibler divergence of `[n, vocab]`, the mean over rows."""
    return float((wanted.exp() * (wanted - logprobs)).sum(-1).mean())


def outcome(
    parallel: Parallel, path: Path, vocab_size: int, cpu_kernels: CpuKernels, dtype: Dtype = "bfloat16"
) -> Outcome:
    """Prompts at once, so that there are micro-batches; then in chunks beside rows that decode."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=cpu_kernels),
    )
    driver = Driver(build_executor(config, max_rows=8, parallel=parallel))
    prompts = [random_prompt(length, vocab_size) for length in LENGTHS]
    rows = [driver.open(prompt, len(prompt) + 1, top_logprobs=vocab_size) for prompt in prompts]
    steps = [(row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)]
    logprobs = torch.zeros(len(prompts), vocab_size)
    for line, token in zip(logprobs, driver.step(*steps), strict=True):
        assert token is not None
        ids, values = zip(*token.top, strict=True)
        line[list(ids)] = torch.tensor(values)
    for row in rows:
        driver.close(row)
    return Outcome(logprobs, driver.generate(prompts, 6, chunk=16))
