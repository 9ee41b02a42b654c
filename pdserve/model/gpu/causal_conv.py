"""Depthwise causal convolution with SiLU before a recurrent layer. Each channel has a window of the last inputs.

The inputs of tokens before a row's first new token come from the row's state slot, in planes of q, k and v channels.
`conv_decode` serves rows with one new token, `conv_chunks` rows with several; both write the new last inputs back.
`conv_verify` serves rows with drafts: it leaves their inputs pending, and `fold_inputs` writes the accepted ones back.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.runtime import chaining, power_of_2
from pdserve.model.gpu.state_rows import CHUNK, DecodeStateRows, FoldRows, StateChunks, StatePlanes, VerifyRows

_DECODE_CHANNELS = 256
_CHUNK_CHANNELS = 64


def conv_decode(x: Tensor, out: Tensor, weight: Tensor, planes: StatePlanes, rows: DecodeStateRows) -> None:
    """Convolve the one new token of each row.

    `x`, `out` `[N, C]`: the channels of q, k and v, `C = 2 * Hk * dk + Hv * dv`, the last dimension contiguous.
    `weight` `[C, taps]`, contiguous, the weight of the token's own input last.
    """
    if len(rows.slots):
        block = min(_DECODE_CHANNELS, power_of_2(max(_widths(planes))))
        _conv_decode[(len(rows.slots), _num_blocks(planes, block))](
            x, out, weight, planes.conv_q, planes.conv_k, planes.conv_v, rows.slots, rows.starts, rows.tokens,
            x.stride(0), out.stride(0), _slot_stride(planes),
            **_shape(planes), BLOCK=block, COLUMNS=power_of_2(planes.taps - 1), num_warps=4, **chaining(x.device),
        )  # fmt: skip


def conv_chunks(x: Tensor, out: Tensor, weight: Tensor, planes: StatePlanes, rows: StateChunks) -> None:
    """Convolve the new tokens of the rows with chunks; arguments as for `conv_decode`."""
    if len(rows.chunks):
        block = min(_CHUNK_CHANNELS, power_of_2(max(_widths(planes))))
        _conv_chunks[(len(rows.chunks), _num_blocks(planes, block))](
            x, out, weight, planes.conv_q, planes.conv_k, planes.conv_v,
            rows.slots, rows.starts, rows.offsets, rows.chunks,
            x.stride(0), out.stride(0), _slot_stride(planes),
            **_shape(planes), BLOCK=block, COLUMNS=power_of_2(planes.taps - 1), TOKENS=CHUNK,
            num_warps=4, **chaining(x.device),
        )  # fmt: skip


def conv_verify(x: Tensor, out: Tensor, weight: Tensor, planes: StatePlanes, inputs: Tensor, rows: VerifyRows) -> None:
    """Convolve the tokens of rows with drafts; arguments as for `conv_decode`.

    Leaves their inputs in `inputs` `[S, P, C]`, for at most P tokens of each slot.
    """
    if len(rows.slots):
        block = min(_DECODE_CHANNELS, power_of_2(max(_widths(planes))))
        _conv_verify[(len(rows.slots), _num_blocks(planes, block))](
            x, out, weight, planes.conv_q, planes.conv_k, planes.conv_v, inputs,
            rows.slots, rows.tokens, rows.counts, x.stride(0), out.stride(0), _slot_stride(planes), inputs.shape[1],
            **_shape(planes), BLOCK=block, COLUMNS=power_of_2(planes.taps - 1), num_warps=4,
        )  # fmt: skip


def fold_inputs(planes: StatePlanes, inputs: Tensor, rows: FoldRows) -> None:
    """Make the folded ones of the pending `inputs` the last inputs of their slots; see `conv_verify`."""
    if len(rows.slots):
        block = min(_DECODE_CHANNELS, power_of_2(max(_widths(planes))))
        _fold_inputs[(len(rows.slots), _num_blocks(planes, block))](
            planes.conv_q, planes.conv_k, planes.conv_v, inputs, rows.slots, rows.counts,
            _slot_stride(planes), inputs.shape[1],
            **_shape(planes), BLOCK=block, COLUMNS=power_of_2(planes.taps - 1), num_warps=4,
        )  # fmt: skip


def _widths(planes: StatePlanes) -> tuple[int, int]:
    """Return the channels of q, which are as many as of k, and of v."""
    return planes.num_key_heads * planes.key_dim, planes.num_value_heads * planes.value_dim


def _num_blocks(planes: StatePlanes, block: int) -> int:
    """Return the blocks of channels; a block has channels of one plane only."""
    key, value = _widths(planes)
    return 2 * -(-key // block) + -(-value // block)


def _slot_stride(planes: StatePlanes) -> int:
    """Return the elements from one slot to the next, the same in all planes."""
    strides = {plane.stride(0) for plane in (planes.conv_q, planes.conv_k, planes.conv_v)}
    assert len(strides) == 1, "the planes of a convolution lie in one pool"
    return strides.pop()


def _shape(planes: StatePlanes) -> dict[str, int]:
    key, value = _widths(planes)
    assert planes.taps > 1, "a convolution of one input has no state"
    return {"KEY_WIDTH": key, "VALUE_WIDTH": value, "TAPS": planes.taps}


@triton.jit
def _channels(block, conv_q, conv_k, conv_v, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the plane of a block of channels, and the channels' numbers in the plane and in `x`.

    The fourth result is false for channels beyond the plane.
    """
    KEY_BLOCKS: tl.constexpr = (KEY_WIDTH + BLOCK - 1) // BLOCK
    part = tl.minimum(block // KEY_BLOCKS, 2)
    plane = tl.where(part == 0, conv_q, tl.where(part == 1, conv_k, conv_v))
    channel = (block - part * KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < tl.where(part == 2, VALUE_WIDTH, KEY_WIDTH)
    return plane, channel, part * KEY_WIDTH + channel, is_channel


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "tokens"])  # the number of rows may decide it
def _conv_decode(
    x, out, weight, conv_q, conv_k, conv_v, slots, starts, tokens, x_stride, out_stride, slot_stride,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row and one block of channels."""
    row = tl.program_id(0)
    plane, channel, at, is_channel = _channels(
        tl.program_id(1), conv_q, conv_k, conv_v, KEY_WIDTH, VALUE_WIDTH, BLOCK
    )  # fmt: skip
    slot, start, token = tl.load(slots + row), tl.load(starts + row), tl.load(tokens + row)
    columns = tl.arange(0, COLUMNS)
    cells = is_channel[:, None] & (columns < TAPS - 1)[None, :]
    of_state = plane + slot * slot_stride + channel * (TAPS - 1)
    state_at = of_state[:, None] + columns[None, :]
    old = tl.load(state_at, mask=cells & (slot >= 0) & (start > 0), other=0.0)
    weights = tl.load(weight + at[:, None] * TAPS + columns[None, :], mask=cells, other=0.0).to(tl.float32)
    own = tl.load(weight + at * TAPS + TAPS - 1, mask=is_channel, other=0.0).to(tl.float32)
    if CHAINED:  # slots, weights and states were written before the awaited kernel began
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    new = tl.load(x + token * x_stride + at, mask=is_channel, other=0.0)
    total = tl.sum(old.to(tl.float32) * weights, 1) + new.to(tl.float32) * own
    tl.store(out + token * out_stride + at, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=is_channel)
    tl.debug_barrier()  # all threads have read the old columns
    is_kept = cells & (columns > 0)[None, :] & (slot >= 0)
    tl.store(state_at - 1, old, mask=is_kept)
    tl.store(of_state + TAPS - 2, new, mask=is_channel & (slot >= 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "offsets"])
def _conv_chunks(
    x, out, weight, conv_q, conv_k, conv_v, slots, starts, offsets, chunks, x_stride, out_stride, slot_stride,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Up to TOKENS new tokens of one row, and one block of channels.

    The tokens are counted from the row's first new one, unlike those of a chunk. So only the program of a row's first
    tokens reads the state, and it writes the state too.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    plane, channel, at, is_channel = _channels(
        tl.program_id(1), conv_q, conv_k, conv_v, KEY_WIDTH, VALUE_WIDTH, BLOCK
    )  # fmt: skip
    row = tl.load(chunks + 2 * chunk)
    slot, start = tl.load(slots + row), tl.load(starts + row)
    offset = tl.load(offsets + row)
    num_new = tl.load(offsets + row + 1) - offset
    index = tl.load(chunks + 2 * chunk + 1) - start // TOKENS
    of_row, of_tile = x + offset * x_stride, x + (offset + index * TOKENS) * x_stride
    of_state = plane + slot * slot_stride + channel * (TAPS - 1)
    line = tl.arange(0, TOKENS)
    num_before, num_left = index * TOKENS, num_new - index * TOKENS
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        token = line + (tap - (TAPS - 1))
        is_new = ((token >= -num_before) & (token < num_left))[:, None] & is_channel[None, :]
        value = tl.load(of_tile + token[:, None] * x_stride + at[None, :], mask=is_new, other=0.0)
        factor = tl.load(weight + at * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor[None, :]
    is_whole = (line >= TAPS - 1) | (index > 0)
    is_out = ((line < num_left) & is_whole)[:, None] & is_channel[None, :]
    to = out + (offset + index * TOKENS) * out_stride
    found = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    tl.store(to + line[:, None] * out_stride + at[None, :], found, mask=is_out)
    if index == 0:  # the first tokens, which see old inputs, and the new last inputs
        columns = tl.arange(0, COLUMNS)
        has_state = (slot >= 0) & (start > 0)
        few = tl.zeros((COLUMNS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            place = columns + (tap - (TAPS - 1))
            is_early = ((place >= 0) & (place < num_new))[:, None] & is_channel[None, :]
            is_old = (place < 0)[:, None] & is_channel[None, :] & has_state
            early = tl.load(of_row + place[:, None] * x_stride + at[None, :], mask=is_early, other=0.0)
            old = tl.load(of_state[None, :] + (place + (TAPS - 1))[:, None], mask=is_old, other=0.0)
            weights = tl.load(weight + at * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
            few += (early.to(tl.float32) + old.to(tl.float32)) * weights[None, :]
        is_first = ((columns < TAPS - 1) & (columns < num_new))[:, None] & is_channel[None, :]
        tl.store(
            to + columns[:, None] * out_stride + at[None, :], (few * tl.sigmoid(few)).to(out.dtype.element_ty),
            mask=is_first,
        )  # fmt: skip
        kept = num_new + columns - (TAPS - 1)
        cells = is_channel[:, None] & (columns < TAPS - 1)[None, :]
        last = tl.load(
            of_row + kept[None, :] * x_stride + at[:, None], mask=cells & (kept >= 0)[None, :], other=0.0
        )  # fmt: skip
        before = tl.load(
            of_state[:, None] + (kept + (TAPS - 1))[None, :], mask=cells & (kept < 0)[None, :] & has_state, other=0.0
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read the old columns
        ends_with = tl.where((kept >= 0)[None, :], last, before)
        tl.store(of_state[:, None] + columns[None, :], ends_with, mask=cells & (slot >= 0))


@triton.jit
def _conv_verify(
    x, out, weight, conv_q, conv_k, conv_v, inputs, slots, tokens, counts,
    x_stride, out_stride, slot_stride, most,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row with drafts, and one block of channels: each token as `_conv_decode` computes it."""
    row = tl.program_id(0)
    plane, channel, at, is_channel = _channels(
        tl.program_id(1), conv_q, conv_k, conv_v, KEY_WIDTH, VALUE_WIDTH, BLOCK
    )  # fmt: skip
    slot, first, count = tl.load(slots + row), tl.load(tokens + row), tl.load(counts + row)
    columns = tl.arange(0, COLUMNS)
    cells = is_channel[:, None] & (columns < TAPS - 1)[None, :]
    of_state = (plane + slot * slot_stride + channel * (TAPS - 1))[:, None]
    of_row, left = x + first * x_stride + at, inputs + slot * most * (2 * KEY_WIDTH + VALUE_WIDTH) + at
    weights = tl.load(weight + at[:, None] * TAPS + columns[None, :], mask=cells, other=0.0).to(tl.float32)
    own = tl.load(weight + at * TAPS + TAPS - 1, mask=is_channel, other=0.0).to(tl.float32)
    for token in range(count):
        place = (token + columns - (TAPS - 1))[None, :]  # among the row's tokens
        kept = tl.load(of_state + place + (TAPS - 1), mask=cells & (place < 0), other=0.0)
        early = tl.load(of_row[:, None] + place * x_stride, mask=cells & (place >= 0), other=0.0)
        old = tl.where(place < 0, kept, early)
        new = tl.load(of_row + token * x_stride, mask=is_channel, other=0.0)
        total = tl.sum(old.to(tl.float32) * weights, 1) + new.to(tl.float32) * own
        found = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
        tl.store(out + (first + token) * out_stride + at, found, mask=is_channel)
        tl.store(left + token * (2 * KEY_WIDTH + VALUE_WIDTH), new, mask=is_channel)


@triton.jit
def _fold_inputs(
    conv_q, conv_k, conv_v, inputs, slots, counts, slot_stride, most,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One slot and one block of channels."""
    row = tl.program_id(0)
    plane, channel, at, is_channel = _channels(
        tl.program_id(1), conv_q, conv_k, conv_v, KEY_WIDTH, VALUE_WIDTH, BLOCK
    )  # fmt: skip
    slot, count = tl.load(slots + row), tl.load(counts + row)
    columns = tl.arange(0, COLUMNS)
    cells = is_channel[:, None] & (columns < TAPS - 1)[None, :]
    of_state = (plane + slot * slot_stride + channel * (TAPS - 1))[:, None]
    of_pending = (inputs + slot * most * (2 * KEY_WIDTH + VALUE_WIDTH) + at)[:, None]
    place = (count + columns - (TAPS - 1))[None, :]  # among the pending tokens
    kept = tl.load(of_state + place + (TAPS - 1), mask=cells & (place < 0), other=0.0)
    new = tl.load(of_pending + place * (2 * KEY_WIDTH + VALUE_WIDTH), mask=cells & (place >= 0), other=0.0)
    tl.debug_barrier()  # all threads have read the old columns
    tl.store(of_state + columns[None, :], tl.where(place < 0, kept, new), mask=cells)
