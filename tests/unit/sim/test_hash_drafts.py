"""The hash model with drafts: rows driven by plans give the tokens, KV and states of single steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepResult, run
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from pdserve.sim.hash_layers import POISON
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.sim.hash_sampling import HashDrafting, echo_of

PAGE_TOKENS, NUM_ROWS, ROW_PAGES = 4, 3, 12
PROMPT = (5, 900, 17, 6, 5)
LAYOUTS = {
    "full": hash_layout(PAGE_TOKENS, num_heads=2),
    "window": hash_layout(PAGE_TOKENS, num_heads=2, window=5),
    "states": hash_layout(PAGE_TOKENS, num_heads=2, has_state=True),
}
SAMPLINGS = {
    "greedy": CoreSamplingParams(temperature=0.0),
    "seeded": CoreSamplingParams(temperature=1.0, seed=11),
    "penalties": CoreSamplingParams(temperature=0.0, frequency_penalty=0.5),
    "bans": CoreSamplingParams(temperature=0.0, min_new_tokens=9, stop_token_ids=tuple(range(6))),
    "grammar": CoreSamplingParams(temperature=1.0, seed=2, grammar=Grammar(kind="regex", text="a")),
}


class Driver:
    """An executor whose rows have all their pages from the start."""

    def __init__(
        self,
        layout: KVLayout,
        shape: ParallelShape = SINGLE.shape,
        *,
        drafting: HashDrafting | None = None,
        echo: float = 0.5,
    ) -> None:
        self.table = PageTable(NUM_ROWS, ROW_PAGES, has_window=layout.window > 0)
        sizes = dict.fromkeys(PageSpace, NUM_ROWS * ROW_PAGES)
        self.executor = HashExecutor(layout, sizes, self.table, shape, echo=echo, drafting=drafting)
        self.step = 0

    def open(
        self, sampling: CoreSamplingParams, logprobs: Logprobs | None = None, prompt: Sequence[int] = PROMPT
    ) -> int:
        """Open a row and compute its prompt but for the last token."""
        used = self.table.num_rows - self.table.num_free
        pages = list(range(used * ROW_PAGES, (used + 1) * ROW_PAGES))
        row = self.table.open(pages)
        assert row is not None
        if self.table.window.shape[1]:
            self.table.window[row, :ROW_PAGES] = pages[::-1]
        self.table.slots[row] = 7 + row
        self.executor.open_row(row, PROMPT, len(PROMPT), sampling, logprobs)
        return row

    def run(self, *rows: BatchRow) -> StepResult:
        """Compute one step."""
        self.step += 1
        return run(self.executor, BatchPlan(self.step, rows))

    def prefill(self, row: int, num_tokens: int = len(PROMPT)) -> SampledToken:
        """Compute the prompt of a row."""
        token = self.run(BatchRow("r", row, 0, num_tokens, sample=True)).tokens[0]
        assert token is not None
        return token

    def decode(self, row: int, start: int, drafts: Sequence[int] = ()) -> tuple[SampledToken, ...]:
        """Compute the last token, at `start`, and the drafts."""
        return self.run(_row(row, start, drafts)).sampled(0)

    def stream(self, row: int, num_tokens: int) -> list[SampledToken]:
        """Sample tokens one by one."""
        found = [self.prefill(row)]
        while len(found) < num_tokens:
            found += self.decode(row, len(PROMPT) + len(found) - 1)
        return found


def _row(row: int, start: int, drafts: Sequence[int] = ()) -> BatchRow:
    return BatchRow("r", row, start, start + 1 + len(drafts), sample=True, drafts=tuple(drafts))


def _ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def _drafts(rng: random.Random, known: Sequence[int]) -> tuple[list[int], int]:
    """Return drafts, the first ones of them right, and how many are right: a random number."""
    right = rng.randint(0, min(4, len(known)))
    wrong = [] if right == len(known) else [known[right] + 1, 3, 4][: rng.randint(0, 3)]
    return [*known[:right], *wrong], right


@pytest.mark.parametrize("shape", [SINGLE.shape, ParallelShape(tp_size=2), ParallelShape(pp_size=2)], ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_change_neither_tokens_nor_kv_nor_states(layout: str, sampling: str, shape: ParallelShape) -> None:
    """Right, wrong and partly right drafts, plain steps between them, several rows in a step."""
    logprobs = Logprobs(token_ids=(3, 8))
    plain, drafted = Driver(LAYOUTS[layout], shape), Driver(LAYOUTS[layout], shape)
    expected, found, rows = [], [], []
    for _ in range(NUM_ROWS):
        expected.append(plain.stream(plain.open(SAMPLINGS[sampling], logprobs), 20))
        rows.append(drafted.open(SAMPLINGS[sampling], logprobs))
        found.append([drafted.prefill(rows[-1])])
    rng = random.Random(layout + sampling)
    num_accepted = 0
    while min(map(len, found)) < 20:
        plans = []
        for row, own, whole in zip(rows, found, expected, strict=True):
            drafts, right = _drafts(rng, _ids(whole)[len(own) : 19]) if rng.random() < 0.8 else ([], 0)
            if len(own) < 20:
                plans.append((own, whole, right, _row(row, len(PROMPT) + len(own) - 1, drafts)))
        result = drafted.run(*(row for *_, row in plans))
        for index, (own, whole, right, _) in enumerate(plans):
            tokens = result.sampled(index)
            assert len(tokens) == 1 + right
            own += tokens
            assert own == whole[: len(own)]
            num_accepted += right
    assert num_accepted > 10
    for pools, others in zip(plain.executor.pools, drafted.executor.pools, strict=True):
        for group, pool, other in zip(LAYOUTS[layout].groups, pools, others, strict=True):
            if group.space is not PageSpace.SLOTS:  # those of the last row with drafts are pending
                assert np.array_equal(pool, other)


def test_kv_beyond_the_accepted_prefix_is_poison() -> None:
    driver = Driver(LAYOUTS["window"])
    row = driver.open(SAMPLINGS["greedy"])
    first = driver.prefill(row).token_id
    (pool, *_), (group, *_) = driver.executor.pools[0], driver.executor.layout.groups
    driver.decode(row, 5, [first + 1, 1, 2, 3])
    written = pool[row * ROW_PAGES : row * ROW_PAGES + 3].reshape(3, group.num_layers, 2, 2, PAGE_TOKENS)
    by_position = (written != POISON).all(axis=(1, 2, 3)).reshape(-1)
    assert by_position.tolist() == [True] * 6 + [False] * 6


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_slot_is_offloaded_with_the_state_of_the_accepted_tokens(num_right: int) -> None:
    layout = LAYOUTS["states"]
    plain, drafted = Driver(layout), Driver(layout)
    tokens = _ids(plain.stream(plain.open(SAMPLINGS["greedy"]), 2 + num_right))
    row = drafted.open(SAMPLINGS["greedy"])
    drafted.prefill(row)
    before = [pool[7].copy() for pool in drafted.executor.pools[0][1:]]
    drafted.decode(row, 5, [*tokens[1 : 1 + num_right], 77777])
    assert all(np.array_equal(own, pool[7]) for own, pool in zip(before, drafted.executor.pools[0][1:], strict=True))
    pages: list[list[int]] = [[7] if group.space is PageSpace.SLOTS else [] for group in layout.groups]
    drafted.executor.restore(drafted.executor.offload(pages), pages)
    drafted.executor.offload(pages)  # and it is folded once
    state = next(index for index, group in enumerate(layout.groups) if group.name == "state")
    assert np.array_equal(drafted.executor.pools[0][state][7], plain.executor.pools[0][state][7])


def test_a_row_is_not_planned_before_its_drafts_are_settled() -> None:
    driver = Driver(LAYOUTS["full"])
    row = driver.open(SAMPLINGS["greedy"])
    driver.prefill(row)
    handle = driver.executor.launch(BatchPlan(2, (_row(row, 5, (1, 2)),)))
    with pytest.raises(AssertionError, match="before its drafts are settled"):
        driver.executor.launch(BatchPlan(3, (_row(row, 6),)))
    driver.executor.resolve(handle)
    driver.executor.launch(BatchPlan(4, (_row(row, 6),)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_that_is_always_right(layout: str, sampling: str) -> None:
    plain = Driver(LAYOUTS[layout])
    expected = _ids(plain.stream(plain.open(SAMPLINGS[sampling]), 21))
    driver = Driver(LAYOUTS[layout], drafting=HashDrafting(num_draft_tokens=3, chance=1.0))
    row = driver.open(SAMPLINGS[sampling])
    result = driver.run(BatchRow("r", row, 0, 5, sample=True))
    found = _ids(result.sampled(0))
    while len(found) < 20:
        assert list(result.drafts[0]) == expected[len(found) : len(found) + 3]
        result = driver.run(_row(row, 5 + len(found) - 1, result.drafts[0]))
        found += _ids(result.sampled(0))
    assert found == expected and driver.step == 6


@pytest.mark.parametrize(("chance", "low", "high"), [(0.0, 0, 0), (0.5, 0.3, 0.7)])
def test_a_drafter_is_right_with_its_chance(chance: float, low: float, high: float) -> None:
    """Its proposals leave nothing behind: the pools are those without a drafter."""
    plain = Driver(LAYOUTS["window"])
    driver = Driver(LAYOUTS["window"], drafting=HashDrafting(num_draft_tokens=2, chance=chance))
    expected = plain.stream(plain.open(SAMPLINGS["greedy"]), 41)
    row = driver.open(SAMPLINGS["greedy"])
    found, num_right = [driver.prefill(row)], 0
    for index in range(1, 41):
        result = driver.run(_row(row, 5 + index - 1))
        found += result.sampled(0)
        num_right += index < 40 and result.drafts[0][0] == expected[index + 1].token_id
    assert found == expected
    assert low <= num_right / 39 <= high
    for pool, other in zip(plain.executor.pools[0], driver.executor.pools[0], strict=True):
        assert np.array_equal(pool, other)
    assert plain.executor.buffers[0][1] == driver.executor.buffers[0][1], "spare pages are not registered"


def test_an_echo_is_what_n_grams_predict() -> None:
    """Its tokens repeat after a few, and none of a hash do."""
    driver = Driver(LAYOUTS["full"], echo=1.0)
    tokens = _ids(driver.stream(driver.open(SAMPLINGS["greedy"]), 12))
    assert tokens[4:] == tokens[:-4] and tokens[1] == echo_of(tokens[0])
    driver = Driver(LAYOUTS["full"], echo=0.0)
    tokens = _ids(driver.stream(driver.open(SAMPLINGS["greedy"]), 12))
    assert len(set(tokens)) == 12


def test_a_grammar_cuts_drafts_that_it_forbids() -> None:
    """Such a row computes fewer positions than it has drafts, and samples them all the same."""
    driver = Driver(LAYOUTS["full"], drafting=HashDrafting(num_draft_tokens=4, chance=1.0))
    row = driver.open(SAMPLINGS["grammar"])
    drafts = driver.run(BatchRow("r", row, 0, 5, sample=True)).drafts[0]
    sampled = _ids(driver.decode(row, 5, (*drafts[:2], drafts[2] + 1, drafts[3])))
    assert sampled == [*drafts[:3]]
