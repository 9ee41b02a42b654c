"""What `kernels` measures: each kernel of the CPU at the sizes that models have, with what it must read and compute.

A case of SmolLM2-135M's layers is all of them one behind the other, as in a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.strip_reader import StripReader
from pdserve.base.native import best_level
from pdserve.config.groups import MemoryConfig
from pdserve.executor.input_batch import SamplingMetadata
from pdserve.memory.shared import allocate_private
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.native.delta import DeltaShape, DeltaStates
from pdserve.model.native.program import Program
from pdserve.model.native.resources import HeadShape, Threads
from pdserve.model.native.sampling import NativeChooser
from pdserve.model.native.weights import Arena, Format, open_packed, pack, pack_gated
from pdserve.protocol.sampling import CoreSamplingParams

HEADS = HeadShape(layers=30, num_heads=9, num_kv_heads=3, page_tokens=MemoryConfig().page_size, dim=64)
"""SmolLM2-135M's, in pages as servers have them."""
NUM_OUT, NUM_IN = 3072, 576
"""The largest linear layer of SmolLM2-135M, gate and up, as often as it has layers: together larger than the caches."""
ITEM_BYTES: dict[Format, int] = {"bf16": 2, "int8": 1}
TOKEN_BYTES = 2 * HEADS.num_kv_heads * HEADS.dim * 2
"""Of the keys and values of a token in one layer."""
DECODED = ((1, 256), (16, 256), (64, 256), (1, 4096), (16, 1024))
"""Rows and tokens of each."""
LEAST_READ = 32 << 20
"""Bytes that attention of rows that decode reads in one call at least: as many as a large cache holds, and so many that
the call itself, and the code of the first layer, which is in no cache yet, take next to nothing of it, as in a step.
"""
VOCAB = 49152
EXPERTS, TOP_K, EXPERT_OUT, EXPERT_IN = 32, 8, 768, 2048
"""A layer with experts of the size of Qwen3-30B-A3B's, of which it has a quarter."""
DELTA, DELTA_LAYERS = DeltaShape(16, 16, 128, 128, 4), 18
"""GatedDeltaNet layers of the size of Qwen3.5-0.8B's."""
ROUTED = 128
"""All its experts, among which its routers choose."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size: what it reads at least, and the operations of its products (an addition is one).

    What computes no products writes about as much as it reads: there the bytes written count, too.
    """

    name: str
    num_bytes: float
    num_ops: float
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """What a step does once for all its layers: not timed."""
    wake: Callable[[], object] = lambda: None
    """Wakes the threads right before: not timed, for a step does so once for all its kernels."""
    products: Format = "bf16"
    """What the products are of."""
    times: int = 1
    """How often `call` computes it, each time with other memory."""


