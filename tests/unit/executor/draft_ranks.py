"""What the ranks of `test_drafter_split.py` run. Imported by their processes."""

from __future__ import annotations

from pathlib import Path

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.factory import build_executor
from pdserve.model.parallel import Parallel
from tests.driver import Driver, random_prompt

LENGTHS = (1, 40, 16)
NUM_TOKENS, NUM_DRAFTS = 4, 3
Drafted = tuple[tuple[int, ...], tuple[int, ...]]
"""The known tokens behind a step, and the drafts behind them."""


def drafted(
    parallel: Parallel, path: Path, vocab_size: int, split: ParallelConfig, kernels: KernelConfig
) -> list[Drafted]:
    """What this rank has drafted behind prompts, and steps, that run at once."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), model_impl="native",
                          dtype="float32" if kernels.cpu_kernels == "torch" else "bfloat16"),
        parallel=split,
        memory=MemoryConfig(page_size=16, max_total_tokens=16 * 60),
        kernels=kernels,
        speculative=SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=NUM_DRAFTS),
    )  # fmt: skip
    built = build_executor(config, max_rows=8, parallel=parallel, agree=lambda most: most)
    driver = Driver(built)
    known = [random_prompt(length, vocab_size) for length in LENGTHS]
    rows, starts, found = [driver.open(prompt, len(prompt) + NUM_TOKENS) for prompt in known], [0] * len(known), []
    for _ in range(NUM_TOKENS):
        result = driver.result(*[(row, s, len(k), True) for row, s, k in zip(rows, starts, known, strict=True)])
        for index, token in enumerate(result.tokens):
            assert token is not None
            starts[index] = len(known[index])
            known[index].append(token.token_id)
            found.append((tuple(known[index]), result.drafts[index]))
    built.executor.close()
    return found
