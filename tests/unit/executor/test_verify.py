"""Rows with drafts: the tokens, log probabilities and KV of single steps, whatever was drafted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from pdserve.executor.graphs import is_decode
from pdserve.executor.input_batch import cut_plan, read_plan, sampled_rows
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken
from pdserve.executor.verify import PendingRows, StepDrafts, num_accepted, shorten, take_apart
from pdserve.memory.kv_memory import PageTable
from pdserve.model.native.decoder import FEW_SAMPLES, NativeDecoder
from pdserve.sim.hash_lm import hash_layout
from tests.driver import Driver, build
from tests.tiny import VOCAB_SIZE, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.executor.drafting import Outcome, Request, by_drafts, by_single_steps, prompt_of, sixteen
from tests.unit.executor.same_bits import kv_of
from tests.unit.executor.test_native_hybrid import of_row
from tests.unit.model.native_kit import needs_kernels

SMOL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
Quantization = Literal["int8"] | None


def native(path: Path, quantization: Quantization = None, threads: int = 1, page_size: int = 8) -> Driver:
    """A driver of the CPU kernels in bfloat16."""
    return Driver(
        build(
            path, dtype="bfloat16", load_format="auto" if list(path.glob("*.safetensors")) else "dummy",
            quantization=quantization, page_size=page_size, max_rows=64, cpu_kernels="native", cpu_threads=threads,
            max_total_tokens=1 << 14,
        )
    )  # fmt: skip


def smol(directory: Path) -> Path:
    """A configuration whose weights are random."""
    (directory / "config.json").write_text(json.dumps(SMOL))
    return directory


def compare(driver: Driver, requests: list[Request], seed: int) -> Outcome:
    """Decode by single steps and by drafts, and compare every token, log probability and byte of KV."""
    plain = by_single_steps(driver, requests)
    drafted = by_drafts(driver, requests, plain.ids, random.Random(seed))
    assert drafted.tokens == plain.tokens
    for one, mine, other in zip(requests, drafted.rows, plain.rows, strict=True):
        for left, right in zip(
            of_row(driver, mine, one.max_len - 1), of_row(driver, other, one.max_len - 1), strict=True
        ):
            assert torch.equal(left, right), "KV of accepted tokens"
    for row in (*plain.rows, *drafted.rows):
        driver.close(row)
    return drafted


@needs_kernels
@pytest.mark.parametrize(
    ("model", "quantization", "threads"),
    [("smol", None, 1), ("smol", "int8", 2), ("qwen3_moe", "int8", 1), ("mistral", None, 1), ("qwen3", None, 2)],
)
def test_every_way_to_sample_gives_what_single_steps_give(
    model: str, quantization: Quantization, threads: int, tmp_path: Path
) -> None:
    """Sixteen rows with different drafts beside chunks of prompts, over several pages; two models have windows."""
    changes = WINDOW_FAMILIES.get(model, {})  # type: ignore[call-overload]
    path = smol(tmp_path) if model == "smol" else make_tiny(model, tmp_path, **changes)  # type: ignore[arg-type]
    outcome = compare(native(path, quantization, threads), sixteen(), seed=len(model))
    assert outcome.num_accepted > 30 and outcome.num_rejected > 30
    assert outcome.num_steps > 5


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_float32_in_the_deterministic_mode(family: Family, tiny_checkpoint: Callable[[Family], Path]) -> None:
    built = build(tiny_checkpoint(family), dtype="float32", page_size=16, max_rows=64, deterministic=True)
    outcome = compare(Driver(built), sixteen(), seed=3)
    assert outcome.num_accepted > 30


def test_float32_by_torch_has_the_same_tokens(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Products of more rows round differently."""
    driver = Driver(build(tiny_checkpoint("llama"), dtype="float32", page_size=16, max_rows=64, cpu_kernels="torch"))
    requests = sixteen()
    plain = by_single_steps(driver, requests)
    drafted = by_drafts(driver, requests, plain.ids, random.Random(1))
    assert drafted.ids == plain.ids
    for mine, other in zip(drafted.tokens, plain.tokens, strict=True):
        for left, right in zip(mine, other, strict=True):
            assert left.logprob == (None if right.logprob is None else pytest.approx(right.logprob, abs=1e-3))


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_small_greedy_steps_are_one_call(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to 16 tokens, drafts included, go this way, and larger ones do not."""
    decode, sizes = NativeDecoder.decode, list[int]()

    def counting(self, facts, *tables):  # type: ignore[no-untyped-def]
        sizes.append(facts.shape[1])
        return decode(self, facts, *tables)

    monkeypatch.setattr(NativeDecoder, "decode", counting)
    requests = [Request(prompt_of(5 + 7 * i, i), num_new=40) for i in range(num_rows)]
    driver = native(smol(tmp_path))
    outcome = compare(driver, requests, seed=num_rows)
    assert max(sizes) > num_rows and max(sizes) <= FEW_SAMPLES
    assert outcome.num_accepted > 20


@needs_kernels
def test_the_next_step_reads_the_accepted_tokens(tmp_path: Path) -> None:
    """Rejected drafts leave nothing: neither in the tokens that penalties count, nor in the KV."""
    driver = native(smol(tmp_path))
    (one,) = requests = [Request(prompt_of(20), num_new=10)]
    plain = by_single_steps(driver, requests)
    truth = plain.ids[0]
    row = driver.open(one.prompt, 64)
    driver.step((row, 0, 20, True))
    wrong = [(token + 1) % VOCAB_SIZE for token in truth]
    start = 20
    for drafts, accepted in ((wrong[1:6], 0), (truth[2:4] + wrong[4:6], 2), (truth[5:8], 3)):
        result = driver.run([BatchRow("r", row, start, start + 1 + len(drafts), True, drafts=tuple(drafts))])
        found = [token.token_id for token in result.sampled(0)]
        assert found == truth[start - 19 : start - 19 + 1 + accepted]
        start += 1 + accepted
    assert torch.equal(kv_of(driver.built, row, start), kv_of(driver.built, plain.rows[0], start))


def test_a_plan_with_drafts_samples_each_of_their_positions() -> None:
    table, plan = PageTable(8, 4), BatchPlan(0, (
        BatchRow("a", 0, 6, 9, True, drafts=(7, 8)), BatchRow("b", 1, 0, 5, False), BatchRow("c", 2, 3, 4, True),
        BatchRow("d", 3, 2, 4, True, drafts=(9,)), BatchRow("e", 4, 0, 3, True),
    ))  # fmt: skip
    host = read_plan(plan, table, np.zeros(8, dtype=np.int64), hash_layout(4))
    assert host.sampled.tolist() == [0, 0, 0, 2, 3, 3, 4] and not is_decode(host)
    assert host.sample_index.tolist() == [0, 1, 2, 8, 9, 10, 13]
    rows, positions = sampled_rows([host])
    assert rows.tolist() == [0, 0, 0, 2, 3, 3, 4] and positions.tolist() == [7, 8, 9, 4, 3, 4, 3]
    assert host.rows.num_drafts is not None and host.rows.num_drafts.tolist() == [2, 0, 0, 1, 0]
    drafts = StepDrafts.of(plan)
    assert drafts is not None
    found = zip(drafts.table_rows.tolist(), drafts.positions.tolist(), drafts.token_ids.tolist(), strict=True)
    assert list(found) == [(0, 7, 7), (0, 8, 8), (3, 3, 9)]
    apart = host.rows.apart()
    assert apart.starts.tolist() == [6, 7, 8, 0, 3, 2, 3, 0] and apart.ends.tolist() == [7, 8, 9, 5, 4, 3, 4, 3]
    assert apart.offsets.tolist() == [0, 1, 2, 3, 8, 9, 10, 11] and apart.num_drafts is None


def test_a_step_without_drafts_has_no_numbers_of_them() -> None:
    plan = BatchPlan(0, (BatchRow("a", 0, 6, 7, True), BatchRow("b", 1, 0, 5, False)))
    host = read_plan(plan, PageTable(8, 4), np.zeros(8, dtype=np.int64), hash_layout(4))
    assert host.rows.num_drafts is None and host.rows.apart() is host.rows and StepDrafts.of(plan) is None


def test_drafts_are_accepted_while_they_equal_what_is_sampled() -> None:
    assert num_accepted((1, 2, 3), (1, 2, 3, 4)) == 3
    assert num_accepted((1, 2, 3), (1, 5, 3, 4)) == 1
    assert num_accepted((1,), (2, 1)) == 0 and num_accepted((), (2,)) == 0
    assert num_accepted((1, 2, 3), (1, 2, 3, 4), (0, 0, 1, 1)) == 1, "the third position has no token"


def test_results_are_given_to_their_rows() -> None:
    plan = BatchPlan(0, (
        BatchRow("a", 0, 6, 9, True, drafts=(1, 2)), BatchRow("b", 1, 0, 5, False), BatchRow("c", 2, 3, 4, True),
        BatchRow("d", 3, 2, 4, True, drafts=(9,)),
    ))  # fmt: skip
    sampled = [SampledToken(token) for token in (1, 5, 2, 7, 9, 3)]
    found = take_apart(plan, sampled, None)
    assert found.tokens == (sampled[0], None, sampled[3], sampled[4])
    assert found.more == {0: (sampled[1],), 3: (sampled[5],)} and found.failed == ()
    failed = np.array([0, 0, 0, 1, 0, 1], dtype=np.bool_)
    found = take_apart(plan, sampled, failed)
    assert found.failed == (2,) and found.more == {0: (sampled[1],)}, "d fails at its next step"
    assert shorten(plan, {0: 1, 3: 5}).rows[0] == BatchRow("a", 0, 6, 8, True, drafts=(1,))
    assert shorten(plan, {3: 0}).rows[3] == BatchRow("d", 3, 2, 3, True)


def test_micro_batches_keep_rows_with_drafts_whole() -> None:
    drafts = tuple(range(40))
    rows = tuple(BatchRow(str(i), i, 100, 141, True, drafts=drafts) for i in range(3))
    plan = BatchPlan(0, (*rows, BatchRow("p", 7, 0, 90, True)))
    parts = cut_plan(plan, 4, 32)
    assert len(parts) == 4 and sum(len(part.rows) for part in parts) > 4
    assert [row for part in parts for row in part.rows if row.drafts] == list(rows)
    assert sum(row.num_tokens for part in parts for row in part.rows) == sum(row.num_tokens for row in plan.rows)
    few = cut_plan(BatchPlan(0, (rows[0], BatchRow("c", 5, 3, 4, True))), 3, 10)
    assert [len(part.rows) for part in few] == [1, 1], "a part without rows is left out"


def test_pending_tokens_are_folded_by_the_next_row_or_before_an_offload() -> None:
    table = PageTable(4, 4)
    table.slots[:] = [5, 6, 7, 8]
    pending, calls = PendingRows(table), list[tuple[list[int], list[int]]]()

    def step(*rows: BatchRow, accepted: dict[int, int] | None = None) -> list[int] | None:
        plan = BatchPlan(0, rows)
        host = pending.fold_into(read_plan(plan, table, np.zeros(4, dtype=np.int64), hash_layout(4)))
        pending.launched(plan, has_drafts=any(row.drafts for row in rows))
        more = {i: (SampledToken(0),) * count for i, count in (accepted or {}).items()}
        pending.resolved(plan, more)
        return None if host.rows.num_folded is None else host.rows.num_folded.tolist()

    def fold(slots: np.ndarray, counts: np.ndarray) -> None:
        calls.append((slots.tolist(), counts.tolist()))

    drafts = (1, 2, 3)
    assert step(BatchRow("a", 0, 4, 8, True, drafts=drafts), BatchRow("b", 1, 9, 10, True), accepted={0: 2}) is None
    assert 0 in pending and 1 not in pending
    assert step(BatchRow("b", 1, 10, 11, True)) is None, "row 0 waits"
    again = (BatchRow("b", 1, 11, 13, True, drafts=(4,)), BatchRow("a", 0, 7, 9, True, drafts=(5,)))
    assert step(*again, accepted={0: 1}) == [0, 3]
    pending.settle([5, 8], fold)
    assert calls == [([5], [1])] and 0 not in pending and 1 in pending
    pending.settle([5], fold)
    pending.drop(1)
    assert len(calls) == 1 and step(BatchRow("c", 1, 0, 4, True)) is None
    assert step(BatchRow("a", 0, 8, 9, True)) is None
