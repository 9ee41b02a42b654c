"""`TritonDelta`: the arithmetic of GatedDeltaNet layers by Triton kernels. Made with the Triton attention backend.

Rows with one new token take the recurrent step, all other rows chunks. A decode step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pdserve.model.attention.interface import LayerStates, StateRows
from pdserve.model.attention.triton_pages import pack_to_device
from pdserve.model.forward_batch import HostRows, IntArray
from pdserve.model.gated_delta_net import DeltaInputs
from pdserve.model.gpu.causal_conv import conv_chunks, conv_decode
from pdserve.model.gpu.gated_delta import delta_decode, gated_rms_norm
from pdserve.model.gpu.gated_delta_prefill import delta_prefill
from pdserve.model.gpu.state_rows import CHUNK, DecodeStateRows, StateChunks, StatePlanes

MAX_CHUNKS = 64
"""Chunks that are computed together, which bounds the temporary memory of a step."""


class TritonDelta:
    """Implements `DeltaKernels`."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """See `DeltaKernels.mix`. Returns the dtype of `inputs.qkv`."""
        x, planes = inputs.qkv, state_planes_of(states.planes)
        decode, parts = states.rows.once("triton", lambda: split_rows(states.rows))
        mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = mixed.new_empty(len(x), inputs.num_value_heads, inputs.value_dim)
        rule = mixed, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, out, planes
        if decode is not None:
            conv_decode(x, mixed, inputs.conv_weight, planes, decode)
            delta_decode(*rule, decode)
        for chunks in parts:
            conv_chunks(x, mixed, inputs.conv_weight, planes, chunks)
            delta_prefill(*rule, chunks)
        return out

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DeltaKernels.norm`."""
        return gated_rms_norm(heads, z, weight, eps)


def state_planes_of(planes: Mapping[str, Tensor]) -> StatePlanes:
    """Return the planes of `LayerStates` by position."""
    return StatePlanes(planes["conv_q"], planes["conv_k"], planes["conv_v"], planes["state"])


def split_rows(rows: StateRows) -> tuple[DecodeStateRows | None, list[StateChunks]]:
    """Divide the rows of a step: those with one new token, if any, and the chunks of the others, MAX_CHUNKS at a time.

    Chunks of a row that begin one part go on from those that end the part before.
    """
    if rows.is_decode:
        return DecodeStateRows(rows.slots, rows.starts, rows.offsets[:-1]), []
    assert rows.host is not None, "only decode steps are captured"
    is_decode = (rows.host.ends - rows.host.starts) == 1
    chunks = chunks_of(rows.host, np.flatnonzero(~is_decode))
    parts = [chunks[first : first + MAX_CHUNKS] for first in range(0, len(chunks), MAX_CHUNKS)]
    pieces = [np.flatnonzero(is_decode)]
    for part in parts:
        begins = np.flatnonzero(np.diff(part[:, 0], prepend=-1))
        pieces += [part.reshape(-1), np.append(begins, len(part))]
    index, *packed = pack_to_device(pieces, rows.slots.device)
    found = [
        StateChunks(rows.slots, rows.starts, rows.offsets, part.view(-1, 2), begins)
        for part, begins in zip(packed[::2], packed[1::2], strict=True)
    ]
    if not len(index):
        return None, found
    return DecodeStateRows(rows.slots[index], rows.starts[index], rows.offsets[index]), found


def chunks_of(host: HostRows, rows: IntArray) -> IntArray:
    """Return the chunks of `rows` that have new tokens, row after row: row and chunk, `[T, 2]`."""
    first, last = host.starts[rows] // CHUNK, -(-host.ends[rows] // CHUNK)
    counts = last - first
    before = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(before - first, counts)
    return np.stack((np.repeat(rows, counts), number), 1)
