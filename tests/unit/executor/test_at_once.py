"""Steps that one call computes come to what they come to otherwise, and only those go this way that may."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch

from pdserve.base.native import best_level
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.backend_choice import make_native
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import kv_layout
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.loader import empty_model, read_spec
from pdserve.model.native.decoder import FEW_SAMPLES, NativeDecoder
from pdserve.model.parallel import Parallel, SingleRank, StageRanks
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.model.native_kit import needs_kernels

MOST_ROWS = FEW_SAMPLES + 4
TinyCheckpoint = Callable[[Family], Path]


def driver_of(path: Path, *, page_size: int = 16, quantization: Literal["int8"] | None = None) -> Driver:
    return Driver(build(path, dtype="bfloat16", page_size=page_size, max_rows=MOST_ROWS, quantization=quantization))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was computed by one call; of models that are built after this."""
    decode, found = NativeDecoder.decode, list[int]()

    def counting(self, facts, *tables):  # type: ignore[no-untyped-def]
        found.append(facts.shape[1])
        return decode(self, facts, *tables)

    monkeypatch.setattr(NativeDecoder, "decode", counting)
    return found


@needs_kernels
@pytest.mark.parametrize(
    ("family", "page_size", "quantization"), [("llama", 16, None), ("qwen3", 1, "int8"), ("qwen3_moe", 48, None)]
)
def test_tokens_and_kv_are_the_same_to_the_bit(
    family: Family,
    page_size: int,
    quantization: Literal["int8"] | None,
    tiny_checkpoint: TinyCheckpoint,
    counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any rows in any step: chunks of prompts, rows that decode, few and many, those that came just now."""
    path = tiny_checkpoint(family)
    one = driver_of(path, page_size=page_size, quantization=quantization)
    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "max_native_rows", 0)
        two = driver_of(path, page_size=page_size, quantization=quantization)
    choice = random.Random(page_size)
    prompts = [random_prompt(choice.randrange(1, 70), VOCAB_SIZE, seed) for seed in range(MOST_ROWS)]
    known, computed, rows = [len(prompt) for prompt in prompts], [0] * MOST_ROWS, list[int]()
    for step in range(60):
        for driver in (one, two):
            for prompt in prompts[step : step + 1]:
                row = driver.open(prompt, len(prompt) + 64)
        if step < MOST_ROWS:
            rows.append(row)
        decoding = [i for i in range(len(rows)) if known[i] - computed[i] == 1]
        waiting = [i for i in range(len(rows)) if known[i] - computed[i] > 1]
        members = choice.sample(decoding, choice.randrange(len(decoding) + 1))
        if step % 3 == 0 or not members:
            members += waiting[:1]
        plan = []
        for i in members:
            end = min(known[i], computed[i] + choice.randrange(1, 40))
            plan.append((rows[i], computed[i], end, end == known[i]))
            computed[i] = end
        if not plan:
            continue
        tokens = one.step(*plan)
        assert tokens == two.step(*plan)
        for i, token in zip(members, tokens, strict=True):
            known[i] += token is not None
    assert len(counts) > 10 and max(counts) > 5
    for ours, theirs in zip(one.built.executor.pools, two.built.executor.pools, strict=True):
        torch.testing.assert_close(ours.pages, theirs.pages, rtol=0, atol=0, equal_nan=True)
    left = [(row, computed[i], known[i], True) for i, row in enumerate(rows)]
    assert one.step(*left) == two.step(*left), "the tokens that were chosen last are where they should be"


@needs_kernels
def test_what_is_asked_for_besides_goes_the_long_way(tiny_checkpoint: TinyCheckpoint, counts: list[int]) -> None:
    driver = driver_of(tiny_checkpoint("llama"))

    def decoding(sampling: CoreSamplingParams = GREEDY, logprobs: Logprobs | None = None) -> int:
        row = driver.open([5, 6, 7], 40, sampling, logprobs=logprobs)
        driver.step((row, 0, 3, True))
        return row

    plain = decoding()
    driver.step((plain, 3, 4, True))
    assert counts == [1]
    others = [
        decoding(CoreSamplingParams(temperature=1.0, seed=1)),
        decoding(GREEDY, Logprobs(top=1)),
        decoding(CoreSamplingParams(temperature=0.0, repetition_penalty=1.5)),
        decoding(CoreSamplingParams(temperature=0.0, logit_bias={9: 50.0})),
        decoding(CoreSamplingParams(temperature=0.0, min_new_tokens=3)),
    ]
    scored = driver.open([5, 6, 7], 40, logprobs=Logprobs(prompt_from=0, output=False))
    driver.step((scored, 0, 3, True))
    driver.step((scored, 3, 4, True))
    driver.close(scored)
    for at, other in enumerate(others, 4):
        driver.step((other, 3, 4, True), (plain, at, at + 1, True))
    driver.step((plain, 9, 10, False))
    driver.step((plain, 10, 12, True))
    others.append(driver.open([1], 20))
    driver.step((plain, 12, 13, True))
    assert counts == [1], "none of these"
    driver.step((others[4], 4, 5, True))
    driver.step((others[4], 5, 6, True))
    assert counts == [1, 1], "as soon as it has the tokens that it must have"
    for other in others:
        driver.close(other)
    many = [plain, *(decoding() for _ in range(FEW_SAMPLES))]
    starts = [13] + [3] * FEW_SAMPLES
    entries = [(row, start, start + 1, True) for row, start in zip(many, starts, strict=True)]
    driver.step(*entries)
    assert counts == [1, 1], "so many are chosen for by all threads"
    driver.step(*((row, start + 1, end + 1, take) for row, start, end, take in entries[1:]))
    assert counts == [1, 1, FEW_SAMPLES]


@needs_kernels
def test_it_comes_behind_a_step_that_waits_to_be_computed(tiny_checkpoint: TinyCheckpoint, counts: list[int]) -> None:
    """A step with layer events is computed when it is waited for, or by the next one."""
    prompt = random_prompt(20, VOCAB_SIZE)
    wanted = driver_of(tiny_checkpoint("llama")).generate([prompt], 3)[0]
    driver = driver_of(tiny_checkpoint("llama"))
    executor = driver.built.executor
    counts.clear()
    row = driver.open(prompt, 40)
    first = executor.launch(BatchPlan(0, (BatchRow("a", row, 0, 20, True),)), layer_events=True)
    second = executor.launch(BatchPlan(1, (BatchRow("a", row, 20, 21, True),)))
    results = [executor.resolve(first), executor.resolve(second)]
    third = executor.launch(BatchPlan(2, (BatchRow("a", row, 21, 22, True),)), layer_events=True)
    assert counts == [1], "nobody is told of layers within one call"
    results.append(executor.resolve(third))
    assert [token.token_id for result in results for token in result.tokens if token is not None] == wanted


@needs_kernels
def test_what_goes_wrong_is_raised_where_the_step_is_resolved(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> list[int]:
        raise MemoryError("the kernels ran out of memory")

    monkeypatch.setattr(NativeDecoder, "decode", fail)
    driver = driver_of(tiny_checkpoint("llama"))
    executor = driver.built.executor
    row = driver.open([5], 40)
    driver.step((row, 0, 1, True))
    handle = executor.launch(BatchPlan(9, (BatchRow("a", row, 1, 2, True),)))
    with pytest.raises(MemoryError):
        executor.resolve(handle)


@needs_kernels
def test_a_thread_beside_the_scheduler_computes_no_step_at_once(
    tiny_checkpoint: TinyCheckpoint, counts: list[int]
) -> None:
    """The page table may have changed when the step is computed."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(tiny_checkpoint("llama")), dtype="bfloat16"),
        memory=MemoryConfig(page_size=16, max_total_tokens=1024),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
        schedule=ScheduleConfig(disable_overlap_schedule=False),
    )
    driver = Driver(build_executor(config, max_rows=2))
    try:
        driver.generate([[5, 6, 7]], 4)
    finally:
        driver.built.executor.close()
    assert not counts


class SharedExperts(SingleRank):
    """A rank whose feed-forward layers are split over two replicas."""

    @property
    def dp_attention_group(self) -> DPAttentionGroup:
        ranks = StageRanks(self)
        ranks.size, ranks.spans_replicas = 2, True
        return ranks


@needs_kernels
@pytest.mark.parametrize(("parallel", "most"), [(SingleRank(), FEW_SAMPLES), (SharedExperts(), 0)])
def test_a_model_that_python_has_a_part_in_computes_no_step_at_once(
    parallel: Parallel, most: int, tiny_checkpoint: TinyCheckpoint
) -> None:
    path = tiny_checkpoint("llama")
    decoder = empty_model(read_spec(path), "bfloat16", torch.device("cpu"), parallel=parallel)
    model = make_native(decoder, ModelConfig(model_path=str(path)), best_level(), nullcontext)
    model.bind([KVPool(kv_layout(decoder.spec, 16, "bfloat16").groups[0], 4, torch.device("cpu"))])
    assert model.max_native_rows == most
