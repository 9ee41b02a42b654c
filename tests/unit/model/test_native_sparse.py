"""Sparse attention (DSA) by the CPU kernels against its definition: index keys, selections, ties, bits, every level."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.native.latents import LatentProgram
from pdserve.model.native.resources import HeadShape, Threads
from tests.unit.model.native_kit import batch_of, known_pages, needs_kernels, part_of, rms, rotated
from tests.unit.model.native_programs import FEW, begin, fenced, levels, poison, put, relative, taken

pytestmark = needs_kernels
SCALE, EPS = 0.13, 1e-6
DIMS = st.sampled_from([(4, 16, 8, 4, 16), (1, 24, 10, 3, 32), (32, 64, 16, 40, 16), (5, 512, 64, 64, 128)])
"""Heads, rank and rotated dimensions of latents; heads and dimension of the index."""
Dims = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a step's tokens bring: queries over latents, latents before their norm, and those of the index."""

    absorbed: Tensor
    queries: Tensor
    down: Tensor
    index_queries: Tensor
    index_keys: Tensor
    weights: Tensor

    @staticmethod
    def of(tokens: int, dims: Dims, seed: int = 0) -> Inputs:
        """Random ones; the weights of index heads have both signs."""
        heads, rank, rope, index_heads, dim = dims
        generator = torch.Generator().manual_seed(seed)
        shapes = (heads * rank, heads * rope, rank + rope, index_heads * dim, dim, index_heads)
        return Inputs(*(torch.randn(tokens, width, generator=generator).bfloat16().float() for width in shapes))

    def part(self, start: int, end: int) -> Inputs:
        """Those of tokens `[start, end)`."""
        return Inputs(*(getattr(self, field.name)[start:end] for field in dataclasses.fields(self)))


