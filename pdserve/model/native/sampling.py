"""Token sampling by the CPU kernels: the distributions of `executor/sampler.py`, without sorting.

Called by the sampler with a step's sampling parameters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.base.native import library
from pdserve.model.native.resources import Threads

_HOW = np.dtype(
    [("point", "f8"), ("top_k", "i8"), ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("greedy", "i4")]
)
"""Layout of `pdk_choice`."""


class NativeChooser:
    """Samples on `threads`; keeps its scratch memory for the next call."""

    def __init__(self, threads: Threads, level: str) -> None:
        self._threads, self._level = threads, level.encode()
        self._library = library()
        self._scratch = torch.empty(0)

    def __call__(
        self, logits: Tensor, columns: np.ndarray[tuple[int], np.dtype[np.void]], points: npt.NDArray[np.float64]
    ) -> Tensor:
        """Sample one token per row: int64 `[R]`.

        `logits` float32 `[R, V]`; `columns` of `[R]` have `greedy`, `temperature`, `top_k`, `top_p` and `min_p`;
        `points` `[R]` in [0, 1) are where distributions are inverted. Greedy rows take their maximum.
        """
        assert logits.dtype == torch.float32 and logits.ndim == 2 and len(columns) == len(points) == len(logits)
        logits = logits.contiguous()
        rows, vocab = logits.shape
        how = np.zeros(rows, dtype=_HOW)
        how["greedy"] = columns["greedy"]
        if not columns["greedy"].all():
            how["point"] = points
            for name in ("top_k", "temperature", "top_p", "min_p"):
                how[name] = columns[name]
        num_bytes = self._library.pdk_choose_bytes(self._threads.handle, vocab)
        if self._scratch.nbytes < num_bytes:
            self._scratch = torch.empty(num_bytes // 4)
        tokens = torch.empty(rows, dtype=torch.int64)
        done = self._library.pdk_choose(
            self._threads.handle, self._level, logits.data_ptr(), rows, vocab, how.ctypes.data,
            self._scratch.data_ptr(), tokens.data_ptr(),
        )  # fmt: skip
        assert done == 0, self._level
        return tokens
