"""Attention over latents by Triton kernels beside torch's: decode rows, drafts, prompt chunks, sparse attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.memory.layout import GroupKind, attention_group
from pdserve.model.attention.latent_index import REUSED, IndexInputs
from pdserve.model.attention.latent_pages import LatentPages
from pdserve.model.attention.latents import LatentProjection
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.triton_latents import TritonLatents
from pdserve.model.config import index_plane, layout_of_layers
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.gpu.decode_attention import counters
from pdserve.model.gpu.latent_attention import LatentTiling, PagedContext, attend_latents
from pdserve.model.layer_spec import IndexSpec
from tests.unit.model.triton_kit import DEVICE, attended, paged

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3}
NOPE, VALUE, SCALE = 8, 12, 0.2
Spans = list[tuple[int, int, int]]
"""Start and end of each row, and how many of its tokens are drafts."""


@dataclasses.dataclass
class Case:
    """A step of rows over pools of two layers: both have latents, the first has index keys."""

    pools: tuple[GroupPool, GroupPool]
    batch: ForwardBatch
    projection: LatentProjection
    query: Tensor
    latents: Tensor
    index: IndexInputs

    @staticmethod
    def of(spans: Spans, page_tokens: int, shape: tuple[int, int, int], index: IndexSpec, dtype: torch.dtype) -> Case:
        """Random latents and keys of what the rows have computed before; all other slots are NaN.

        `shape`: heads, rank and rotated dimensions.
        """
        heads, rank, rope = shape
        torch.manual_seed(len(spans))
        name = str(dtype).removeprefix("torch.")
        planes = attention_group(
            kind=GroupKind.MLA, page_tokens=page_tokens, num_kv_heads=1, head_dim=rank + rope, dtype=name, num_layers=2
        ).planes
        layout = layout_of_layers(
            {
                (GroupKind.MLA, None, planes): [0, 1],
                (GroupKind.INDEX, None, (index_plane(index, page_tokens, name),)): [0],
            },
            2,
            page_tokens,
        )
        starts, ends, drafts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        lengths, counts = ends - starts, -(-ends // page_tokens)
        num_pages, row_of = int(counts.sum()) + 2, np.arange(len(spans)).repeat(lengths)
        table = np.full((len(spans), int(counts.max()) + 1), num_pages, dtype=np.int32)
        scattered, at = np.random.default_rng(0).permutation(num_pages), 0
        for row, count in enumerate(counts):
            table[row, :count] = scattered[at : at + count]
            at += count
        pools = tuple(GroupPool(group, num_pages, torch.device(DEVICE)) for group in layout.groups)
        for pool in pools:
            for layer in range(pool.group.num_layers):
                plane = pool.plane(layer, 0)
                plane[:num_pages] = float("nan")
                for row, start in enumerate(starts.tolist()):
                    known = np.arange(start)
                    pages = torch.from_numpy(table[row, known // page_tokens].astype(np.int64))
                    values = torch.randn(start, plane.shape[-1]).to(DEVICE, dtype)
                    plane[pages, 0, torch.from_numpy(known % page_tokens)] = values
        offsets = lengths.cumsum() - lengths
        positions = starts[row_of] + np.arange(len(row_of)) - offsets[row_of]
        pages = table[row_of, positions // page_tokens].astype(np.int64)
        columns = torch.from_numpy(np.stack((np.zeros_like(positions), positions, pages, positions % page_tokens)))
        host = HostRows(starts, ends, offsets, ends, table, num_drafts=drafts if drafts.any() else None)
        total, weight = len(row_of), torch.randn(heads * (NOPE + VALUE), rank) / 4
        return Case(
            (pools[0], pools[1]),
            ForwardBatch(columns.to(DEVICE), torch.zeros(1, dtype=torch.int64), host),
            LatentProjection(weight.to(DEVICE, dtype), heads, NOPE, VALUE, rope),
            torch.randn(total, heads, NOPE + rope).to(DEVICE, dtype),
            torch.randn(total, rank + rope).to(DEVICE, dtype),
            IndexInputs(
                torch.randn(total, index.num_heads, index.head_dim).to(DEVICE, dtype),
                torch.randn(total, index.head_dim).to(DEVICE, dtype),
                torch.randn(total, index.num_heads, device=DEVICE),
                index.top_k,
            ),
        )

    def outputs(self, backend: LatentPages, *, sparse: bool) -> list[Tensor]:
        """What both layers attend to."""
        step = backend.begin(self.batch)
        indices = (self.index, REUSED) if sparse else (None, None)
        return [
            step.attend_latents(layer, self.query, self.latents, self.projection, SCALE, index)
            for layer, index in enumerate(indices)
        ]


MIXED: Spans = [(40, 41, 0), (16, 20, 3), (30, 62, 0), (3, 9, 0)]
"""Rows that decode, verify drafts, and compute prompts: by expanded latents, and with few new tokens."""


@pytest.mark.parametrize(
    ("spans", "page_tokens", "shape", "dtype", "top_k"),
    [
        (MIXED, 5, (3, 16, 4), torch.float32, None),
        (MIXED, 16, (2, 64, 16), torch.float16, 14),
        ([(150, 151, 0), (0, 1, 0), (0, 9, 0)], 16, (20, 24, 10), torch.float16, None),
        ([(150, 151, 0), (40, 43, 2)], 1, (3, 16, 4), torch.float32, 40),
        ([(0, 9, 0), (2, 7, 0)], 16, (64, 16, 8), torch.float32, 1),
    ],
)
def test_outputs_and_pages_are_torch_s(
    spans: Spans, page_tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, top_k: int | None
) -> None:
    index = IndexSpec(num_heads=12, head_dim=16, top_k=top_k or 1)
    cases = [Case.of(spans, page_tokens, shape, index, dtype) for _ in range(2)]
    backends = LatentPages(*cases[0].pools), TritonLatents(*cases[1].pools)
    expected, got = (
        case.outputs(backend, sparse=top_k is not None) for case, backend in zip(cases, backends, strict=True)
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for pool, other in zip(cases[1].pools, cases[0].pools, strict=True):
        assert torch.equal(pool.pages_as_bytes, other.pages_as_bytes)


def test_index_scores_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those of all tokens do not fit into memory."""
    monkeypatch.setattr("pdserve.model.attention.triton_latents.MAX_SCORES", 300)
    index = IndexSpec(num_heads=12, head_dim=8, top_k=20)
    cases = [Case.of([(30, 50, 0), (70, 71, 0)], 16, (2, 16, 4), index, torch.float32) for _ in range(2)]
    expected = cases[0].outputs(LatentPages(*cases[0].pools), sparse=True)
    got = cases[1].outputs(TritonLatents(*cases[1].pools), sparse=True)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("parts", [1, 8])
def test_parts_of_long_rows_are_added_up(parts: int) -> None:
    """The values are the first columns of the keys; the counters are left at zero."""
    lengths, heads, rank = [300, 3, 140], 20, 16
    rows = paged(lengths, 1, 24, 16, torch.float32, 1)
    q, out = torch.randn(3, heads, 24, device=DEVICE), torch.full((3, heads, rank), float("nan"), device=DEVICE)
    tiling = LatentTiling(16, 16)
    through = counters(3 * tiling.blocks(heads), 1, torch.device(DEVICE))
    every = torch.arange(3, dtype=torch.int32, device=DEVICE)
    context = PagedContext(rows.table, rows.ends - 1, rows.ends, every)
    tiles = torch.stack((every, torch.zeros_like(every)), 1)
    attend_latents(q, out, rows.kv[:, 0, 0], context, tiles, tiling, scale=24**-0.5, parts=parts, through=through)
    assert not through.any()
    for row in range(3):
        keys = rows.keys[row]
        one = attended(q[row : row + 1], keys, keys, lengths[row] - 1, window=0, softcap=0.0, sinks=None)
        torch.testing.assert_close(out[row : row + 1].double().cpu(), one[..., :rank], atol=2e-5, rtol=2e-5)
