"""Number formats of KV planes, and the bytes of a row in each.

A row is what a plane holds of one token and head. In an 8-bit format it is stored as codes:

int8       `width` signed bytes, zeros up to a multiple of 4, and a float32 scale: value = code * scale. The scale of
           each row is its largest magnitude / 127, so it belongs to one token, one KV head, and keys or values alone.
fp8_e4m3   `width` bytes of OCP FP8 E4M3 (no infinities, largest value 448), without scales, as SGLang's default scale
           of 1.0.

The scale lies inside the row. Whatever moves, cuts or hashes rows therefore moves, cuts or hashes it with its codes.
"""

from __future__ import annotations

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint64": 8, "int8": 1, "fp8_e4m3": 1}
EIGHT_BIT = ("fp8_e4m3", "int8")
"""Formats whose rows are codes; `--kv-cache-dtype` names them."""
SCALE_BYTES = 4
"""Bytes of the scale at the end of an int8 row."""


def row_items(width: int, dtype: str) -> int:
    """Return the items of `dtype` that a row of `width` values takes in memory."""
    return -(-width // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES if dtype == "int8" else width


def row_bytes(width: int, dtype: str) -> int:
    """Return the bytes that a row of `width` values takes in memory."""
    return row_items(width, dtype) * DTYPE_BYTES[dtype]
