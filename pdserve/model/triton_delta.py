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

_Parts = tuple[DecodeStateRows | None, StateChunks | None]


class TritonDelta:
    """Implements `DeltaKernels`."""

    def mix(self, inputs: DeltaInputs, states: LayerStates) -> Tensor:
        """See `DeltaKernels.mix`. Returns the dtype of `inputs.qkv`."""
        x, planes = inputs.qkv, state_planes_of(states.planes)
        decode, chunks = states.rows.once("triton", lambda: split_rows(states.rows))
        mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = mixed.new_empty(len(x), inputs.num_value_heads, inputs.value_dim)
        rule = mixed, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, out, planes
        if decode is not None:
            conv_decode(x, mixed, inputs.conv_weight, planes, decode)
        if chunks is not None:
            conv_chunks(x, mixed, inputs.conv_weight, planes, chunks)
        if decode is not None:
            delta_decode(*rule, decode)
        if chunks is not None:
            delta_prefill(*rule, chunks)
        return out

    def norm(self, heads: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DeltaKernels.norm`."""
        return gated_rms_norm(heads, z, weight, eps)


def state_planes_of(planes: Mapping[str, Tensor]) -> StatePlanes:
    """Return the planes of `LayerStates` by position."""
    return StatePlanes(planes["conv_q"], planes["conv_k"], planes["conv_v"], planes["state"])


def split_rows(rows: StateRows) -> _Parts:
    """Divide the rows of a step into those with one new token and those with chunks; None where there are none."""
    if rows.is_decode:
        return DecodeStateRows(rows.slots, rows.starts, rows.offsets[:-1]), None
    assert rows.host is not None, "only decode steps are captured"
    decode, chunks, chunk_starts = chunks_of(rows.host)
    packed = pack_to_device((decode, chunks.reshape(-1), chunk_starts), rows.slots.device)
    with_chunks = StateChunks(rows.slots, rows.starts, rows.offsets, packed[1].view(-1, 2), packed[2])
    if not len(decode):
        return None, with_chunks
    index = packed[0]
    return DecodeStateRows(rows.slots[index], rows.starts[index], rows.offsets[index]), with_chunks


def chunks_of(host: HostRows) -> tuple[IntArray, IntArray, IntArray]:
    """Return the rows with one new token, and `chunks` and `chunk_starts` of the others; see `StateChunks`."""
    is_decode = (host.ends - host.starts) == 1
    rows = np.flatnonzero(~is_decode)
    first, last = host.starts[rows] // CHUNK, -(-host.ends[rows] // CHUNK)
    counts = last - first
    chunk_starts = np.concatenate(([0], np.cumsum(counts)))
    number = np.arange(int(counts.sum())) - np.repeat(chunk_starts[:-1] - first, counts)
    return np.flatnonzero(is_decode), np.stack((np.repeat(rows, counts), number), 1), chunk_starts
