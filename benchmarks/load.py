"""Loads of one shape on a server, for benchmarks that compare systems: `pdserve bench`'s client in a closed loop.

Prompts are token ids, random ones or pieces of English prose, so that all systems get the same tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.prose import prose_ids
from pdserve.bench.client import BenchClient, BenchRecord, BenchTarget
from pdserve.bench.load import LoadOutcome, run_load, single
from pdserve.bench.metrics import summarize
from pdserve.bench.prompts import FIRST_ID

PROMPT_KINDS = ("prose", "ids")
PROMPTS_HELP = "token ids of English prose, or random ones"


def make_prompt(rng: random.Random, length: int, *, vocab_size: int = 1000, prose_of: str | None = None) -> list[int]:
    """`length` random token ids below `vocab_size`, or those of a piece of prose by the tokenizer of `prose_of`."""
    if prose_of is None:
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(length)]
    ids = prose_ids(prose_of)
    start = rng.randrange(len(ids))
    return [ids[(start + index) % len(ids)] for index in range(length)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to `/v1/completions` that are all there at once, at most `concurrency` in flight; lengths in tokens.

    `model`: its name in the requests; None: the first one of `/v1/models`. `timeout_s`: of one request.
    """

    num_prompts: int
    concurrency: int
    input_len: int
    output_len: int
    seed: int
    vocab_size: int = 1000
    prose_of: str | None = None
    model: str | None = None
    timeout_s: float = 3600.0

    def prompts(self) -> list[list[int]]:
        """The same for the same load."""
        rng = random.Random(self.seed)
        return [
            make_prompt(rng, self.input_len, vocab_size=self.vocab_size, prose_of=self.prose_of)
            for _ in range(self.num_prompts)
        ]


def run(load: Load, url: str) -> LoadOutcome:
    """Send all requests; returns when each has ended. A failed one is in its record."""
    return asyncio.run(_run(load, url))


async def _run(load: Load, url: str) -> LoadOutcome:
    sampling = {"temperature": 0.0}
    target = BenchTarget(base_url=url, model=load.model, ignore_eos=True, sampling=sampling, timeout_s=load.timeout_s)
    async with BenchClient(target) as client:
        if load.model is None:
            client.target = dataclasses.replace(target, model=await client.first_model())
        sessions = single(load.prompts(), load.output_len)
        return await run_load(client, sessions, arrivals_s=[0.0] * len(sessions), max_concurrency=load.concurrency)


def figures(records: Sequence[BenchRecord], duration_s: float) -> dict[str, Any]:
    """The figures of `pdserve bench`: `output_throughput`, `median_ttft_ms`, `p99_itl_ms`, ..."""
    return summarize(records, duration_s)


def whole_figures(load: Load, url: str) -> dict[str, Any]:
    """`run` and its figures.

    Raises:
        RuntimeError: a request failed.
    """
    outcome = run(load, url)
    found = figures(outcome.records, outcome.duration_s)
    if found["failed"]:
        raise RuntimeError(f"{url}: {found['error_messages']}")
    return found
