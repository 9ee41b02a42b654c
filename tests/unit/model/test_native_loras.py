"""LoRA adapters by the CPU kernels: layers against torch, and the bits of rows with and without adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize
from pdserve.model.lora import LoraAdapter
from pdserve.model.native import ops
from pdserve.model.native.lora import LoraSite, pack_adapter
from pdserve.model.native.weights import Arena, Format, Packed, open_packed, pack
from tests.unit.model.native_kit import batch_of, needs_kernels, rms, rounded, rounded_weight
from tests.unit.model.native_programs import TOLERANCE, levels, poison, program, put, relative, taken

pytestmark = needs_kernels
assert ops  # registers the operations of torch
HIDDEN, INNER, PARTS = 96, 80, (48, 16, 16)
LAYERS = {"q": (48, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN),
          "down": (HIDDEN, INNER)}  # fmt: skip
FORMATS: tuple[Format, ...] = ("bf16", "int8", GroupFormat(4, 32), GroupFormat(8, 1024, is_float=True))
EPS = 1e-5
formats = pytest.mark.parametrize("format", FORMATS, ids=["bf16", "int8", "int4", "fp8"])


def adapter(rank: int, *names: str) -> LoraAdapter:
    """Random changes of some layers."""
    torch.manual_seed(rank)
    weights = {}
    for name in names:
        num_out, num_in = LAYERS[name]
        a, b = torch.randn(rank, num_in) * num_in**-0.5, torch.randn(num_out, rank) * rank**-0.5
        weights[name] = a.bfloat16(), b.bfloat16()
    return LoraAdapter(f"rank {rank}", rank, rank, "", weights)


def fp8(weight: Tensor) -> QuantizedWeight:
    """A weight in FP8 with a scale per output."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedWeight(codes, scale, None, torch.zeros(weight.shape[1], dtype=torch.int64), 8, is_float=True)


def known_weight(weight: Tensor, format: Format) -> Tensor:
    """A weight `[out, in]` as the kernels multiply with it."""
    if not isinstance(format, GroupFormat):
        return rounded_weight(weight, format)
    return fp8(weight).dequantized().bfloat16().float() if format.is_float else quantize(weight, format).dequantized()


def packed(arena: Arena, format: Format, weight: Tensor, *, num_parts: int = 1) -> Packed:
    """Pack a weight in any of `FORMATS`."""
    if not (isinstance(format, GroupFormat) and format.is_float):
        return pack(arena, format, weight, num_parts=num_parts)
    layer = open_packed(arena, format, *weight.shape, num_parts=num_parts)
    layer.put_values(fp8(weight))
    return layer


WHOLE, LARGE, FEW = adapter(8, *LAYERS), adapter(40, *LAYERS), adapter(3, "k", "up")


