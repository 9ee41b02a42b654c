"""Sampling: the right distributions, reproducible per (seed, position), whatever else is in the batch.

By torch and by the CPU kernels at each level that this CPU can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.executor.input_batch import SamplingMetadata, Seeds
from pdserve.executor.sampler import TokenSampler, choose_with_torch, sample, to_host, uniforms
from pdserve.model.native.resources import Threads
from pdserve.model.native.sampling import NativeChooser
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import TOP_K_ALL, CoreSamplingParams
from tests.unit.model.native_kit import LEVELS_HERE

VOCAB = 50
NUM_DRAWS = 4000
CHOOSERS: dict[str, Callable[[], TokenSampler]] = {"torch": lambda: choose_with_torch} | {
    level: partial(NativeChooser, Threads(2), level) for level in LEVELS_HERE
}
_current = ["torch"]


@pytest.fixture(autouse=True, params=CHOOSERS)
def _chooser(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which one `draw` uses."""
    _current[0] = request.param
    yield
    _current[0] = "torch"


def choosing() -> TokenSampler:
    """The one this test is about."""
    return CHOOSERS[_current[0]]()


EOS = 3
BIASED = 7


def logits_of(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2.0


def draw(
    logits: torch.Tensor,
    requests: list[CoreSamplingParams],
    *,
    position: int = 1,
    known: list[list[int]] | None = None,
    num_prompt: int = 1,
) -> list[int]:
    """One token per request, all at `position`, each from its line of `logits` `[R, V]`."""
    params = SamplingMetadata(len(requests), (EOS,))
    tokens = torch.zeros(len(requests), 64, dtype=torch.int32)
    for row, request in enumerate(requests):
        params.set(row, num_prompt, request, None)
        if known is not None:
            tokens[row, : len(known[row])] = torch.tensor(known[row], dtype=torch.int32)
    lines = np.arange(len(requests))
    picked = params.pick(lines, np.full(len(requests), position))
    return sample(logits, picked, tokens, choosing()).token_ids.tolist()


def frequencies(logits: torch.Tensor, **settings: float | int) -> torch.Tensor:
    """How often each token comes over NUM_DRAWS seeds."""
    requests = [CoreSamplingParams(seed=seed, **settings) for seed in range(NUM_DRAWS)]  # type: ignore[arg-type]
    drawn = draw(logits.expand(NUM_DRAWS, -1), requests)
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / NUM_DRAWS


def assert_drawn_from(seen: torch.Tensor, expected: torch.Tensor) -> None:
    """`seen` frequencies fit `expected`: nothing outside its support, and each within five deviations."""
    assert not seen[expected == 0].any()
    deviation = (expected * (1 - expected) / NUM_DRAWS).sqrt()
    assert ((seen - expected).abs() <= 5 * deviation + 1e-9).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_scales_the_softmax(temperature: float) -> None:
    logits = logits_of()
    assert_drawn_from(frequencies(logits, temperature=temperature), (logits / temperature).softmax(-1))


def test_filters_keep_what_they_say() -> None:
    logits = logits_of(1)
    probs = logits.softmax(-1)
    ranked, order = probs.sort(descending=True)
    top_k = torch.zeros(VOCAB).index_copy(0, order[:4], ranked[:4])
    count = int((ranked.cumsum(-1) - ranked < 0.7).sum())
    top_p = torch.zeros(VOCAB).index_copy(0, order[:count], ranked[:count])
    min_p = torch.where(probs >= 0.2 * ranked[0], probs, 0.0)
    both = torch.minimum(top_k, top_p)
    assert 4 != count > 1
    assert_drawn_from(frequencies(logits, top_k=4), top_k / top_k.sum())
    assert_drawn_from(frequencies(logits, top_p=0.7), top_p / top_p.sum())
    assert_drawn_from(frequencies(logits, min_p=0.2), min_p / min_p.sum())
    assert_drawn_from(frequencies(logits, top_k=4, top_p=0.7), both / both.sum())


def test_top_p_looks_beyond_its_window_when_it_must() -> None:
    """A flat distribution over 3,000 tokens: 90% of it is 2,700 of them."""
    logits = torch.linspace(0.01, 0.0, 3000)
    drawn = draw(logits.expand(2000, -1), [CoreSamplingParams(seed=seed, top_p=0.9) for seed in range(2000)])
    assert 2400 < max(drawn) < 2712


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    vocab=st.sampled_from([1, 2, 15, 16, 17, 511, 512, 513, 1500, 5000]),
    spread=st.sampled_from([0.0, 0.02, 1.0, 6.0, 60.0]),
    top_k=st.sampled_from([TOP_K_ALL, 1, 2, 40, 600, 4000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    num_banned=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_a_draw_inverts_the_distribution(
    vocab: int, spread: float, top_k: int, top_p: float, min_p: float, temperature: float, num_banned: int, seed: int
) -> None:
    """Against float64, with some tokens' probabilities equal, and others banned."""
    chance = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, vocab, generator=chance) * spread).round(decimals=1)
    logits[:, torch.randint(vocab, (num_banned,), generator=chance)] = -torch.inf
    request = CoreSamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = draw(logits, [request] * 3)
    point = float(uniforms(np.array([seed], dtype=np.uint64), np.array([1]))[0])
    for row, token in zip(logits.double(), tokens, strict=True):
        if not row.isfinite().any():
            assert 0 <= token < vocab
            continue
        probs = (row / temperature).softmax(-1)
        ranked = probs.sort(descending=True).values
        before = ranked.cumsum(-1) - ranked
        # Where a filter's border falls between two tokens is the business of rounding: both sides are allowed.
        floors = []
        for slack in (-1e-5, 1e-5):
            kept = int((before < top_p + slack).sum()) if top_p < 1 else vocab
            kept = max(1, min(kept, top_k, vocab))
            floors.append(max(float(ranked[kept - 1]), min_p * float(ranked[0])) * (1 - slack))
        assert probs[token] >= min(floors) > 0 or probs[token] > 0 == min(floors)
        allowed = []
        for floor in floors:
            cumulative = torch.where(probs >= floor, probs, 0.0).cumsum(-1)
            at = point * float(cumulative[-1])
            allowed.append(float(cumulative[token] - probs[token]) - 1e-4 <= at <= float(cumulative[token]) + 1e-4)
        assert any(allowed), (token, floors)


def test_greedy_takes_the_best_and_ties_the_first() -> None:
    logits = torch.stack((logits_of(0), logits_of(1), torch.zeros(VOCAB)))
    best = [int(logits[0].argmax()), int(logits[1].argmax()), 0]
    coldest = CoreSamplingParams(temperature=0.0)
    assert draw(logits, [coldest, CoreSamplingParams(top_k=1), coldest]) == best
    assert draw(logits[:2], [CoreSamplingParams(temperature=1e-6, seed=1)] * 2) == best[:2]


def test_a_token_depends_on_seed_and_position_only() -> None:
    logits = logits_of(2)
    mine = CoreSamplingParams(seed=123, temperature=1.3, top_p=0.95)
    others = [
        CoreSamplingParams(seed=5),
        CoreSamplingParams(temperature=0.0),
        CoreSamplingParams(seed=6, top_k=3, min_p=0.1),
        CoreSamplingParams(seed=7, top_p=0.2, frequency_penalty=1.0),
    ]
    for position in range(1, 12):
        alone = draw(logits[None], [mine], position=position)[0]
        among = draw(logits.expand(5, -1), [*others, mine], position=position)[4]
        assert alone == among
    drawn = {draw(logits[None], [mine], position=position)[0] for position in range(1, 40)}
    assert len(drawn) > 5


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    request = CoreSamplingParams(seed=seed)
    assert draw(logits_of()[None], [request]) == draw(logits_of()[None], [request])


def test_uniforms_are_uniform_and_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert values.min() >= 0.0 and values.max() < 1.0
    counts, _ = np.histogram(values, bins=20, range=(0.0, 1.0))
    assert ((counts - 500) ** 2 / 500).sum() < 45
    grid = values.reshape(100, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05


def test_penalties_change_the_logits_as_documented() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 10], logits[:, 11], logits[:, 12] = 2.0, 1.9, 1.0
    known = [[10, 20, 20]] * 4
    requests = [
        CoreSamplingParams(temperature=0.0, repetition_penalty=1.2),
        CoreSamplingParams(temperature=0.0, frequency_penalty=1.0),
        CoreSamplingParams(temperature=0.0, presence_penalty=1.0),
        CoreSamplingParams(temperature=0.0),
    ]
    assert draw(logits, requests, position=3, known=known, num_prompt=1) == [11, 10, 10, 10]
    assert draw(logits, requests, position=3, known=known, num_prompt=0) == [11, 11, 11, 10]


def test_frequency_counts_and_presence_does_not() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 11] = 2.0, 0.6
    requests = [
        CoreSamplingParams(temperature=0.0, frequency_penalty=0.5),
        CoreSamplingParams(temperature=0.0, presence_penalty=0.5),
    ]
    assert draw(logits, requests, position=5, known=[[0, 10, 10, 10, 9]] * 2) == [11, 10]


