"""What the ranks of `test_eagle_ranks.py` run. Imported by their processes."""

from __future__ import annotations

from pathlib import Path

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeAlgorithm, SpeculativeConfig
from pdserve.executor.factory import build_executor
from pdserve.model.parallel import Parallel
from tests.driver import Driver, random_prompt
from tests.tiny import VOCAB_SIZE
from tests.unit.model.eagle_kit import Way

LENGTHS = (40, 3, 17)
NUM_STEPS = 3
Drafts = list[tuple[int, ...]]


def drafts_of(parallel: Parallel, path: Path, draft: Path, algorithm: SpeculativeAlgorithm, way: Way) -> Drafts:
    """Prefill some prompts in two chunks, then decode: the drafts of all rows and steps."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=way.dtype),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=way.kernels),
        speculative=SpeculativeConfig(
            speculative_algorithm=algorithm, speculative_draft_model_path=str(draft), speculative_num_steps=3
        ),
    )
    driver = Driver(build_executor(config, max_rows=8, parallel=parallel))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    rows = [driver.open(prompt, len(prompt) + NUM_STEPS + 1) for prompt in prompts]
    driver.step(*((row, 0, 2, False) for row in rows))
    found: Drafts = []
    starts, ends = [2] * len(rows), list(LENGTHS)
    for _ in range(NUM_STEPS):
        result = driver.result(*((row, s, e, True) for row, s, e in zip(rows, starts, ends, strict=True)))
        found += [result.drafts[index] for index in range(len(rows))]
        starts, ends = ends, [end + 1 for end in ends]
    return found
