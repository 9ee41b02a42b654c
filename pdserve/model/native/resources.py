"""What programs of the CPU kernels are given: threads, heads over a KV pool, and buffers.

Made by `NativeDecoder` and by the calls in `ops`, for `Program`.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from pdserve.base.native import library

MAX_GROUP = 128
"""Maximum query heads per KV head."""
MAX_HEAD_DIM = 576
Activation = Literal["silu", "gelu_tanh", "gpt_oss"]
"""What `Program.gated` makes of gate and up; see `pdk_op_gated`."""
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gpt_oss")
"""In the order of their numbers."""


class Threads:
    """The threads that run programs; the calling thread is the first of `count`. They end with this object.

    `cpus` lists `count - 1` cores to pin the other threads to; None leaves them unpinned.
    """

    def __init__(self, count: int, cpus: Sequence[int] | None = None) -> None:
        self._library = library()
        assert count >= 1 and (cpus is None or len(cpus) == count - 1), (count, cpus)
        pinned = None if cpus is None else (ctypes.c_int64 * len(cpus))(*cpus)
        self.handle: int | None = self._library.pdk_pool_open(count, pinned)
        if self.handle is None:
            raise RuntimeError(f"cannot start {count - 1} threads")

    def __del__(self) -> None:
        if self.handle is not None:
            self._library.pdk_pool_close(self.handle)
            self.handle = None


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Attention heads: `num_heads` query heads share `num_kv_heads` heads of `dim`, whose pool has `layers` layers.

    With `of_window` the pages are those of WINDOW groups. `scale` multiplies the scores; None: `dim ** -0.5`.
    With `of_latents` the one KV head is a latent, which is key and value. `kv_dtype`: number format of the pool.
    """

    layers: int
    num_heads: int
    num_kv_heads: int
    page_tokens: int
    dim: int
    of_window: bool = False
    scale: float | None = None
    of_latents: bool = False
    kv_dtype: str = "bfloat16"

    @property
    def qkv_width(self) -> int:
        """Items of a token's Q, K and V together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory of a program: a row of `width` items for each token, or for each sample with `of_samples`."""

    number: int
    width: int
    dtype: torch.dtype
    of_samples: bool