def test_repetition_makes_negative_logits_more_negative() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 10], logits[0, 11] = -1.0, -1.5
    request = CoreSamplingParams(temperature=0.0, repetition_penalty=1.9)
    assert draw(logits, [request], position=2, known=[[10, 10]]) == [11]


def test_bias_and_bans() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 7], logits[0, 8] = 5.0, 4.0, 3.0
    early = CoreSamplingParams(temperature=0.0, min_new_tokens=2, stop_token_ids=(7,))
    assert draw(logits, [early], position=1) == [8]
    assert draw(logits, [early], position=2) == [8]
    assert draw(logits, [early], position=3) == [EOS]
    assert draw(logits, [CoreSamplingParams(temperature=0.0, logit_bias={30: 6.0, EOS: -1.5})]) == [30]
    assert logits[0, 30] == 0.0


def test_only_rows_that_asked_get_logprobs() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    params = SamplingMetadata(3, (EOS,))
    for row, top in enumerate((None, 0, 2)):
        params.set(row, 1, CoreSamplingParams(temperature=0.0), None if top is None else Logprobs(top=top))
    picked = params.pick(np.arange(3), np.ones(3, dtype=np.int64))
    none, own, best = to_host(sample(logits, picked, torch.zeros(3, 8, dtype=torch.int32), choosing()), picked)
    expected = logits.log_softmax(-1)
    assert none.logprob is None and none.top == ()
    assert own.logprob == pytest.approx(float(expected[1].max())) and own.top == ()
    assert [token for token, _ in best.top] == expected[2].topk(2).indices.tolist()
    assert best.logprob == best.top[0][1]


