"""The rows of a step as the Triton kernels of recurrent layers read them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pdserve.model.attention.triton_pages import pack_to_device
from pdserve.model.forward_batch import HostRows
from pdserve.model.gpu.state_rows import CHUNK, DecodeStateRows, StateChunks


def split_rows(
    slots: Tensor, starts: Tensor, offsets: Tensor, host: HostRows
) -> tuple[DecodeStateRows | None, StateChunks | None]:
    """Divide the rows of a step into those with one new token and those with chunks; None where there are none.

    `slots`, `starts` int64 `[R]` and `offsets` int64 `[R + 1]` as in `StateChunks`, `host` the same rows on the host.
    """
    is_decode = (host.ends - host.starts) == 1
    if is_decode.all():
        return DecodeStateRows(slots, starts, offsets[:-1]), None
    rows = np.flatnonzero(~is_decode)
    first, last = host.starts[rows] // CHUNK, -(-host.ends[rows] // CHUNK)
    counts = last - first
    chunk_starts = np.concatenate(([0], np.cumsum(counts)))
    number = np.arange(int(counts.sum())) - np.repeat(chunk_starts[:-1] - first, counts)
    chunks = np.stack((np.repeat(rows, counts), number), 1)
    decode, *rest = pack_to_device((np.flatnonzero(is_decode), chunks.reshape(-1), chunk_starts), slots.device)
    with_chunks = StateChunks(slots, starts, offsets, rest[0].view(-1, 2), rest[1])
    if not len(decode):
        return None, with_chunks
    return DecodeStateRows(slots[decode], starts[decode], offsets[decode]), with_chunks
