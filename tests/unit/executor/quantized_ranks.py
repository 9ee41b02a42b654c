"""What the ranks of `test_quantized_models.py` run. Imported by their processes."""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, Quantization, ServerConfig
from pdserve.errors import ConfigError
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from tests.driver import Driver, random_prompt
from tests.tiny import VOCAB_SIZE

LENGTHS = (40, 3, 1, 21)


def logprobs_of(
    parallel: Parallel, path: Path, quantization: Quantization | None, ep_size: int = 1
) -> tuple[torch.Tensor, WeightSamples, int]:
    """Log probabilities after prompts, `[prompts, vocab]`, of the CPU kernels; samples and bytes of the weights."""
    built = _built(parallel, path, quantization, ep_size)
    driver = Driver(built)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    rows = [driver.open(prompt, len(prompt) + 1, top_logprobs=VOCAB_SIZE) for prompt in prompts]
    steps = [(row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)]
    logprobs = torch.zeros(len(prompts), VOCAB_SIZE)
    for line, token in zip(logprobs, driver.step(*steps), strict=True):
        assert token is not None
        ids, values = zip(*token.top, strict=True)
        line[list(ids)] = torch.tensor(values)
    return logprobs, built.executor.weight_samples(), built.executor.weight_bytes


def refusal_of(parallel: Parallel, path: Path, quantization: Quantization | None) -> tuple[str | None, str] | None:
    """Field and message of the error that a start gives; None: it starts."""
    try:
        _built(parallel, path, quantization, 1)
    except ConfigError as error:
        return error.field, str(error)
    return None


def _built(parallel: Parallel, path: Path, quantization: Quantization | None, ep_size: int) -> LoadedEngine:
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), quantization=quantization),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels="native"),
        parallel=ParallelConfig(ep_size=ep_size, tp_size=parallel.coord.shape.tp_size),
    )
    return build_executor(config, max_rows=8, parallel=parallel)
