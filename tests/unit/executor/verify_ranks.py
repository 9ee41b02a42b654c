"""What the ranks of `test_verify_ranks.py` run. Imported by their processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import SampledToken
from pdserve.model.parallel import Parallel
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver
from tests.unit.executor.drafting import Request, by_drafts, by_single_steps, prompt_of, sixteen

DType = Literal["bfloat16", "float32"]


def answers(parallel: Parallel, path: Path, dtype: DType) -> tuple[list[list[SampledToken]], list[list[SampledToken]]]:
    """The tokens of single steps, and of steps with drafts that are guessed alike on all ranks."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype),
        memory=MemoryConfig(page_size=16, max_total_tokens=1 << 14),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    built = build_executor(config, max_rows=48, parallel=parallel)
    grammar = CoreSamplingParams(temperature=1.0, seed=2, grammar=Grammar(kind="regex", text="(ab|cd|e){9}"))
    driver, requests = Driver(built), [*sixteen()[1::3], Request(prompt_of(33), grammar, num_new=9)]
    plain = by_single_steps(driver, requests)
    drafted = by_drafts(driver, requests, plain.ids, random.Random(5))
    assert drafted.num_accepted > 10 and drafted.num_rejected > 10
    built.executor.close()
    return plain.tokens, drafted.tokens
