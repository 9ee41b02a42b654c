"""Rows of keys and values in the 8-bit formats of `memory/dtypes.py`, in torch: values to codes and back.

A row's codes depend on its own values alone, so that they are the same in any batch. Attention computes with the values
that the codes stand for, those of tokens in the same step included. `csrc/codes.h` and `gpu/attention_math.py` do
the same in C++ and Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.memory.dtypes import SCALE_BYTES, row_items

MAX_E4M3 = 448.0
_LEAST = 1e-30


def encode_rows(values: Tensor, dtype: str) -> Tensor:
    """Return the rows of `values` `[..., width]`: int8 or, for fp8_e4m3, uint8 `[..., row_items(width, dtype)]`.

    Magnitudes above 448 become 448 in fp8_e4m3.
    """
    exact = values.float()
    if dtype == "fp8_e4m3":
        return exact.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    width = values.shape[-1]
    most = exact.abs().amax(-1, keepdim=True)
    rows = torch.zeros(*values.shape[:-1], row_items(width, dtype), dtype=torch.int8, device=values.device)
    rows[..., :width] = (exact * (127.0 / most.clamp_min(_LEAST))).round()
    rows[..., -SCALE_BYTES:] = (most / 127.0).view(torch.int8)
    return rows


def decode_rows(rows: Tensor, dtype: str, width: int, values_dtype: torch.dtype) -> Tensor:
    """Return the values `[..., width]` of `rows`, which `encode_rows` made; rows of zeros are zeros."""
    if dtype == "fp8_e4m3":
        return rows.view(torch.float8_e4m3fn).to(values_dtype)
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :width].float() * scales).to(values_dtype)
