"""`TritonDelta`: the arithmetic of GatedDeltaNet and Kimi Delta Attention layers by Triton kernels.

It is made with the Triton attention backend.

Rows with one new token take the recurrent step, rows with drafts several of them, and all other rows chunks. A decode
step can be captured in a CUDA graph, if it folds no pending tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.model.attention.interface import LayerStates, StateRows
from pdserve.model.attention.triton_pages import pack_to_device
from pdserve.model.forward_batch import HostRows, IntArray, to_device
from pdserve.model.gated_delta_net import DeltaInputs
from pdserve.model.gpu.causal_conv import conv_chunks, conv_decode, conv_verify, fold_inputs
from pdserve.model.gpu.channel_delta_prefill import channel_delta_prefill
from pdserve.model.gpu.gated_delta import delta_decode, delta_verify, fold_states, gated_rms_norm
from pdserve.model.gpu.gated_delta_prefill import delta_prefill
from pdserve.model.gpu.state_rows import CHUNK, DecodeStateRows, FoldRows, StateChunks, StatePlanes, VerifyRows
from pdserve.model.layers.gated_delta import OutputGate, PendingTokens

MAX_CHUNKS = 64
"""Chunks that are computed together, which bounds the temporary memory of a step."""


class TritonDelta:
    """Implements `DeltaKernels`."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """See `DeltaKernels.mix`. Returns the dtype of `inputs.qkv`."""
        x, planes, pending = inputs.qkv, state_planes_of(states.planes), states.pending
        rows = states.rows.once("triton", lambda: split_rows(states.rows))
        mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = mixed.new_empty(len(x), inputs.num_value_heads, inputs.value_dim)
        rule = mixed, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, out, planes
        if rows.folds is not None:
            fold(planes, pending, rows.folds)
        if rows.verify is not None:
            assert pending is not None and rows.max_tokens <= pending.most, "more drafts than the layer keeps"
            conv_verify(x, mixed, inputs.conv_weight, planes, pending.inputs, rows.verify)
            delta_verify(*rule, pending.changes, rows.verify)
        if rows.decode is not None:
            conv_decode(x, mixed, inputs.conv_weight, planes, rows.decode)
            delta_decode(*rule, rows.decode)
        for chunks in rows.chunks:
            conv_chunks(x, mixed, inputs.conv_weight, planes, chunks)
            (channel_delta_prefill if inputs.has_channel_decay else delta_prefill)(*rule, chunks)
        return out

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float, gate: OutputGate = "silu") -> Tensor:
        """See `DeltaKernels.norm`."""
        return gated_rms_norm(heads, z, weight, eps, is_silu=gate == "silu")


def state_planes_of(planes: Mapping[str, Tensor]) -> StatePlanes:
    """Return the planes of `LayerStates` by position."""
    return StatePlanes(planes["conv_q"], planes["conv_k"], planes["conv_v"], planes["state"])


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """The rows of a step by what computes them; None: there are none.

    `decode`: rows with one new token. `chunks`: those of the other rows without drafts, MAX_CHUNKS at a time; chunks of
    a row that begin one part go on from those that end the part before. `verify`: rows with drafts, which have at most
    `max_tokens` tokens. `folds`: rows of any of these that fold pending tokens before.
    """

    decode: DecodeStateRows | None
    chunks: Sequence[StateChunks] = ()
    verify: VerifyRows | None = None
    max_tokens: int = 0
    folds: FoldRows | None = None


def split_rows(rows: StateRows) -> SplitRows:
    """Divide the rows of a step."""
    folds = None if rows.host is None else fold_rows_of(rows.host, rows.slots.device)
    if rows.is_decode:
        return SplitRows(DecodeStateRows(rows.slots, rows.starts, rows.offsets[:-1]), folds=folds)
    assert rows.host is not None, "only decode steps are captured"
    lengths = rows.host.ends - rows.host.starts
    drafts = rows.host.num_drafts
    is_verify = np.zeros(len(lengths), dtype=bool) if drafts is None else drafts > 0
    is_decode = (lengths == 1) & ~is_verify
    chunks = chunks_of(rows.host, np.flatnonzero(~is_decode & ~is_verify))
    parts = [chunks[first : first + MAX_CHUNKS] for first in range(0, len(chunks), MAX_CHUNKS)]
    pieces = [np.flatnonzero(is_decode), np.flatnonzero(is_verify)]
    for part in parts:
        begins = np.flatnonzero(np.diff(part[:, 0], prepend=-1))
        pieces += [part.reshape(-1), np.append(begins, len(part))]
    index, verified, *packed = pack_to_device(pieces, rows.slots.device)
    found = [
        StateChunks(rows.slots, rows.starts, rows.offsets, part.view(-1, 2), begins)
        for part, begins in zip(packed[::2], packed[1::2], strict=True)
    ]
    decode, verify = None, None
    if len(index):
        decode = DecodeStateRows(rows.slots[index], rows.starts[index], rows.offsets[index])
    if len(verified):
        first = rows.offsets[verified]
        verify = VerifyRows(rows.slots[verified], first, rows.offsets[verified + 1] - first)
    return SplitRows(decode, found, verify, int(lengths[is_verify].max(initial=0)), folds)


def fold_rows_of(host: HostRows, device: torch.device) -> FoldRows | None:
    """Return the rows that fold pending tokens; None: there are none."""
    counts = host.num_folded
    if counts is None or host.slots is None or not counts.any():
        return None
    rows = np.flatnonzero(counts)
    packed = to_device(np.stack((host.slots[rows].astype(np.int64), counts[rows])), device)
    return FoldRows(packed[0], packed[1])


def fold(planes: StatePlanes, pending: PendingTokens | None, rows: FoldRows) -> None:
    """Fold pending tokens of one layer.

    The kernels behind read states before they await the kernel before them. `fold_states` begins when `fold_inputs` has
    ended, and the convolution of the step awaits `fold_states`: so they find all that is folded.
    """
    assert pending is not None, "no row has drafts"
    fold_inputs(planes, pending.inputs, rows)
    fold_states(planes, pending.changes, rows)


def chunks_of(host: HostRows, rows: IntArray) -> IntArray:
    """Return the chunks of `rows` that have new tokens, row after row: row and chunk, `[T, 2]`."""
    first, last = host.starts[rows] // CHUNK, -(-host.ends[rows] // CHUNK)
    counts = last - first
    before = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(before - first, counts)
    return np.stack((np.repeat(rows, counts), number), 1)