class Layer:
    """A program of one layer behind its projections, the second of two in its pools. `attends`: layers that use it."""

    def __init__(
        self, level: str, dims: Dims, pools: tuple[Tensor, Tensor], page_tokens: int, top_k: int, threads: int,
        *, beside: bool = False, rotates: bool = True, attends: int = 1,
    ) -> None:  # fmt: skip
        heads, rank, rope, index_heads, dim = self.dims = dims
        self.top_k, self.beside, self.rotates = top_k, beside, rotates
        self.inverse = 1e2 ** (-torch.arange(0, rope, 2) / rope)
        self.norm, self.bias = torch.linspace(0.5, 1.5, dim), torch.linspace(-0.3, 0.4, dim)
        self.program = p = LatentProgram(Threads(threads), level)
        latents = HeadShape(2, heads, 1, page_tokens, rank + rope, scale=SCALE, of_latents=True)
        index = HeadShape(2, index_heads, 1, page_tokens, dim, scale=1.0, of_latents=True)
        numbers = [p.add_heads(shape, pool) for shape, pool in zip((latents, index), pools, strict=True)]
        if rotates:
            for number in numbers:
                p.angles(self.inverse, 1.0, heads=number)
        widths = (heads * rank, heads * rope, rank + rope, index_heads * dim, dim, index_heads)
        self.sources = [p.buffer(width) for width in widths]
        absorbed, queries, down, index_queries, index_keys, weights = self.sources
        self.outs = [p.buffer(heads * (rank + rope)) for _ in range(attends)]
        norm = fenced(self.norm), fenced(self.bias)
        p.place_index(index_queries, index_keys, 1, norm, EPS, beside=beside, heads=numbers[1])
        p.select_tokens(1, weights, (index_heads * dim) ** -0.5, top_k, heads=numbers[1])
        p.place_latents(absorbed, queries, down, 1, fenced(torch.ones(rank)), EPS, pairs=0, heads=numbers[0])
        for out in self.outs:
            p.attend_selected(1, out, top_k, heads=numbers[0])

    def run(self, batch: ForwardBatch, inputs: Inputs) -> Tensor:
        """Return what the tokens attend to, `[tokens, heads * (rank + rope)]`; the same for all layers that attend."""
        p, tokens = self.program, batch.num_tokens
        p.reserve(tokens + 1, 0)
        p.begin(batch)
        for buffer, field in zip(self.sources, dataclasses.fields(inputs), strict=True):
            put(p, buffer, getattr(inputs, field.name))
        for out in self.outs:
            poison(p, out, tokens)
        p.run(0, p.num_ops)
        found = [taken(p, out, tokens).clone() for out in self.outs]
        assert all(torch.equal(out, found[0]) for out in found)
        return found[0]

    def turned(self, x: Tensor, batch: ForwardBatch, *, index: bool) -> Tensor:
        """Rotate heads `[tokens, heads, dim]`: their first dimensions, as many as the latents rotate."""
        if not self.rotates:
            return x
        rope = self.dims[2]
        first = x[..., :rope]
        if index and self.beside:
            first = torch.cat((first[..., ::2], first[..., 1::2]), -1)
        return torch.cat((rotated(first, batch.positions, self.inverse), x[..., rope:]), -1)

    def keys(self, batch: ForwardBatch, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Latents and index keys of the step's tokens."""
        rank = self.dims[1]
        rope = self.turned(inputs.down[:, None, rank:], batch, index=False)[:, 0]
        latents = torch.cat((rms(inputs.down[:, :rank], torch.ones(rank), EPS), rope), 1)
        normed = F.layer_norm(inputs.index_keys, self.norm.shape, self.norm, self.bias, EPS)
        return latents, self.turned(normed[:, None], batch, index=True)[:, 0]

    def expected(self, batch: ForwardBatch, inputs: Inputs, pools: tuple[Tensor, Tensor], page_tokens: int) -> Tensor:
        """The definition, token by token, over the latents and the index keys in pages."""
        heads, rank, rope, index_heads, dim = self.dims
        ropes = self.turned(inputs.queries.view(-1, heads, rope), batch, index=False)
        queries = torch.cat((inputs.absorbed.view(-1, heads, rank), ropes), -1)
        selecting = self.turned(inputs.index_queries.view(-1, index_heads, dim), batch, index=True).bfloat16().double()
        out = torch.empty_like(queries)
        for line, (start, end) in enumerate(zip(batch.host.starts.tolist(), batch.host.ends.tolist(), strict=True)):
            tokens = np.arange(end)
            table = torch.from_numpy(batch.host.pages[line, tokens // page_tokens].astype(np.int64))
            latents, keys = (pool[table, 1, 0, 0, torch.from_numpy(tokens % page_tokens)] for pool in pools)
            for position in range(start, end):
                flat = int(batch.host.offsets[line]) + position - start
                products = torch.einsum("hd,kd->hk", selecting[flat], keys[: position + 1].double()).relu()
                scores = torch.einsum("h,hk->k", inputs.weights[flat].double(), products)
                chosen = scores.sort(descending=True, stable=True).indices[: self.top_k]
                seen = latents[chosen].float()
                out[flat] = (queries[flat] @ seen.T * SCALE).softmax(-1) @ seen
        return out.flatten(1)


def pools_of(batch: ForwardBatch, num_pages: int, page_tokens: int, dims: Dims) -> tuple[Tensor, Tensor]:
    """Latents and index keys of what the rows have computed before; all else is NaN."""
    return known_pages(batch, num_pages, page_tokens, dims[1] + dims[2]), known_pages(
        batch, num_pages, page_tokens, dims[4]
    )


@levels
@FEW
@given(
    dims=DIMS,
    page_tokens=st.sampled_from([1, 5, 16, 64]),
    rows=st.lists(
        st.sampled_from([(0, 1), (0, 40), (17, 18), (31, 33), (300, 301), (120, 150), (640, 642)]),
        min_size=1, max_size=4,
    ),
    top_k=st.sampled_from([1, 16, 32, 37, 140]),
    beside=st.booleans(),
    rotates=st.booleans(),
    threads=st.integers(1, 3),
)  # fmt: skip
def test_tokens_attend_to_those_with_the_highest_scores(
    level: str, dims: Dims, page_tokens: int, rows: list[tuple[int, int]], top_k: int, beside: bool, rotates: bool,
    threads: int,
) -> None:  # fmt: skip
    torch.manual_seed(len(rows))
    batch, num_pages = batch_of(rows, page_tokens)
    inputs, pools = Inputs.of(batch.num_tokens, dims), pools_of(batch, num_pages, page_tokens, dims)
    latents, keys = (pool.clone() for pool in pools)
    layer = Layer(level, dims, (latents, keys), page_tokens, top_k, threads, beside=beside, rotates=rotates, attends=2)
    found = layer.run(batch, inputs)
    for mine, pool, written in zip((latents, keys), pools, layer.keys(batch, inputs), strict=True):
        pool[batch.write_pages, 1, 0, 0, batch.write_slots] = written.bfloat16()
        torch.testing.assert_close(mine, pool, atol=0.04, rtol=0.01, equal_nan=True)
    assert relative(found, layer.expected(batch, inputs, (latents, keys), page_tokens)) < 0.02


@levels
@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_of_equal_scores_the_earliest_tokens_are_taken(level: str, weight: float) -> None:
    """With weights of 0 all scores are 0; with negative ones those whose products are all negative are the highest."""
    dims, top_k = (4, 16, 8, 4, 16), 24
    batch, num_pages = batch_of([(0, 90), (200, 201)], 16)
    inputs = dataclasses.replace(Inputs.of(batch.num_tokens, dims), weights=torch.full((batch.num_tokens, 4), weight))
    pools = pools_of(batch, num_pages, 16, dims)
    layer = Layer(level, dims, pools, 16, top_k, 2)
    found = layer.run(batch, inputs)
    assert relative(found, layer.expected(batch, inputs, pools, 16)) < 0.02


@levels
@pytest.mark.parametrize("dims", [(4, 16, 8, 4, 16), (32, 64, 16, 40, 32)])
def test_bits_are_those_of_any_chunks_threads_and_steps(level: str, dims: Dims) -> None:
    """A prompt at once and in chunks; decode rows alone, together, and with drafts."""
    whole, num_pages = batch_of([(0, 700)], 16)
    inputs, top_k = Inputs.of(700, dims), 150
    outs, pools = [], []
    for cuts, threads in (([0, 640, 700], 1), ([0, 7, 64, 145, 300, 640, 650, 700], 3)):
        nothing = tuple(
            torch.full((num_pages, 2, 1, 1, 16, dim), float("nan"), dtype=torch.bfloat16)
            for dim in (dims[1] + dims[2], dims[4])
        )
        layer = Layer(level, dims, (nothing[0], nothing[1]), 16, top_k, threads)
        parts = [
            layer.run(part_of(whole, start, end, prompt=640), inputs.part(start, end))
            for start, end in itertools.pairwise(cuts)
        ]
        outs.append(torch.cat(parts))
        pools.append((nothing[0], nothing[1]))
    assert torch.equal(outs[0], outs[1])
    for mine, other in zip(*pools, strict=True):
        assert torch.equal(mine[:, 1].nan_to_num(), other[:, 1].nan_to_num())
    ones = Layer(level, dims, pools[1], 16, top_k, 2)
    for at in (640, 666, 699):
        alone = ones.run(part_of(whole, at, at + 1, prompt=640), inputs.part(at, at + 1))
        assert torch.equal(alone[0], outs[0][at])


@levels
def test_scores_that_do_not_fit_memory_at_once_are_computed_in_parts(level: str) -> None:
    """Two rows have about 40,000 cached tokens. Each of 121 new tokens attends to the 64 that it selects."""
    dims, top_k = (1, 16, 8, 2, 16), 64
    batch, num_pages = batch_of([(40_000, 40_120), (39_000, 39_001)], 64)
    inputs, pools = Inputs.of(batch.num_tokens, dims), pools_of(batch, num_pages, 64, dims)
    layer = Layer(level, dims, pools, 64, top_k, 2)
    found = layer.run(batch, inputs)
    chosen = [0, 64, 119, 120]
    rows = [(40_000, 40_001), (40_064, 40_065), (40_119, 40_120), (39_000, 39_001)]
    some, _ = batch_of(rows, 64)
    lines = batch.host.pages[[0, 0, 0, 1]]
    some = dataclasses.replace(some, host=dataclasses.replace(some.host, pages=lines))
    picked = Inputs(*(getattr(inputs, field.name)[chosen] for field in dataclasses.fields(inputs)))
    assert relative(found[chosen], layer.expected(some, picked, pools, 64)) < 0.02


def test_a_step_without_tokens_selects_nothing() -> None:
    batch, num_pages = batch_of([(0, 3)], 16)
    dims = (4, 16, 8, 4, 16)
    layer = Layer("avx2", dims, pools_of(batch, num_pages, 16, dims), 16, 2, 1)
    begin(layer.program, 1, of_samples=True)
    layer.program.run(0, layer.program.num_ops)
