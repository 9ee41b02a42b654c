"""Drives an executor with steps launched ahead: requests that come and go, chunks beside decoding, no scheduler.

Which rows a step has is known beforehand, so that every depth launches the very same plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections import deque
from pathlib import Path
from typing import Literal

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepHandle, StepResult
from pdserve.memory.layer_events import LayerEvents
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver, random_prompt
from tests.tiny import VOCAB_SIZE

CHUNK = 13
_SCHEMA = '{"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 9}'


@dataclasses.dataclass(frozen=True)
class Request:
    """One request; its row is opened right before step `arrives`."""

    prompt: tuple[int, ...]
    num_new: int
    arrives: int
    sampling: CoreSamplingParams
    top_logprobs: int | None = None

    def ranges(self) -> list[tuple[int, int, bool]]:
        """`(start, end, sample)` of its steps, one after the other from `arrives` on."""
        length = len(self.prompt)
        cuts = [*range(0, length, CHUNK), *range(length, length + self.num_new)]
        return [(start, end, end >= length) for start, end in itertools.pairwise(cuts)]


def requests(*, grammars: bool = True) -> list[Request]:
    """Greedy, seeded, penalised; some with log-probabilities; some arrive while others compute. The last two follow
    grammars, and are left out without `grammars`.
    """
    kinds = [
        (CoreSamplingParams(temperature=0.0), None),
        (CoreSamplingParams(temperature=1.2, seed=5, top_k=40, logit_bias={7: 3.0}), 2),
        (CoreSamplingParams(temperature=1.0, seed=6, repetition_penalty=1.4, frequency_penalty=0.7), 0),
        (CoreSamplingParams(temperature=0.0, presence_penalty=1.5, min_new_tokens=4, stop_token_ids=(9,)), None),
        (CoreSamplingParams(temperature=1.5, seed=8, top_p=0.9, repetition_penalty=1.2), 3),
        (CoreSamplingParams(temperature=0.0, frequency_penalty=1.0), 1),
        (CoreSamplingParams(temperature=1.0, seed=9, grammar=Grammar(kind="regex", text="([0-9]{2},)+x[a-f]{40}")), 2),
        (CoreSamplingParams(temperature=0.0, grammar=Grammar(kind="json_schema", text=_SCHEMA)), None),
    ]
    return [
        Request(tuple(random_prompt(5 + 9 * i, VOCAB_SIZE, seed=i)), 9 + i, 3 * i, sampling, top)
        for i, (sampling, top) in enumerate(kinds)
        if grammars or sampling.grammar is None
    ]


def build_ahead(
    path: Path, *, overlap: bool, device: Literal["cpu", "cuda"] = "cpu", page_size: int = 16, max_rows: int = 6
) -> LoadedEngine:
    """An executor whose steps may be launched ahead; the caller closes it."""
    return build_executor(
        ServerConfig(
            model=ModelConfig(model_path=str(path), dtype="float32"),
            memory=MemoryConfig(page_size=page_size, max_total_tokens=4096),
            schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
            kernels=KernelConfig(device=device, cpu_threads=1),
        ),
        max_rows=max_rows,
    )


def generate_ahead(
    built: LoadedEngine, wanted: list[Request], *, depth: int, layer_events: bool = False
) -> list[StepResult]:
    """The result of every step, with up to `depth` of them unresolved at once."""
    driver, executor = Driver(built), built.executor
    ranges = [request.ranges() for request in wanted]
    rows: dict[int, int] = {}
    flying: deque[tuple[int, StepHandle]] = deque()
    results: list[StepResult] = []

    def resolve() -> None:
        step, handle = flying.popleft()
        results.append(executor.resolve(handle))
        for i in [i for i in rows if wanted[i].arrives + len(ranges[i]) == step + 1]:
            driver.close(rows.pop(i))

    for step in range(max(one.arrives + len(todo) for one, todo in zip(wanted, ranges, strict=True))):
        plan = []
        for i, request in enumerate(wanted):
            if step == request.arrives:
                limit = len(request.prompt) + request.num_new
                rows[i] = driver.open(request.prompt, limit, request.sampling, top_logprobs=request.top_logprobs)
            if 0 <= step - request.arrives < len(ranges[i]):
                plan.append(BatchRow(str(i), rows[i], *ranges[i][step - request.arrives]))
        flying.append((step, executor.launch(BatchPlan(step, tuple(plan)), layer_events=layer_events)))
        if len(flying) == depth:
            resolve()
    while flying:
        resolve()
    return results


def written_within(events: LayerEvents, num_layers: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds until the first `num_layers` layers are written; False when they are not by
    then, or never will be.
    """
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    events.when_written(num_layers, answers.put)
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False


def token_ids(results: list[StepResult]) -> list[list[int | None]]:
    """Only the tokens."""
    return [[None if token is None else token.token_id for token in result.tokens] for result in results]


def sampled(results: list[StepResult]) -> list[SampledToken]:
    """All tokens of all steps."""
    return [token for result in results for token in result.tokens if token is not None]
