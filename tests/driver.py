"""Drives an executor without a scheduler: takes pages and rows, prefills in chunks, decodes greedily together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from pdserve.config.groups import (
    AttentionBackendName,
    KernelConfig,
    KVCacheDType,
    LogprobsMode,
    MemoryConfig,
    ModelConfig,
    Quantization,
    ServerConfig,
)
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepResult, run
from pdserve.memory.group_pools import GroupPools
from pdserve.memory.layout import PageSpace, pages_for
from pdserve.memory.lease import GroupLease
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams

GREEDY = CoreSamplingParams(temperature=0.0)


def build(
    path: Path | str,
    *,
    page_size: int = 16,
    max_total_tokens: int = 8192,
    max_rows: int = 8,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    context_length: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    cpu_kernels: Literal["auto", "native", "torch"] = "auto",
    cpu_threads: int = 1,
    quantization: Quantization | None = None,
    attention_backend: AttentionBackendName = "auto",
    disable_cuda_graph: bool = False,
    deterministic: bool = False,
    logprobs_mode: LogprobsMode = "raw",
    model_impl: Literal["auto", "native", "transformers"] = "auto",
    speculative: SpeculativeConfig | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
) -> LoadedEngine:
    """An executor on CPU, with one thread unless told otherwise, or on the CUDA device."""
    return build_executor(
        ServerConfig(
            model=ModelConfig(
                model_path=str(path),
                dtype=dtype,
                load_format=load_format,
                context_length=context_length,
                quantization=quantization,
                logprobs_mode=logprobs_mode,
                model_impl=model_impl,
            ),
            memory=MemoryConfig(page_size=page_size, max_total_tokens=max_total_tokens, kv_cache_dtype=kv_cache_dtype),
            kernels=KernelConfig(
                device=device,
                cpu_threads=cpu_threads,
                cpu_kernels=cpu_kernels,
                attention_backend=attention_backend,
                disable_cuda_graph=disable_cuda_graph,
                enable_deterministic_inference=deterministic,
            ),
            speculative=speculative or SpeculativeConfig(),
        ),
        max_rows=max_rows,
    )


class Driver:
    """Requests on one executor. Pages are given out in a scattered order, and start as NaN everywhere.

    Window pages become NaN again when they fall behind the window.
    """

    def __init__(self, built: LoadedEngine, *, seed: int = 0) -> None:
        self.built = built
        for pool in built.executor.pools:
            pool.pages_as_bytes.fill_(255)
        self._free = list(range(built.num_pages))
        random.Random(seed).shuffle(self._free)
        self._groups = GroupPools(built.layout, built.group_sizes, self._spoil)
        self._leases: dict[int, GroupLease] = {}
        self._steps = itertools.count()

    def open(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: CoreSamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
        top_logprobs: int | None = None,
        logprobs: Logprobs | None = None,
        hidden: HiddenParams | None = None,
        embeds: bytes = b"",
    ) -> int:
        """A row with pages for `max_tokens` tokens in all."""
        needed = pages_for(max_tokens, self.built.executor.layout.page_tokens)
        pages = [self._free.pop() for _ in range(needed)]
        row = self.built.table.open(pages)
        assert row is not None
        prompt_length = len(tokens) if num_prompt is None else num_prompt
        if self._groups.is_used:
            lease = self._groups.reserve(str(row), max_tokens)
            assert lease is not None, "group pools are sized for all rows"
            self._leases[row] = lease
            self.built.table.slots[row] = lease.slot or 0
        logprob_params = logprobs if top_logprobs is None else Logprobs(top=top_logprobs)
        self.built.executor.open_row(
            row, tokens, prompt_length, sampling, logprob_params, hidden=hidden, input_embeds=embeds
        )
        return row

    def close(self, row: int) -> None:
        """Give the row back (its pages are not used again)."""
        if row in self._leases:
            self._groups.end(self._leases.pop(row))
        self.built.executor.close_row(row)
        self.built.table.close(row)

    def step(self, *rows: tuple[int, int, int, bool]) -> list[SampledToken | None]:
        """Run one plan of `(row, start, end, sample)`."""
        return list(self.result(*rows).tokens)

    def result(self, *rows: tuple[int, int, int, bool]) -> StepResult:
        """The same, and all that it gives."""
        return self.run(BatchRow(str(row), row, start, end, take) for row, start, end, take in rows)

    def run(self, rows: Iterable[BatchRow]) -> StepResult:
        """Run one plan of `rows`."""
        plan = BatchPlan(next(self._steps), tuple(rows))
        windowed = self._leases if self.built.layout.window else {}
        released = {row.row: self.cover(row.row, row.start, row.end) for row in plan.rows if row.row in windowed}
        result = run(self.built.executor, plan)
        assert result.step == plan.step
        for row, pages in released.items():
            self._groups.give_back(self._leases[row], pages)
        return result

    def cover(self, row: int, start: int, end: int) -> list[int]:
        """Give the row the window pages of a step; returns those that fell behind the window."""
        if self.built.layout.window == 0:
            return []
        lease = self._leases[row]
        new, released = self._groups.cover(lease, start, end)
        for index in new:
            self.built.table.window[row, index] = lease.window[index]
        return released

    def _spoil(self, space: PageSpace, pages: list[int]) -> None:
        """Fill free pages with NaN."""
        for pool in self.built.executor.pools:
            if pool.group.space is space:
                pool.pages_as_bytes[pages] = 255

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy tokens of each prompt. With `chunk`, one request prefills at a time while those before it decode."""
        rows = [self.open(prompt, len(prompt) + num_tokens) for prompt in prompts]
        computed = [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        while any(len(output) < num_tokens for output in outputs):
            plan, members = [], []
            prefilling = False
            for i, prompt in enumerate(prompts):
                known = len(prompt) + len(outputs[i])
                if len(outputs[i]) == num_tokens or (not outputs[i] and prefilling and chunk is not None):
                    continue
                end = min(known, computed[i] + chunk) if chunk is not None else known
                prefilling = prefilling or not outputs[i]
                plan.append((rows[i], computed[i], end, end == known))
                members.append((i, end))
            for (i, end), token in zip(members, self.step(*plan), strict=True):
                computed[i] = end
                if token is not None:
                    outputs[i].append(token.token_id)
        for row in rows:
            self.close(row)
        return outputs


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """`length` token ids that are not special."""
    generator = torch.Generator().manual_seed(seed * 7919 + length)
    return torch.randint(2, vocab_size, (length,), generator=generator).tolist()
