"""Block formats of gguf files as `QuantizedWeight`: a row is a sequence of blocks of 32 or 256 values.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K have a scale for every 32 values and are kept exactly, those of 5 bits in 8.
Q6_K has one for every 16, and is rounded to 8 bits with a scale for every 32. MXFP4 is kept exactly too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from pdserve.model.grouped_weights import MIN_GROUP, GroupFormat, QuantizedWeight, mxfp4_scale

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoded = tuple[Bytes, Floats, Floats | None]
"""Values `[rows, in]`, and scales and minima `[rows, in / 32]`; no minima where zero is the middle of the values."""
ROUNDED = frozenset({"Q6_K"})
"""Types whose weights are rounded to `FORMATS`."""
FORMATS: Mapping[str, GroupFormat] = {
    "Q4_0": GroupFormat(4, MIN_GROUP),
    "Q4_1": GroupFormat(4, MIN_GROUP, has_mins=True),
    "Q5_0": GroupFormat(8, MIN_GROUP),
    "Q5_1": GroupFormat(8, MIN_GROUP, has_mins=True),
    "Q8_0": GroupFormat(8, MIN_GROUP),
    "Q4_K": GroupFormat(4, MIN_GROUP, has_mins=True),
    "Q5_K": GroupFormat(8, MIN_GROUP, has_mins=True),
    "Q6_K": GroupFormat(8, MIN_GROUP),
    "MXFP4": GroupFormat(4, MIN_GROUP, is_float=True),
}
"""The format that keeps weights of a gguf type."""
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "MXFP4": 17}
_E8M0_BIAS = 127


def decode(data: Bytes, kind: str, name: str) -> QuantizedWeight:
    """Decode rows of blocks of the gguf type `kind`, which is in `FORMATS` and not in `ROUNDED`.

    `data` is uint8 `[rows, bytes]`, a part of the tensor `name`.

    Raises:
        ModelError: the tensor has exponents of MXFP4 that the kernels do not have.
    """
    rows, form = data.shape[0], FORMATS[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, _BLOCK_BYTES[kind])
    values, scale, mins = _mxfp4(blocks, name) if form.is_float else _DECODERS[kind](blocks)
    values, scale = values.reshape(rows, -1), scale.reshape(rows, -1)
    return QuantizedWeight(
        torch.from_numpy(values),
        torch.from_numpy(scale),
        None if mins is None else torch.from_numpy(mins.reshape(rows, -1)),
        torch.arange(values.shape[1]) // MIN_GROUP,
        form.bits,
        form.is_float,
    )


def _half(blocks: Bytes, first: int) -> Floats:
    """Read the float16 at byte `first` of each block, `[blocks, 1]`."""
    return blocks[:, first : first + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low bits of all bytes `[..., n]`, then the high bits: `[..., 2 * n]`."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return the 32 bits of four bytes of each block as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Decoded:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) + np.uint8(112), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Decoded:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None  # adds 128 to signed bytes


def _sub_blocks(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and minima `[blocks, 8]` of Q4_K and Q5_K, which have six bits each in bytes 4 to 16."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate((low & 63, (rest & 15) | ((low >> 2) & 48)), 1)
    least = np.concatenate((high & 63, (rest >> 4) | ((high >> 2) & 48)), 1)
    return _half(blocks, 0) * scale.astype(np.float32), _half(blocks, 2) * -least.astype(np.float32)


def _q4_k(blocks: Bytes) -> Decoded:
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return values.reshape(len(blocks), -1), *_sub_blocks(blocks)


def _q5_k(blocks: Bytes) -> Decoded:
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(len(blocks), 8, 32)
    return (values | (bits << np.uint8(4))).reshape(len(blocks), -1), *_sub_blocks(blocks)


def _mxfp4(blocks: Bytes, name: str) -> Decoded:
    values, exponent = _nibbles(blocks[:, 1:]), blocks[:, 0].astype(np.int32) - _E8M0_BIAS
    return values, mxfp4_scale(name, torch.from_numpy(values), torch.from_numpy(exponent)).numpy(), None


_DECODERS: Mapping[str, Callable[[Bytes], Decoded]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