def test_processed_logprobs_are_of_the_distribution_that_is_sampled() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    requests = [
        CoreSamplingParams(temperature=0.5, seed=1),
        CoreSamplingParams(temperature=0.0, logit_bias={BIASED: 3.0}),
        CoreSamplingParams(temperature=2.0, seed=2, min_new_tokens=2, presence_penalty=1.0),
        CoreSamplingParams(temperature=1e-50, seed=3),
    ]
    expected = logits.clone()
    expected[1, BIASED] += 3.0
    expected[2, EOS] = -torch.inf
    expected[2, 9] -= 1.0
    expected = (expected / torch.tensor([0.5, 1.0, 2.0, 1.0])[:, None]).log_softmax(-1)
    params = SamplingMetadata(4, (EOS,))
    for row, request in enumerate(requests):
        params.set(row, 1, request, Logprobs(top=VOCAB, token_ids=(BIASED, 9)))
    picked = params.pick(np.arange(4), np.full(4, 2))
    known = torch.full((4, 8), 9, dtype=torch.int32)
    raw = to_host(sample(logits, picked, known, choosing()), picked)
    processed = to_host(sample(logits, picked, known, choosing(), processed_logprobs=True), picked)
    for row, (one, other) in enumerate(zip(processed, raw, strict=True)):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(float(expected[row, one.token_id]), abs=1e-5)
        assert one.picked == pytest.approx(expected[row, [BIASED, 9]].tolist(), abs=1e-5)
        assert dict(one.top) == pytest.approx(
            {i: value for i, value in enumerate(expected[row].tolist()) if value != -np.inf}, abs=1e-5
        )
        assert other.logprob == pytest.approx(float(logits[row].log_softmax(-1)[one.token_id]), abs=1e-5)
    assert len(processed[2].top) == VOCAB - 1


def test_a_row_forgets_its_last_request() -> None:
    params = SamplingMetadata(1, (EOS,))
    params.set(0, 1, CoreSamplingParams(logit_bias={1: 2.0}, min_new_tokens=4), None)
    params.set(0, 1, CoreSamplingParams(), None)
    picked = params.pick(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
    assert not picked.bans and not picked.biases


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 1e-50}, id="temperature that is 0 in float32"),
        pytest.param({"logit_bias": {BIASED: 1e300}}, id="infinite bias"),
        pytest.param({"logit_bias": dict.fromkeys(range(VOCAB), -1e300)}, id="nothing left"),
        pytest.param({"min_new_tokens": 2, "stop_token_ids": tuple(range(VOCAB))}, id="all tokens banned"),
        pytest.param({"repetition_penalty": 1e-50}, id="penalty that is 0 in float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_extreme_settings_still_give_a_token(settings: dict[str, Any]) -> None:
    logits = logits_of().abs()
    (token,) = draw(logits[None], [CoreSamplingParams(seed=1, **settings)], known=[[BIASED]])
    assert 0 <= token < VOCAB
    if "temperature" in settings:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_logits_that_are_no_numbers_spoil_only_their_row(value: float, top_p: float) -> None:
    logits = torch.stack([logits_of(), torch.full((VOCAB,), value)])
    request = CoreSamplingParams(seed=1, top_p=top_p)
    sane, spoilt = draw(logits, [request, request])
    assert 0 <= spoilt < VOCAB
    assert sane == draw(logits[:1], [request])[0]


def test_a_leader_gives_a_request_its_seed_and_all_ranks_draw_alike() -> None:
    seeds = Seeds()
    first, second = seeds.fix(CoreSamplingParams()), seeds.fix(CoreSamplingParams())
    assert first.seed is not None and second.seed is not None and first.seed != second.seed
    assert seeds.fix(first) is first
    columns = []
    for _ in range(2):
        params = SamplingMetadata(1, ())
        params.set(0, 4, first, None)
        columns.append(int(params.pick(np.array([0]), np.array([4])).columns["seed"][0]))
    assert columns == [first.seed, first.seed]
