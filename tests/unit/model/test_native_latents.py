"""Attention over latents by the CPU kernels against torch: products by head, rotation, pages, at every level."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.attention.latents import LatentProjection
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.native.latents import LatentProgram
from pdserve.model.native.resources import HeadShape, Threads
from pdserve.model.native.weights import Arena, Packed, open_packed
from tests.unit.model.native_kit import batch_of, known_pages, needs_kernels, part_of, rms, rotated
from tests.unit.model.native_programs import FEW, begin, fenced, levels, poison, put, relative, taken

pytestmark = needs_kernels
SHAPES = [(4, 16, 8, 8, 12), (16, 64, 32, 16, 32), (3, 512, 128, 64, 128), (128, 32, 16, 8, 16), (2, 24, 10, 6, 6)]
"""Heads, rank, unrotated and rotated dimensions of a key, dimensions of a value."""
SCALE = 0.11
UNROTATED = 3
"""In place of `pairs`: nothing is rotated."""
Shape = tuple[int, int, int, int, int]


def by_head(weights: Tensor) -> Packed:
    """Pack bf16 `[heads, out, in]`."""
    packed = open_packed(Arena(), "bf16", weights.shape[1], weights.shape[2], count=len(weights))
    for head, weight in enumerate(weights):
        packed.put(weight, index=head)
    return packed


def parted(x: Tensor) -> Tensor:
    """Move the dimensions of pairs that lie side by side into halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def beside(x: Tensor) -> Tensor:
    """The opposite of `parted`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def turned(x: Tensor, batch: ForwardBatch, inverse: Tensor, pairs: int) -> Tensor:
    """Rotate `[tokens, heads, rope]`; `pairs` as in `LatentProgram.place_latents`, or UNROTATED."""
    if pairs == UNROTATED:
        return x
    out = rotated(parted(x) if pairs else x, batch.positions, inverse)
    return beside(out) if pairs == 2 else out


@levels
@pytest.mark.parametrize(("heads", "inputs", "outputs", "behind"), [(3, 8, 16, 8), (16, 128, 512, 64), (5, 33, 40, 3)])
@pytest.mark.parametrize("rows", [1, 16, 45])
def test_each_head_has_weights_of_its_own(
    level: str, heads: int, inputs: int, outputs: int, behind: int, rows: int
) -> None:
    torch.manual_seed(rows)
    weights = torch.randn(heads, outputs, inputs).bfloat16()
    x = torch.randn(rows, heads, inputs + behind)
    found = []
    for threads in (1, 3):
        p = LatentProgram(Threads(threads), level)
        source, out = p.buffer(heads * (inputs + behind)), p.buffer(heads * outputs)
        p.head_product(source, by_head(weights), out, num_heads=heads)
        begin(p, rows)
        put(p, source, x.flatten(1))
        poison(p, out, rows)
        p.run(0, 1)
        found.append(taken(p, out, rows).clone())
    wanted = torch.einsum("thi,hoi->tho", x[..., :inputs].bfloat16().float(), weights.float())
    assert relative(found[0], wanted.flatten(1)) < 0.004
    assert torch.equal(*found), "in any split over threads"


@levels
def test_heads_may_share_their_inputs_behind_others(level: str) -> None:
    torch.manual_seed(0)
    heads, sharing, inputs, outputs, first, rows = 6, 3, 48, 16, 20, 18
    weights, x = torch.randn(heads, outputs, inputs).bfloat16(), torch.randn(rows, first + 2 * inputs)
    p = LatentProgram(Threads(2), level)
    source, out = p.buffer(x.shape[1]), p.buffer(heads * outputs)
    p.head_product(source, by_head(weights), out, num_heads=heads, first=first, sharing=sharing)
    begin(p, rows)
    put(p, source, x)
    poison(p, out, rows)
    p.run(0, 1)
    shared = x[:, first:].view(rows, 2, inputs).repeat_interleave(sharing, 1)
    wanted = torch.einsum("thi,hoi->tho", shared.bfloat16().float(), weights.float())
    assert relative(taken(p, out, rows), wanted.flatten(1)) < 0.004


class Layer:
    """A program of one MLA layer behind its projections, the second of two in its pool."""

    def __init__(
        self,
        level: str,
        shape: Shape,
        pages: Tensor,
        page_tokens: int,
        pairs: int,
        threads: int,
    ) -> None:
        heads, rank, nope, rope, value = shape
        self.shape, self.pairs, dim = shape, pairs, rank + rope
        generator = torch.Generator().manual_seed(1)
        self.weight = (torch.randn(heads * (nope + value), rank, generator=generator) / 6).bfloat16()
        self.norm = torch.rand(rank, generator=generator) + 0.5
        self.inverse = 1e4 ** (-torch.arange(0, rope, 2) / rope)
        split = self.weight.view(heads, nope + value, rank)
        self.program = p = LatentProgram(Threads(threads), level)
        number = p.add_heads(HeadShape(2, heads, 1, page_tokens, dim, scale=SCALE, of_latents=True), pages)
        if pairs != UNROTATED:
            p.angles(self.inverse, 1.0, heads=number)
        self.queries, self.down = p.buffer(heads * (nope + rope)), p.buffer(dim)
        absorbed, attended = p.buffer(heads * rank), p.buffer(heads * dim)
        self.out = p.buffer(heads * value)
        p.head_product(self.queries, by_head(split[:, :nope].transpose(1, 2)), absorbed, num_heads=heads)
        p.place_latents(
            absorbed, self.queries, self.down, 1, fenced(self.norm), 1e-6, pairs=pairs % UNROTATED, heads=number
        )
        p.attend(1, attended, heads=number)
        p.head_product(attended, by_head(split[:, nope:]), self.out, num_heads=heads)

    def run(self, batch: ForwardBatch, queries: Tensor, down: Tensor) -> Tensor:
        """Return the heads' outputs of the step's tokens, `[tokens, heads * value]`."""
        p, tokens = self.program, batch.num_tokens
        p.reserve(tokens + 1, 0)
        p.begin(batch)
        put(p, self.queries, queries.flatten(1))
        put(p, self.down, down)
        poison(p, self.out, tokens)
        p.run(0, p.num_ops)
        return taken(p, self.out, tokens).clone()

    def latents(self, batch: ForwardBatch, down: Tensor) -> Tensor:
        """The latents of the step's tokens, by torch: `[tokens, rank + rope]`."""
        rank = self.shape[1]
        key = turned(down[:, None, rank:], batch, self.inverse, self.pairs)[:, 0]
        return torch.cat((rms(down[:, :rank], self.norm, 1e-6), key), 1)

    def expected(self, batch: ForwardBatch, queries: Tensor, pages: Tensor, page_tokens: int) -> Tensor:
        """Attention over expanded keys and values, token by token."""
        heads, _, nope, rope, value = self.shape
        projection = LatentProjection(self.weight.float(), heads, nope, value, rope)
        ropes = turned(queries[..., nope:], batch, self.inverse, self.pairs)
        queries = torch.cat((queries[..., :nope], ropes), -1)
        out = torch.empty(len(queries), heads, value)
        for line, (start, end) in enumerate(zip(batch.host.starts.tolist(), batch.host.ends.tolist(), strict=True)):
            tokens = np.arange(end)
            table = torch.from_numpy(batch.host.pages[line, tokens // page_tokens].astype(np.int64))
            context = pages[table, 1, 0, 0, torch.from_numpy(tokens % page_tokens)].float()
            keys, values = projection.expand(context)
            for position in range(start, end):
                flat = int(batch.host.offsets[line]) + position - start
                scores = torch.einsum("hd,hkd->hk", queries[flat], keys[:, : position + 1]) * SCALE
                out[flat] = torch.einsum("hk,hkd->hd", scores.softmax(-1), values[:, : position + 1])
        return out.flatten(1)


@levels
@FEW
@given(
    shape=st.sampled_from(SHAPES),
    page_tokens=st.sampled_from([1, 5, 16, 48, 64]),
    rows=st.lists(
        st.sampled_from([(0, 1), (0, 2), (0, 40), (17, 18), (255, 256), (300, 301), (130, 150)]), min_size=1, max_size=4
    ),
    pairs=st.integers(0, UNROTATED),
    threads=st.integers(1, 3),
)
def test_latents_are_written_and_attended(
    level: str, shape: Shape, page_tokens: int, rows: list[tuple[int, int]], pairs: int,
    threads: int,
) -> None:  # fmt: skip
    heads, rank, nope, rope, _ = shape
    torch.manual_seed(len(rows))
    batch, num_pages = batch_of(rows, page_tokens)
    pages = known_pages(batch, num_pages, page_tokens, rank + rope)
    layer = Layer(level, shape, mine := pages.clone(), page_tokens, pairs, threads)
    queries, down = torch.randn(batch.num_tokens, heads, nope + rope), torch.randn(batch.num_tokens, rank + rope)
    found = layer.run(batch, queries, down)
    pages[batch.write_pages, 1, 0, 0, batch.write_slots] = layer.latents(batch, down).bfloat16()
    torch.testing.assert_close(mine, pages, atol=0.04, rtol=0.01, equal_nan=True)
    wanted = layer.expected(batch, queries, pages, page_tokens)
    assert relative(found, wanted) < 0.02


@levels
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_bits_are_those_of_any_chunks_threads_and_steps(level: str, shape: Shape) -> None:
    """A prompt at once and in chunks; decode rows alone and together."""
    heads, rank, nope, rope, _ = shape
    torch.manual_seed(0)
    whole, num_pages = batch_of([(0, 150)], 16)
    queries, down = torch.randn(150, heads, nope + rope), torch.randn(150, rank + rope)
    outs, pools = [], []
    for cuts, threads in (([0, 120, 150], 1), ([0, 7, 64, 120, 150], 3)):
        pages = torch.full((num_pages, 2, 1, 1, 16, rank + rope), float("nan"), dtype=torch.bfloat16)
        layer = Layer(level, shape, pages, 16, 1, threads)
        parts = [
            layer.run(part_of(whole, start, end, prompt=120), queries[start:end], down[start:end])
            for start, end in itertools.pairwise(cuts)
        ]
        outs.append(torch.cat(parts))
        pools.append(pages)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(pools[0][:, 1].nan_to_num(), pools[1][:, 1].nan_to_num())
    ones = Layer(level, shape, pools[1], 16, 1, 1)
    for at in (120, 133, 149):
        alone = ones.run(part_of(whole, at, at + 1, prompt=120), queries[at : at + 1], down[at : at + 1])
        assert torch.equal(alone[0], outs[0][at])
