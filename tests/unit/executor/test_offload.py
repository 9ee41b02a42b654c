"""Pages to host memory and back into others: every byte, every number format, in the middle of a generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.executor import kv_pages
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, run
from pdserve.memory.layout import attention_group
from pdserve.model.attention.page_gather import KVPool
from pdserve.protocol.sampling import CoreSamplingParams
from tests.ahead import build_ahead
from tests.driver import Driver, random_prompt
from tests.tiny import VOCAB_SIZE, Family

PROMPT = random_prompt(37, VOCAB_SIZE)
SAMPLING = CoreSamplingParams(temperature=1.2, seed=3, repetition_penalty=1.2, frequency_penalty=0.4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("qwen2")


def random_pool(dtype: str, *, num_pages: int = 20, page_tokens: int = 4) -> KVPool:
    """A pool of random bytes, NaN of every kind among them."""
    group = attention_group(
        num_layers=3, page_tokens=page_tokens, num_kv_heads=2, head_dim=8, dtype=dtype,
    )  # fmt: skip
    pool = KVPool(group, num_pages, CPU)
    generator = torch.Generator().manual_seed(page_tokens)
    content = torch.randint(0, 256, (num_pages, group.page_bytes), dtype=torch.uint8, generator=generator)
    pool.pages.view(num_pages, -1).view(torch.uint8).copy_(content)
    return pool


def page_bytes(pool: KVPool) -> torch.Tensor:
    """Uint8 `[num_pages, page_bytes]`, a copy."""
    return pool.pages.view(pool.num_pages, -1).view(torch.uint8).clone()


@pytest.mark.parametrize("num_pages_per_piece", [1, 3, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_byte_comes_back_into_other_pages_of_every_group(
    dtype: str, num_pages_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [random_pool(dtype), random_pool(dtype, page_tokens=1)]
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", num_pages_per_piece * pools[0].group.page_bytes)
    before = [page_bytes(pool) for pool in pools]
    source, target = [3, 17, 0, 9, 10, 11, 19], [5, 4, 17, 0, 12, 1, 2]
    saved = kv_pages.save(pools, [source] * len(pools))
    assert saved.num_bytes == len(source) * sum(pool.group.page_bytes for pool in pools)
    for pool in pools:
        pool.pages.view(pool.num_pages, -1).view(torch.uint8)[source] = 0xFF
    kv_pages.load(pools, saved, [target] * len(pools))
    for pool, old in zip(pools, before, strict=True):
        expected = old.clone()
        expected[source] = 0xFF
        expected[target] = old[source]
        assert torch.equal(page_bytes(pool), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_the_named_pages_are_cleared(dtype: str) -> None:
    pools = [random_pool(dtype), random_pool(dtype, page_tokens=1)]
    expected = [page_bytes(pool) for pool in pools]
    for content in expected:
        content[[3, 0, 19]] = 0
    kv_pages.zero(pools, [[3, 0, 19]] * len(pools))
    kv_pages.zero(pools, [[]] * len(pools))
    assert all(torch.equal(page_bytes(pool), content) for pool, content in zip(pools, expected, strict=True))


def test_no_pages_take_no_memory() -> None:
    pool = random_pool("float32")
    before = page_bytes(pool)
    saved = kv_pages.save([pool], [[]])
    kv_pages.load([pool], saved, [[]])
    assert saved.num_bytes == 0
    assert torch.equal(page_bytes(pool), before)


def test_another_number_of_pages_is_a_mistake() -> None:
    pool = random_pool("float16")
    with pytest.raises(AssertionError, match="2 pages were saved, 3 are given"):
        kv_pages.load([pool], kv_pages.save([pool], [[1, 2]]), [[1, 2, 3]])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_goes_on_from_other_pages_and_another_row(checkpoint: Path, overlap: bool, page_size: int) -> None:
    """As after a retraction: its old pages are overwritten, its row taken by another, its tokens told anew."""
    built = build_ahead(checkpoint, overlap=overlap, page_size=page_size)
    driver, executor = Driver(built), built.executor
    whole = generate(driver, driver.open(PROMPT, 60, SAMPLING), 0, len(PROMPT), 12)
    row = driver.open(PROMPT, 60, SAMPLING)
    tokens = generate(driver, row, 0, len(PROMPT), 5)
    num_computed = len(PROMPT) + 4
    pages = built.table.pages[row, : -(-num_computed // page_size)].tolist()
    saved = executor.offload([pages])
    assert saved.num_bytes == len(pages) * executor.layout.page_tokens * executor.layout.token_bytes
    driver.close(row)
    executor.pools[0].pages[pages] = float("nan")
    other = driver.open(PROMPT[:7], 20)
    generate(driver, other, 0, 7, 3)
    again = driver.open([*PROMPT, *tokens], 60, SAMPLING, num_prompt=len(PROMPT))
    target = built.table.pages[again, : len(pages)].tolist()
    assert again != row and not set(target) & set(pages)
    executor.restore(saved, [target])
    tokens += generate(driver, again, num_computed, num_computed + 1, 7)
    executor.close()
    assert tokens == whole


def test_offload_waits_its_turn(checkpoint: Path) -> None:
    """Nothing is copied while a step may still write."""
    built = build_ahead(checkpoint, overlap=True)
    row = Driver(built).open(PROMPT, 60)
    saved = built.executor.offload([[0]])
    handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(PROMPT), True),)))
    with pytest.raises(AssertionError, match="unresolved"):
        built.executor.offload([[0]])
    with pytest.raises(AssertionError, match="unresolved"):
        built.executor.restore(saved, [[0]])
    built.executor.resolve(handle)
    built.executor.restore(saved, [[0]])
    built.executor.close()


def generate(driver: Driver, row: int, start: int, end: int, num_tokens: int) -> list[int]:
    """Tokens of `row` by one step over `[start, end)` and decode steps behind it."""
    found = []
    for step in range(num_tokens):
        token = one(driver.built, row, start, end, step)
        found.append(token.token_id)
        start, end = end, end + 1
    return found


def one(built: LoadedEngine, row: int, start: int, end: int, step: int) -> SampledToken:
    """The token of one step with one row."""
    (token,) = run(built.executor, BatchPlan(step, (BatchRow("a", row, start, end, True),))).tokens
    assert token is not None
    return token
