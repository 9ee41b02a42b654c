"""Maps dtype names of configs and KV layouts to torch dtypes."""

from __future__ import annotations

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name` (bfloat16, float16 or float32)."""
    return _DTYPES[name]