class Layers:
    """A program with the projections of attention and a dense MLP, which have adapters."""

    def __init__(self, level: str, threads: int, format: Format) -> None:
        torch.manual_seed(0)
        self.weights = {name: (torch.randn(shape) * shape[1] ** -0.5).bfloat16() for name, shape in LAYERS.items()}
        self.format = format
        self._rounded_weights = {name: known_weight(weight, format) for name, weight in self.weights.items()}
        self.norm = torch.rand(HIDDEN) + 0.5
        arena = Arena()
        qkv = packed(arena, format, torch.cat([self.weights[name] for name in "qkv"]))
        gate_up = packed(arena, format, torch.cat([self.weights["gate"], self.weights["up"]]), num_parts=2)
        down = packed(arena, format, self.weights["down"])
        self._sites = [site(qkv, "q", "k", "v"), site(gate_up, "gate", "up"), site(down, "down")]
        self.adapters = {each.rank: pack_adapter(self._sites, each) for each in (WHOLE, LARGE, FEW)}
        self.program = p = program(level, threads)
        p.adapted = {id(each.layer): number for number, each in enumerate(self._sites)}
        self.x, self.qkv, self.out = p.buffer(HIDDEN), p.buffer(sum(PARTS)), p.buffer(HIDDEN)
        p.linear(self.x, qkv, self.qkv, norm=self.norm, eps=EPS)
        p.gated(self.x, gate_up, norm=self.norm, eps=EPS)
        p.linear(None, down, self.out, add=True, scale=0.5)

    def run(self, rows: Sequence[tuple[Tensor, int | None]]) -> list[tuple[Tensor, Tensor]]:
        """Compute rows `[tokens, hidden]`, each with the adapter of a rank or none; returns qkv and out of each."""
        p, x = self.program, torch.cat([each for each, _ in rows])
        batch, _ = batch_of([(0, len(each)) for each, _ in rows], 16)
        if any(rank for _, rank in rows):
            adapters = tuple(None if rank is None else self.adapters[rank] for _, rank in rows)
            batch = ForwardBatch(batch.columns, batch.sample_index, dataclasses.replace(batch.host, adapters=adapters))
        p.reserve(len(x) + 1, len(x) + 1)
        p.begin(batch)
        put(p, self.x, x)
        poison(p, self.qkv, len(x))
        put(p, self.out, torch.zeros_like(x))
        p.run(0, 3)
        lengths = [len(each) for each, _ in rows]
        found = (torch.split(taken(p, buffer, len(x)).clone(), lengths) for buffer in (self.qkv, self.out))
        return list(zip(*found, strict=True))

    def wanted(self, x: Tensor, own: LoraAdapter | None) -> tuple[Tensor, Tensor]:
        """The same by torch, on weights and inputs as the kernels have them."""
        normed = rms(x, self.norm, EPS)

        def linear(name: str, inputs: Tensor) -> Tensor:
            out = F.linear(rounded(inputs, self.format), self._rounded_weights[name])
            if own is None or name not in own.weights:
                return out
            a, b = own.weights[name]
            read = rounded(inputs, self.format) if name == "down" else inputs
            low = F.linear(read.bfloat16().float(), a.float()).bfloat16().float()
            return out + F.linear(low, b.float())

        opened = F.silu(linear("gate", normed)) * linear("up", normed)
        return torch.cat([linear(name, normed) for name in "qkv"], 1), 0.5 * linear("down", opened)


def site(layer: Packed, *names: str) -> LoraSite:
    """A packed layer, and what it stacks."""
    parts, at = [], 0
    for name in names:
        parts.append((name, range(at, at + LAYERS[name][0])))
        at += LAYERS[name][0]
    return LoraSite(layer, tuple(parts))


def mixed_rows() -> list[tuple[Tensor, int | None]]:
    """Decode rows and prompts with three adapters and without; a prompt is longer than what is changed at a time."""
    torch.manual_seed(1)
    lengths = (1, 1, 1, 1, 300, 1, 20, 33, 1, 1, 40, 1)
    ranks = (8, None, 8, 40, 40, 3, None, 8, None, 40, 3, 8)
    return [(torch.randn(length, HIDDEN), rank) for length, rank in zip(lengths, ranks, strict=True)]


@levels
@formats
def test_rows_of_several_adapters_equal_torch(level: str, format: Format) -> None:
    layers, rows = Layers(level, 2, format), mixed_rows()
    originals = {None: None, 8: WHOLE, 40: LARGE, 3: FEW}
    for (x, rank), found in zip(rows, layers.run(rows), strict=True):
        for got, wanted in zip(found, layers.wanted(x, originals[rank]), strict=True):
            assert relative(got, wanted) < 2 * TOLERANCE, (rank, len(x))


@levels
@formats
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_bits_that_it_has_alone(level: str, format: Format, threads: int) -> None:
    """Also a row without an adapter, whose step alone has none."""
    layers, rows = Layers(level, threads, format), mixed_rows()
    for chosen in (rows, [row for row in rows if len(row[0]) == 1], rows[4:6]):
        for row, found in zip(chosen, layers.run(chosen), strict=True):
            alone = layers.run([row])[0]
            assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True)), (row[1], len(row[0]))


@levels
def test_a_prompt_has_the_same_bits_in_any_chunks(level: str) -> None:
    layers = Layers(level, 2, "bf16")
    x = torch.randn(400, HIDDEN)
    whole = layers.run([(x, 40)])[0]
    parts = [layers.run([(part, 40), (x[:1], 8)])[0] for part in torch.split(x, [17, 256, 127])]
    for got, *pieces in zip(whole, *parts, strict=True):
        assert torch.equal(got, torch.cat(pieces))


@levels
def test_a_step_without_adapters_follows_one_with_them(level: str) -> None:
    layers = Layers(level, 2, "bf16")
    x = torch.randn(5, HIDDEN)
    before = layers.run([(x, None)])[0]
    changed = layers.run([(x, 8)])[0]
    after = layers.run([(x, None)])[0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, changed, strict=True))
