"""The gated delta rule in torch: held against a float64 recurrence and transformers, in any batch and chunking."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from pdserve.model.forward_batch import HostRows
from pdserve.model.layers.gated_delta import (
    BLOCK,
    DeltaRows,
    causal_conv,
    gated_delta_rule,
    gated_norm,
    log_decay_of,
)

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 8, 12, 4
LENGTHS = (1, 63, 64, 65, 300)
NUM_SLOTS = 9


@dataclasses.dataclass(frozen=True)
class Row:
    """Positions `[start, end)` of request `request`, of whose tokens `num_prompt` are the prompt."""

    request: int
    start: int
    end: int
    num_prompt: int


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the rule for the tokens of one request."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    rate: Tensor

    @staticmethod
    def random(num_tokens: int, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator)

        return Inputs(
            normal(KEY_HEADS, KEY_DIM),
            normal(KEY_HEADS, KEY_DIM),
            normal(VALUE_HEADS, VALUE_DIM),
            -F.softplus(normal(VALUE_HEADS)) * 0.3,
            torch.sigmoid(normal(VALUE_HEADS)),
        )

    def part(self, start: int, end: int) -> Inputs:
        return Inputs(*(tensor[start:end] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.log_decay, self.rate

    def in_float64(self) -> tuple[Tensor, Tensor]:
        """The outputs and the last state of the recurrence, token by token."""
        q, k, v, log_decay, rate = (tensor.double() for tensor in self.tensors)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for x in (q * KEY_DIM**-0.5, k))
        state = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
        out = torch.empty_like(v)
        for t in range(len(v)):
            state = state * log_decay[t].exp()[:, None, None]
            delta = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * rate[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], delta)
            out[t] = torch.einsum("hk,hkv->hv", q[t], state)
        return out, state


REQUESTS = [Inputs.random(length, seed) for seed, length in enumerate(LENGTHS)]


class Requests:
    """Requests with a slot each in one plane, whose free slots and unstarted states are NaN."""

    def __init__(self) -> None:
        self.plane = torch.full((NUM_SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), float("nan"))
        self.slots = [7, 2, 5, 0, 3]
        self.out = [torch.full((length, VALUE_HEADS, VALUE_DIM), float("nan")) for length in LENGTHS]

    def step(self, *rows: Row) -> None:
        found = rows_of(rows, self.slots)
        parts = [REQUESTS[row.request].part(row.start, row.end).tensors for row in rows]
        out = gated_delta_rule(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)), self.plane, found)  # type: ignore[arg-type]
        for row, part in zip(rows, out.split([row.end - row.start for row in rows]), strict=True):
            self.out[row.request][row.start : row.end] = part

    def state(self, request: int) -> Tensor:
        return self.plane[self.slots[request]]


def rows_of(rows: Sequence[Row], slots: Sequence[int]) -> DeltaRows:
    starts, ends, prompts = (np.array([getattr(row, name) for row in rows]) for name in ("start", "end", "num_prompt"))
    offsets = np.cumsum(ends - starts) - (ends - starts)
    taken = np.array([slots[row.request] for row in rows], dtype=np.int32)
    host = HostRows(starts, ends, offsets, prompts, np.zeros((len(rows), 1), np.int32), slots=taken)
    return DeltaRows(torch.from_numpy(taken.astype(np.int64)), torch.from_numpy(starts), host)


def whole_prompts(*requests: int) -> list[Row]:
    return [Row(request, 0, LENGTHS[request], LENGTHS[request]) for request in requests]


def check(requests: Requests, *which: int) -> None:
    for request in which:
        out, state = REQUESTS[request].in_float64()
        torch.testing.assert_close(requests.out[request].double(), out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(requests.state(request).double(), state, atol=2e-5, rtol=1e-4)


def test_prompts_of_all_lengths_in_one_step_follow_the_recurrence() -> None:
    requests = Requests()
    requests.step(*whole_prompts(*range(len(LENGTHS))))
    check(requests, *range(len(LENGTHS)))
    assert requests.plane[[1, 4, 6, 8]].isnan().all(), "slots of other requests are untouched"


def test_a_request_has_the_same_bits_alone_and_in_chunks_that_end_on_blocks() -> None:
    together, alone, chunked = Requests(), Requests(), Requests()
    together.step(*whole_prompts(*range(len(LENGTHS))))
    for request, length in enumerate(LENGTHS):
        alone.step(*whole_prompts(request))
        ends = [*range(2 * BLOCK, length, 2 * BLOCK), length]
        for start, end in zip([0, *ends], ends, strict=False):
            chunked.step(Row(request, start, end, length))
        for other in (alone, chunked):
            assert torch.equal(other.out[request], together.out[request])
            assert torch.equal(other.state(request), together.state(request))


@pytest.mark.parametrize("cut", [1, 16, 63, 65, 100])
def test_chunks_that_cut_a_block_agree_up_to_rounding(cut: int) -> None:
    requests = Requests()
    for start in range(0, LENGTHS[4], cut):
        requests.step(Row(4, start, min(start + cut, LENGTHS[4]), LENGTHS[4]))
    check(requests, 4)


def test_prompts_and_generated_tokens_share_a_step() -> None:
    requests = Requests()
    requests.step(Row(2, 0, 30, 30), Row(3, 0, 64, 64))
    for position in range(30, 64):
        rows = [Row(2, position, position + 1, 30)]
        if position == 40:
            rows += [Row(3, 64, 65, 64), *whole_prompts(1)]
        requests.step(*rows)
    check(requests, 1, 2, 3)


def test_generated_tokens_that_are_computed_again_have_the_same_bits() -> None:
    first, again = Requests(), Requests()
    first.step(Row(4, 0, 130, 130), Row(1, 0, 10, 10))
    for position in range(130, 150):
        first.step(Row(4, position, position + 1, 130), Row(1, position - 120, position - 119, 10))
    again.step(Row(1, 0, 30, 10), Row(4, 0, 150, 130))
    for request, length in ((4, 150), (1, 30)):
        assert torch.equal(first.out[request][:length], again.out[request][:length])
        assert torch.equal(first.state(request), again.state(request))


def test_a_captured_step_is_a_decode_step_and_padding_touches_no_request() -> None:
    """A step without rows on the host, whose last row is padding."""
    first, captured = Requests(), Requests()
    for requests in (first, captured):
        requests.step(Row(2, 0, 30, 30), Row(4, 0, 70, 70))
    first.step(Row(2, 30, 31, 30), Row(4, 70, 71, 70))
    parts = [REQUESTS[2].part(30, 31).tensors, REQUESTS[4].part(70, 71).tensors, REQUESTS[0].tensors]
    slots, starts = torch.tensor([captured.slots[2], captured.slots[4], -1]), torch.tensor([30, 70, 0])
    before = captured.plane.clone()
    inputs = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    out = gated_delta_rule(*inputs, captured.plane, DeltaRows(slots, starts, None))  # type: ignore[arg-type]
    assert torch.equal(out[0], first.out[2][30]) and torch.equal(out[1], first.out[4][70])
    for request in (2, 4):
        assert torch.equal(captured.state(request), first.state(request))
    others = [slot for slot in range(NUM_SLOTS - 1) if slot not in (captured.slots[2], captured.slots[4])]
    torch.testing.assert_close(captured.plane[others], before[others], rtol=0.0, atol=0.0, equal_nan=True)


def test_the_rule_is_that_of_transformers() -> None:
    inputs, requests = REQUESTS[4], Requests()
    arguments = [tensor[None] for tensor in inputs.tensors]
    flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = reference.torch_chunk_gated_delta_rule(*(tensor[:, :299] for tensor in arguments), **flags)
    requests.step(Row(4, 0, 299, 299))
    torch.testing.assert_close(requests.out[4][:299], out[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(requests.state(4), state[0], atol=1e-5, rtol=1e-4)
    last = [tensor[:, 299:] for tensor in arguments]
    out, state = reference.torch_recurrent_gated_delta_rule(*last, initial_state=state, **flags)
    requests.step(Row(4, 299, 300, 299))
    torch.testing.assert_close(requests.out[4][299:], out[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(requests.state(4), state[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_keeps_its_last_inputs(dtype: torch.dtype) -> None:
    """Three heads and one wider head, as planes, in chunks of all sizes beside another row."""
    channels, num_tokens = 3 * 5 + 7, 23
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, channels, generator=generator).to(dtype)
    weight = torch.randn(channels, KERNEL, generator=generator).to(dtype)
    expected = reference.causal_conv1d_fn(x.float().t()[None], weight.float(), activation="silu")[0].t()
    heads = ((1, 5), (2, 5), (1, 7))
    planes = [torch.full((3, num, dim, KERNEL - 1), float("nan"), dtype=dtype) for num, dim in heads]
    found, start = [], 0
    for end in (1, 2, 5, 6, 14, 22, num_tokens):
        rows = rows_of([Row(1, 0, 2, 2), Row(0, start, end, 10)], [2, 0])
        out = causal_conv(torch.cat((x[:2], x[start:end])), weight, planes, rows)
        torch.testing.assert_close(out[:2], expected[:2], atol=1e-5, rtol=1e-5)
        found.append(out[2:])
        start = end
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)
    last = x[-(KERNEL - 1) :].t().split([num * dim for num, dim in heads])
    for plane, part, (num, dim) in zip(planes, last, heads, strict=True):
        assert torch.equal(plane[2], part.reshape(num, dim, -1))
        assert plane[1].isnan().all()


def test_the_decay_and_the_gated_norm_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    x, z = (torch.randn(7, VALUE_HEADS, VALUE_DIM, generator=generator) for _ in range(2))
    norm = reference.Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        torch.testing.assert_close(gated_norm(x, z, norm.weight, 1e-5), norm(x, z))
    a, a_log, dt_bias = (torch.randn(VALUE_HEADS, generator=generator) * 3 for _ in range(3))
    torch.testing.assert_close(log_decay_of(a, a_log, dt_bias), -a_log.exp() * F.softplus(a + dt_bias))
