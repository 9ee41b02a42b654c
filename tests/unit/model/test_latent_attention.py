"""Attention over latents in pages beside plain attention in float64: rows of all lengths, windows, selected keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, attention_group
from pdserve.model.attention.latents import LatentPlane, LatentProjection, attend_latents
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.paged_attention import PagedPlane
from pdserve.model.attention.paged_rows import PassRows
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.hf.interface import AttentionCall

HEADS, NOPE, V_WIDTH, RANK, ROPE = 3, 8, 12, 16, 4
PAGE_TOKENS, MAX_PAGES = 16, 6
CALL = AttentionCall(torch.empty(0), torch.empty(0), torch.empty(0), None, 0.3, None, None, None, None)


@dataclasses.dataclass
class Case:
    """Rows of `(start, end)` whose latents lie in pages; `contexts` has them by row, `[end, latent]`."""

    rows: PassRows
    contexts: list[Tensor]
    query: Tensor
    new: Tensor
    layer: LatentPlane


def case_of(spans: Sequence[tuple[int, int]]) -> Case:
    """Fill pages with random latents; slots behind the last token of a row are NaN."""
    generator = torch.Generator().manual_seed(0)
    starts, ends = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    group = attention_group(
        page_tokens=PAGE_TOKENS, num_kv_heads=1, head_dim=RANK + ROPE, dtype="float32", num_layers=1,
        kind=GroupKind.MLA,
    )  # fmt: skip
    pool = GroupPool(group, len(spans) * MAX_PAGES, torch.device("cpu"))
    plane = pool.plane(0, 0)
    plane[: pool.num_pages] = float("nan")
    pages = torch.randperm(pool.num_pages, generator=generator).view(len(spans), MAX_PAGES)
    contexts, new = [], []
    for row, (start, end) in enumerate(spans):
        latents = torch.randn(end, RANK + ROPE, generator=generator)
        for position in range(end):
            plane[pages[row, position // PAGE_TOKENS], 0, position % PAGE_TOKENS] = latents[position]
        contexts.append(latents)
        new.append(latents[start:])
    lengths = ends - starts
    host = HostRows(starts, ends, lengths.cumsum() - lengths, ends, pages.numpy().astype(np.int32))
    total = int(lengths.sum())
    batch = ForwardBatch(torch.zeros(4, total, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), host)
    weight = torch.randn(HEADS * (NOPE + V_WIDTH), RANK, generator=generator)
    projection = LatentProjection(weight, HEADS, NOPE, V_WIDTH, ROPE)
    return Case(
        PassRows(batch, np.arange(len(spans)), PAGE_TOKENS, is_decode=False),
        contexts,
        torch.randn(total, HEADS, NOPE + ROPE, generator=generator),
        torch.cat(new),
        LatentPlane(PagedPlane(plane, pool.plane_blocks(0, 0)), RANK, pool.null_page, projection),
    )


def expected(case: Case, call: AttentionCall) -> Tensor:
    """Attend with every query alone, over expanded keys and values in float64."""
    assert case.layer.projection is not None
    found, token, before = [], 0, 0
    for start, end, context in zip(case.rows.starts, case.rows.ends, case.contexts, strict=True):
        keys, values = (x.double() for x in case.layer.projection.expand(context))
        for position in range(start, end):
            scores = torch.einsum("hd,hkd->hk", case.query[token].double(), keys) * call.scaling
            visible = torch.arange(end) <= position
            if call.window is not None:
                visible &= torch.arange(end) > position - call.window
            if call.indices is not None:
                chosen = set((call.indices[0, token] - before).tolist())
                visible &= torch.tensor([key in chosen for key in range(end)])
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            found.append(torch.einsum("hk,hkd->hd", weights, values))
            token += 1
        before += end
    return torch.stack(found).float()


SPANS = [(40, 41), (0, 70), (16, 20), (0, 1), (33, 80), (8, 9)]
"""Rows that decode, with few new tokens and with many."""


@pytest.mark.parametrize("window", [None, 24])
def test_rows_of_all_lengths_attend_as_over_expanded_keys_and_values(window: int | None) -> None:
    case, call = case_of(SPANS), dataclasses.replace(CALL, window=window)
    assert case.layer.projection is not None
    assert [case.layer.projection.is_worth(end - start) for start, end in SPANS] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    found = attend_latents(case.query, case.new, call, case.rows, case.layer)
    torch.testing.assert_close(found, expected(case, call), rtol=1e-4, atol=1e-5)


def test_selected_keys_are_those_of_the_own_row() -> None:
    case = case_of(SPANS)
    generator = torch.Generator().manual_seed(1)
    indices, before = [], 0
    for start, end in SPANS:
        for position in range(start, end):
            own = before + torch.randperm(position + 1, generator=generator)[:9]
            strangers = torch.full((10 - len(own),), (before + end) % sum(end for _, end in SPANS))
            indices.append(torch.cat([own, strangers]))
        before += end
    call = dataclasses.replace(CALL, indices=torch.stack(indices)[None].int())
    found = attend_latents(case.query, case.new, call, case.rows, case.layer)
    torch.testing.assert_close(found, expected(case, call), rtol=1e-4, atol=1e-5)


def test_queries_are_attended_in_blocks_that_bound_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([(16, 36)])
    whole = attend_latents(case.query, case.new, CALL, case.rows, case.layer)
    monkeypatch.setattr("pdserve.model.attention.latents.MAX_SCORES", 7 * HEADS * 36)
    blocks = attend_latents(case.query, case.new, CALL, case.rows, case.layer)
    torch.testing.assert_close(blocks, whole, rtol=1e-4, atol=1e-5)
