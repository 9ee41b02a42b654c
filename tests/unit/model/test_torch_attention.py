"""Torch's attention over pages beside the definition: rows of one, few and many new tokens, in a pool of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.memory.layout import attention_group
from pdserve.model.attention import torch_sdpa
from pdserve.model.attention.batch_invariant import BatchInvariantAttention
from pdserve.model.attention.interface import Heads, ScoreRule
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from tests.unit.model.native_kit import batch_of

CPU = torch.device("cpu")
DIM = 16
ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=7)
SHAPES = {"heads": st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2)]), "page": st.sampled_from([1, 3, 16, 64])}


def attended(
    spans: list[tuple[int, int]], heads: tuple[int, int], page: int, seed: int = 0, window: int | None = None,
    make: type[TorchAttention | BatchInvariantAttention] = TorchAttention, *,
    scale: float | None = None, softcap: float | None = None, sinks: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the backend makes of rows that compute positions `[start, end)`, and the definition, in float64.

    The page table has no pages behind the window.
    """
    torch.manual_seed(seed)
    batch, num_pages = batch_of(spans, page, seed=seed)
    table = batch.host.pages.copy()
    group = attention_group(
        num_layers=2, page_tokens=page, num_kv_heads=heads[1], head_dim=DIM, dtype="float32",
    )  # fmt: skip
    pool = KVPool(group, num_pages, CPU)
    pool.pages.fill_(float("nan"))
    num_tokens = len(batch.positions)
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], DIM)
    scores_of_nothing = torch.randn(heads[0]) * 3 if sinks else None
    expected = []
    for row, (start, end) in enumerate(spans):
        keys, values = torch.randn(2, end, heads[1], DIM)
        for position in range(start):
            where = int(table[row, position // page])
            pool.layer(1)[where, :, :, position % page] = torch.stack((keys[position], values[position]))
        first = int(batch.host.offsets[row])
        new = qkv[first : first + end - start]
        keys[start:], values[start:] = new[:, heads[0] : heads[0] + heads[1]], new[:, heads[0] + heads[1] :]
        q, k, v = (
            x.double().transpose(0, 1).repeat_interleave(times, 0)
            for x, times in ((new[:, : heads[0]], 1), (keys, heads[0] // heads[1]), (values, heads[0] // heads[1]))
        )
        scores = q @ k.transpose(1, 2) * (DIM**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = torch.arange(end) > torch.arange(start, end)[:, None]
        if window is not None:
            hidden |= torch.arange(end) <= torch.arange(start, end)[:, None] - window
            batch.host.pages[row, : max(0, start - window + 1) // page] = num_pages + 1000
        scores = scores.masked_fill(hidden, float("-inf"))
        if scores_of_nothing is not None:
            scores = torch.cat((scores, scores_of_nothing.double()[:, None, None].expand(-1, end - start, 1)), -1)
        expected.append((scores.softmax(-1)[:, :, :end] @ v).transpose(0, 1).flatten(1))
    cos, sin = torch.ones(num_tokens, 1, DIM), torch.zeros(num_tokens, 1, DIM)
    step = make(pool, heads[0], CPU, ScoreRule(window=window, scale=scale, softcap=softcap)).begin(batch)
    got = step.attend(1, Heads(qkv, heads[0], heads[1], None, None, cos, sin, sinks=scores_of_nothing))
    assert pool.layer(0)[:num_pages].isnan().all(), "the other layer is not written"
    return got, torch.cat(expected)


@settings(max_examples=60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(rows=ROWS, alone=st.sampled_from([1, 400, 1 << 14]), together=st.sampled_from([1, 500, 1 << 18]), **SHAPES)
def test_it_is_the_definition(
    rows: list[tuple[int, int]], alone: int, together: int, heads: tuple[int, int], page: int
) -> None:
    spans = [(start, start + count) for start, count in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "MIN_ALONE_PRODUCT", alone)
        patch.setattr(torch_sdpa, "MAX_GROUP_PRODUCT", together)
        got, expected = attended(spans, heads, page)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(rows=ROWS, alone=st.sampled_from([1, 400]), block=st.sampled_from([7, 512]), window=st.integers(1, 70), **SHAPES)
def test_a_window_hides_earlier_tokens_and_their_pages_are_not_read(
    rows: list[tuple[int, int]], alone: int, block: int, window: int, heads: tuple[int, int], page: int
) -> None:
    spans = [(start, start + count) for start, count in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "MIN_ALONE_PRODUCT", alone)
        patch.setattr(torch_sdpa, "QUERY_BLOCK", block)
        got, expected = attended(spans, heads, page, window=window)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 150)), min_size=1, max_size=4),
    window=st.sampled_from([1, 24, 127, 128, 129, 300]), page=st.sampled_from([1, 3, 16, 48, 128]),
)  # fmt: skip
def test_batch_invariant_attention_has_windows_too(rows: list[tuple[int, int]], window: int, page: int) -> None:
    spans = [(start, start + count) for start, count in rows]
    got, expected = attended(spans, (4, 2), page, window=window, make=BatchInvariantAttention)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    rows=ROWS, alone=st.sampled_from([1, 1 << 14]), block=st.sampled_from([7, 512]),
    window=st.sampled_from([None, 20]), softcap=st.sampled_from([None, 2.0]), sinks=st.booleans(), **SHAPES,
)  # fmt: skip
def test_scales_soft_caps_and_sinks(
    rows: list[tuple[int, int]],
    alone: int,
    block: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    heads: tuple[int, int],
    page: int,
) -> None:
    spans = [(start, start + count) for start, count in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "MIN_ALONE_PRODUCT", alone)
        patch.setattr(torch_sdpa, "QUERY_BLOCK", block)
        got, expected = attended(spans, heads, page, window=window, scale=0.4, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 24])
def test_batch_invariant_attention_has_them_too(softcap: float | None, sinks: bool, window: int | None) -> None:
    for spans in ([(0, 1), (130, 300), (20, 21), (300, 301)], [(0, 140)]):
        got, expected = attended(
            spans, (6, 2), 16, window=window, make=BatchInvariantAttention, scale=0.4, softcap=softcap, sinks=sinks
        )
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("spans", "calls"),
    [
        ([(0, 8)] * 64, 1),
        ([(100, 101)] * 64, 1),
        ([(0, 8)] * 30 + [(50, 57)] * 30, 1),  # of one page, too
        ([(0, 8)] * 30 + [(50, 60)] * 30, 2),
        ([(0, 64), (0, 128), (0, 130), (0, 127)], 4),  # two by themselves, the others too different
        ([(0, 120)] * 40, 3),  # 18 of them at once
    ],
)
def test_rows_of_few_new_tokens_are_attended_together(
    spans: list[tuple[int, int]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    sdpa: Any = F.scaled_dot_product_attention

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made.append(tuple(q.shape))
        found: Tensor = sdpa(q, *args, **kwargs)
        return found

    monkeypatch.setattr(torch_sdpa.F, "scaled_dot_product_attention", counted)
    got, expected = attended(spans, (4, 2), 64)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    assert len(made) == calls, made