def rows_of(num_rows: int, start: int, end: int) -> tuple[ForwardBatch, int]:
    """Rows that compute positions `[start, end)` on scattered pages; and how many pages there are."""
    per_row = -(-end // HEADS.page_tokens)
    table = np.random.default_rng(0).permutation(num_rows * per_row).astype(np.int32).reshape(num_rows, per_row)
    positions = np.tile(np.arange(start, end), num_rows)
    pages = table[np.repeat(np.arange(num_rows), end - start), positions // HEADS.page_tokens].astype(np.int64)
    offsets = np.arange(num_rows) * (end - start)
    columns = torch.from_numpy(np.stack((positions * 0, positions, pages, positions % HEADS.page_tokens)))
    starts, ends, prompts = (np.full(num_rows, at) for at in (start, end, end if end - start > 1 else 0))
    host = HostRows(starts, ends, offsets, prompts, table)
    return ForwardBatch(columns, torch.from_numpy(offsets + end - start - 1), host), num_rows * per_row


def program_without_heads(threads: Threads) -> Program:
    """One for operations that are not attention's."""
    return Program(threads, best_level())


def waking(threads: Threads) -> Callable[[], object]:
    """Wakes threads that slept while the limits were measured."""
    program = program_without_heads(threads)
    source, out = (program.buffer(NUM_IN, kind, of_samples=True) for kind in (torch.float32, torch.bfloat16))
    program.norm(source, torch.ones(NUM_IN), 1e-5, out)
    program.begin_samples(1)
    program.view(source, 1).zero_()
    return lambda: program.run(0, program.num_ops)


def linear_case(threads: Threads, format: Format, num_rows: int, *, gated: bool = False) -> Case:
    """All layers' products of `num_rows` rows; `gated`: silu(gate) * up is made of them."""
    arena, layers = Arena(), HEADS.layers
    weight = torch.randn(NUM_OUT, NUM_IN).bfloat16()
    program = program_without_heads(threads)
    source, out = program.buffer(NUM_IN, of_samples=True), program.buffer(NUM_OUT, of_samples=True)
    for _ in range(layers):
        if gated:
            program.gated(source, pack_gated(arena, format, weight), norm=None, eps=0.0)
        else:
            program.linear(source, pack(arena, format, weight), out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    return Case(
        f"{'gated' if gated else 'linear'} {format}, {num_rows} rows", layers * NUM_OUT * NUM_IN * ITEM_BYTES[format],
        layers * 2 * num_rows * NUM_OUT * NUM_IN, lambda: program.run(0, program.num_ops), products=format,
    )  # fmt: skip


def layers_case(threads: Threads, format: Format, num_rows: int) -> Case:
    """All products of all layers, those of heads and of small layers, too."""
    arena, width, hidden = Arena(), HEADS.num_heads * HEADS.dim, NUM_OUT // 2
    shapes = (
        (width + 2 * HEADS.num_kv_heads * HEADS.dim, NUM_IN),
        (NUM_IN, width),
        (NUM_OUT, NUM_IN),
        (NUM_IN, hidden),
    )
    program = program_without_heads(threads)
    sources = {size: program.buffer(size, of_samples=True) for size in (NUM_IN, width, hidden)}
    outs = [program.buffer(num_out, of_samples=True) for num_out, _ in shapes]
    for _ in range(HEADS.layers):
        for (num_out, num_in), out in zip(shapes, outs, strict=True):
            program.linear(sources[num_in], pack(arena, format, torch.randn(num_out, num_in).bfloat16()), out)
    program.begin_samples(num_rows)
    for source in sources.values():
        program.view(source, num_rows).normal_()
    size = HEADS.layers * sum(num_out * num_in for num_out, num_in in shapes)
    return Case(
        f"layers' linears {format}, {num_rows} rows", size * ITEM_BYTES[format], 2 * num_rows * size,
        lambda: program.run(0, program.num_ops), products=format,
    )  # fmt: skip


def head_case(threads: Threads, format: Format, num_rows: int) -> Case:
    """The product that makes logits."""
    program = program_without_heads(threads)
    source, out = (program.buffer(size, of_samples=True) for size in (NUM_IN, VOCAB))
    program.linear(source, pack(Arena(), format, torch.randn(VOCAB, NUM_IN).bfloat16()), out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    return Case(
        f"head {format}, {num_rows} rows", VOCAB * NUM_IN * ITEM_BYTES[format], 2 * num_rows * VOCAB * NUM_IN,
        lambda: program.run(0, 1), products=format,
    )  # fmt: skip


def experts_case(threads: Threads, format: Format, num_rows: int) -> Case:
    """One layer's experts of `num_rows` rows, which go anywhere."""
    arena = Arena()
    gate_up = open_packed(arena, format, 2 * EXPERT_OUT, EXPERT_IN, num_parts=2, count=EXPERTS)
    down = open_packed(arena, format, EXPERT_IN, EXPERT_OUT, count=EXPERTS)
    for index in range(EXPERTS):
        gate_up.put(torch.randn(2 * EXPERT_OUT, EXPERT_IN).bfloat16(), index=index)
        down.put(torch.randn(EXPERT_IN, EXPERT_OUT).bfloat16(), index=index)
    program = program_without_heads(threads)
    source, out = (program.buffer(EXPERT_IN, of_samples=True) for _ in range(2))
    chosen = program.buffer(TOP_K, torch.int64, of_samples=True)
    shares = program.buffer(TOP_K, of_samples=True)
    program.experts(source, gate_up, down, chosen, shares, out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    program.view(shares, num_rows).fill_(1 / TOP_K)
    routes = torch.rand(num_rows, EXPERTS).argsort(-1)[:, :TOP_K]
    program.view(chosen, num_rows).copy_(routes)
    size = 3 * EXPERT_OUT * EXPERT_IN
    return Case(
        f"experts {format}, {num_rows} rows", len(set(routes.flatten().tolist())) * size * ITEM_BYTES[format],
        2 * num_rows * TOP_K * size, lambda: program.run(0, 1), products=format,
    )  # fmt: skip


def norm_case(threads: Threads, num_rows: int) -> Case:
    """All layers' norms by themselves, as where experts follow that other ranks have."""
    program = program_without_heads(threads)
    source, out = program.buffer(NUM_IN, of_samples=True), program.buffer(NUM_IN, torch.bfloat16, of_samples=True)
    for _ in range(HEADS.layers):
        program.norm(source, torch.ones(NUM_IN), 1e-5, out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    num_bytes = HEADS.layers * num_rows * NUM_IN * (4 + 2)
    return Case(f"norm, {num_rows} rows", num_bytes, 0.0, lambda: program.run(0, program.num_ops))


def route_case(threads: Threads, num_rows: int) -> Case:
    """The experts of `num_rows` rows, in as many layers."""
    program = program_without_heads(threads)
    logits, shares = program.buffer(ROUTED, of_samples=True), program.buffer(TOP_K, of_samples=True)
    chosen = program.buffer(TOP_K, torch.int64, of_samples=True)
    moe = MoeSpec(num_experts=ROUTED, top_k=TOP_K, intermediate_size=EXPERT_OUT, norm_top_k=True)
    for _ in range(HEADS.layers):
        program.route(logits, chosen, shares, moe)
    program.begin_samples(num_rows)
    program.view(logits, num_rows).normal_()
    num_bytes = HEADS.layers * num_rows * (4 * ROUTED + (8 + 4) * TOP_K)
    return Case(f"route, {num_rows} rows", num_bytes, 0.0, lambda: program.run(0, program.num_ops))


def embed_case(threads: Threads, num_rows: int) -> Case:
    """The rows of an embedding for as many tokens, as often as there are layers, each time other rows."""
    batch, _ = rows_of(num_rows, 0, 1)
    table = torch.ones(VOCAB, NUM_IN, dtype=torch.bfloat16)
    program = program_without_heads(threads)
    out = program.buffer(NUM_IN)
    among = VOCAB // HEADS.layers
    for layer in range(HEADS.layers):
        program.embed(out, table[layer * among : (layer + 1) * among])
    batch.input_ids.random_(among)
    program.begin(batch)
    num_bytes = HEADS.layers * num_rows * NUM_IN * (2 + 4)
    return Case(f"embed, {num_rows} rows", num_bytes, 0.0, lambda: program.run(0, program.num_ops))


def place_case(threads: Threads, num_rows: int) -> Case:
    """All layers' heads normalised and rotated, and their keys and values written to the pages of rows that decode."""
    batch, num_pages = rows_of(num_rows, 255, 256)
    program = Program(threads, best_level(), HEADS, pages_of(num_pages))
    num_heads = HEADS.num_heads + 2 * HEADS.num_kv_heads
    qkv, norm = program.buffer(num_heads * HEADS.dim), torch.ones(HEADS.dim)
    program.angles(torch.ones(HEADS.dim // 2), 1.0)
    for layer in range(HEADS.layers):
        program.place(qkv, layer, norm, norm, 1e-6)
    program.begin(batch)
    program.view(qkv, num_rows).normal_()
    program.run(0, 1)
    num_bytes = HEADS.layers * num_rows * num_heads * HEADS.dim * (4 + 2)
    return Case(f"place, {num_rows} rows", num_bytes, 0.0, lambda: program.run(1, program.num_ops))


def pages_of(num_pages: int, num_layers: int = HEADS.layers) -> torch.Tensor:
    """KV of that many pages, where a server keeps it."""
    shape = (num_pages, num_layers, 2, HEADS.num_kv_heads, HEADS.page_tokens, HEADS.dim)
    return torch.frombuffer(allocate_private(2 * math.prod(shape)), dtype=torch.bfloat16).fill_(1).view(shape)


def attention_case(threads: Threads, name: str, num_rows: int, start: int, end: int) -> Case:
    """All layers' attention of rows that compute `[start, end)`."""
    batch, num_pages = rows_of(num_rows, start, end)
    num_bytes = HEADS.layers * num_rows * end * TOKEN_BYTES
    times = -(-LEAST_READ // num_bytes) if end - start == 1 else 1
    heads = dataclasses.replace(HEADS, layers=HEADS.layers * times)
    kv = pages_of(num_pages, heads.layers).normal_()
    program = Program(threads, best_level(), heads, kv)
    qkv = program.buffer((HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.dim)
    out = program.buffer(HEADS.num_heads * HEADS.dim)
    program.angles(torch.zeros(HEADS.dim // 2), 1.0)
    program.place(qkv, 0, None, None, 0.0)
    first = program.num_ops
    for layer in range(heads.layers):
        program.attend(layer, out)
    program.begin(batch)
    program.view(qkv, len(batch.positions)).normal_()
    program.run(0, program.num_ops)
    pairs = num_rows * sum(position + 1 for position in range(start, end))
    return Case(
        name, num_bytes, HEADS.layers * pairs * HEADS.num_heads * HEADS.dim * 4,
        lambda: program.run(first, program.num_ops), lambda: program.begin(batch), times=times,
    )  # fmt: skip


def delta_case(threads: Threads, name: str, num_rows: int, start: int, end: int) -> Case:
    """All GatedDeltaNet layers between their projections, of rows that compute `[start, end)`.

    What decode reads and writes at least are the states; the products of prompts are those of chunks of 64 tokens.
    """
    batch, _ = rows_of(num_rows, start, end)
    host = dataclasses.replace(batch.host, slots=np.arange(num_rows, dtype=np.int32))
    shape, program = DELTA, Program(threads, best_level())
    source, out = program.buffer(shape.width), program.buffer(shape.value_width)
    heads, dims = shape.num_value_heads, shape.key_dim * shape.value_dim
    weights = torch.randn(shape.conv_width, shape.taps), -torch.rand(heads), torch.randn(heads)
    kept, size = (heads, shape.key_dim, shape.taps - 1), heads * shape.key_dim * (shape.taps - 1)
    stride = 4 * heads * dims + 3 * 2 * size
    num_slots = num_rows + 1
    raw = torch.frombuffer(allocate_private(DELTA_LAYERS * num_slots * stride), dtype=torch.float32).fill_(0)
    for layer in raw.view(DELTA_LAYERS, num_slots, -1):
        state, halves = layer[:, : heads * dims], layer[:, heads * dims :].view(torch.bfloat16)
        q, k, v = (halves[:, i * size : (i + 1) * size].view(num_slots, *kept) for i in range(3))
        states = DeltaStates((q, k, v), state.view(num_slots, heads, shape.key_dim, shape.value_dim))
        program.delta(source, shape, states, *weights, torch.ones(shape.value_dim), 1e-6, out)
    program.begin(dataclasses.replace(batch, host=host))
    tokens = len(batch.positions)
    program.view(source, tokens).normal_()
    in_chunks = end - start > 1
    num_bytes = DELTA_LAYERS * num_rows * 2 * 4 * heads * dims
    per_token = heads * (3 * dims + 64 * (shape.key_dim + 2 * shape.value_dim))
    num_ops = 2 * DELTA_LAYERS * tokens * per_token if in_chunks else 0
    return Case(
        name, num_bytes, num_ops, lambda: program.run(0, program.num_ops),
        lambda: program.begin(dataclasses.replace(batch, host=host)),
    )  # fmt: skip


def reading_case(read: StripReader, name: str, num_rows: int, tokens: int, *, by_heads: bool) -> Case:
    """What attention reads, and nothing done with it: head by head, or page by page, where heads lie side by side."""
    batch, num_pages = rows_of(num_rows, tokens - 1, tokens)
    assert batch.host is not None, "rows have pages"
    num_bytes = HEADS.layers * num_rows * tokens * TOKEN_BYTES
    times = -(-LEAST_READ // num_bytes)
    kv = pages_of(num_pages, HEADS.layers * times)
    head = HEADS.page_tokens * HEADS.dim * kv.itemsize
    parts = np.arange(2 * HEADS.num_kv_heads).reshape(2, -1).T * head if by_heads else np.zeros((1, 1), dtype=np.int64)
    pages = batch.host.pages.astype(np.int64) * kv[0].nbytes
    strips = [
        (share[:, None, None, :] + parts[:, :, None]).ravel()
        for share in np.array_split(pages, read.num_threads, axis=1)
    ]
    elsewhere = [np.array([128 * thread]) for thread in range(read.num_threads)]
    wake = read.call_of(torch.zeros(1, 1, 128 * read.num_threads, dtype=torch.uint8), elsewhere, 128, 1)
    return Case(
        name, num_bytes, 0.0,
        read.call_of(kv, strips, head if by_heads else 2 * HEADS.num_kv_heads * head, kv.shape[1]),
        wake=wake, times=times,
    )  # fmt: skip


def choice_case(threads: Threads, name: str, num_rows: int, request: CoreSamplingParams) -> Case:
    """A token for each row of logits; they are read once at least."""
    logits = torch.randn(num_rows, VOCAB) * 3
    params = SamplingMetadata(num_rows, ())
    for row in range(num_rows):
        params.set(row, 1, request, None)
    picked = params.pick(np.arange(num_rows), np.ones(num_rows, dtype=np.int64))
    chooser, points = NativeChooser(threads, best_level()), np.random.default_rng(0).random(num_rows)
    return Case(f"{name}, {num_rows} rows", 4 * num_rows * VOCAB, 0.0, lambda: chooser(logits, picked.columns, points))
