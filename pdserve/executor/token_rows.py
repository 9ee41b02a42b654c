"""Every row's tokens on the device, prompt and output. Owned by `LocalExecutor`; touched in the order of its steps."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from pdserve.executor.row_params import StepParams
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.parallel import Arrival


@dataclasses.dataclass(frozen=True)
class _Late:
    """Tokens of a step that a later stage has yet to choose, and the rows they belong to."""

    params: StepParams
    token_ids: Tensor
    arrival: Arrival


class TokenPool:
    """`tensor` is int32 `[num_rows, width]`, `width` tokens a row. At most `num_late` steps' tokens are under way."""

    def __init__(self, num_rows: int, width: int, num_late: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._host = self.tensor.numpy() if device.type == "cpu" else None
        self._num_late = num_late
        self._late: deque[_Late] = deque()

    def begin(self, rows: Iterable[int], writes: Mapping[int, IntArray]) -> None:
        """A step begins that reads `rows`; requests in the rows of `writes` have come with these tokens."""
        if self._late:
            self._take({*rows, *writes})
        for row, ids in writes.items():
            self.tensor[row, : len(ids)] = to_device(ids, self.tensor.device)

    def put(self, params: StepParams, token_ids: Tensor) -> None:
        """The step has sampled `token_ids`, int64 `[S]` on the device, for the rows of `params`."""
        if self._host is not None:  # see `build_batch`
            self._host[params.lines, params.positions] = token_ids.numpy()
            return
        where = to_device(np.stack((params.lines, params.positions)), self.tensor.device)
        self.tensor.index_put_((where[0], where[1]), token_ids.int())

    def put_later(self, params: StepParams, token_ids: Tensor, arrival: Arrival) -> None:
        """As `put`, once they have arrived: before the next step that has one of these rows."""
        self._late.append(_Late(params, token_ids, arrival))

    def _take(self, rows: set[int]) -> None:
        """Put what is under way to one of `rows`, and all before it; and the oldest, where too much is under way."""
        wanted = [i for i, late in enumerate(self._late) if not rows.isdisjoint(late.params.lines.tolist())]
        num_left = min(len(self._late) - 1 - max(wanted, default=-1), self._num_late)
        while len(self._late) > num_left:
            late = self._late.popleft()
            late.arrival.wait()
            self.put(late.params, late.token_ids)
