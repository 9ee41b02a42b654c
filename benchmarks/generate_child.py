"""`transformers` `generate` as a peer: a child process that loads the model once and runs batches when told to.

Who compares (`compare_transformers.py`, `peers.py`) owns the child, sends it jobs through a pipe, and gets back the
same `BenchRecord` that `pdserve bench` makes of a stream, so that all are summarised by one function.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.load import Load
from pdserve.base.process import die_with_parent
from pdserve.bench.client import BenchRecord
from pdserve.bench.load import LoadOutcome
from pdserve.model.paths import resolve_model_path

READY_S = 120.0
BATCH_S = 300.0
END_S = 10.0
GenerateBatch = Callable[[Sequence[Sequence[int]], int], list[BenchRecord]]
"""Prompts and tokens of each answer."""


class GenerateChild:
    """The child, seen from its parent. `start` returns at once; `facts` waits until the model is loaded."""

    def __init__(self, model_path: str, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        flags = (os.getpid(), theirs, model_path, dtype, threads)
        self._process = context.Process(target=_serve, args=flags, name="transformers", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The child's."""
        assert self._process.pid is not None, "started"
        return self._process.pid

    def facts(self) -> dict[str, Any]:
        """Versions and torch threads of the loaded child. Raises RuntimeError when it does not come up."""
        facts: dict[str, Any] = self._receive(READY_S)
        return facts

    def run(self, load: Load) -> LoadOutcome:
        """All requests in batches of its concurrency, one after the other."""
        self._pipe.send((load.prompts(), load.output_len, load.concurrency))
        outcome: LoadOutcome = self._receive(BATCH_S)
        return outcome

    def close(self) -> None:
        """End the process, by its pid."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, timeout_s: float) -> Any:
        """What the child answers."""
        try:
            if not self._pipe.poll(timeout_s):
                raise RuntimeError(f"transformers gave no answer within {timeout_s:g} s")
            answer, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the transformers process ended; its output says why") from None
        if error is not None:
            raise RuntimeError(f"transformers failed:\n{error}")
        return answer


def _serve(parent: int, pipe: Connection, model_path: str, dtype: str, threads: int) -> None:
    """The child's main: answers `(answer, error)` until the parent closes the pipe."""
    die_with_parent(parent)
    try:
        generate, facts = load(model_path, dtype, threads)
        pipe.send((facts, None))
        while True:
            pipe.send((run_batches(generate, *pipe.recv()), None))
    except EOFError:
        return
    except Exception:
        pipe.send((None, traceback.format_exc()))


def run_batches(
    generate: GenerateBatch, prompts: Sequence[Sequence[int]], output_len: int, batch_size: int
) -> LoadOutcome:
    """`prompts` in batches of `batch_size`, in order."""
    began = time.perf_counter()
    records: list[BenchRecord] = []
    for first in range(0, len(prompts), batch_size):
        start_s = time.perf_counter() - began
        found = generate(prompts[first : first + batch_size], output_len)
        records += [dataclasses.replace(record, start_s=start_s) for record in found]
    return LoadOutcome(records=records, duration_s=time.perf_counter() - began)


def padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids padded on the left to the longest, and the attention mask: 0 where there is padding."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return ids, [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]


def load(model_path: str, dtype: str, threads: int) -> tuple[GenerateBatch, dict[str, Any]]:
    """The model in transformers on CPU: a function that runs one batch, and what ran it."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    class Stamps(StoppingCriteria):
        """Notes when each step has its tokens, and never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model_path(model_path), dtype=dtype)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], output_len: int) -> list[BenchRecord]:
        began = time.perf_counter()
        ids, mask = padded(prompts, pad_id=0)
        stamps = Stamps()
        tokens = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=output_len,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        assert tokens.shape[1] == len(ids[0]) + output_len == len(ids[0]) + len(stamps.times), "ended early"
        arrivals_s = [at - began for at in stamps.times]
        return [
            BenchRecord(
                arrivals_s=arrivals_s, end_s=arrivals_s[-1], prompt_tokens=len(prompt), output_tokens=output_len
            )
            for prompt in prompts
        ]

    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }
    return generate, facts
