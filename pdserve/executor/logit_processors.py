"""Logit processors: code of installed packages that changes the logits of requests which name it.

A request names a processor (`custom_logit_processor`) and gives it parameters (`custom_params`). No code comes with a
request: the processors are those of `--logit-processors`, entry points of the group `pdserve.logit_processors`.

The rank that samples applies them, behind bias, penalties and bans, and sends its tokens to all other ranks. A row
whose processor fails ends with an error; other rows go on, those with the same processor too.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.base.plugins import PROCESSOR_PLUGINS, load_plugin
from pdserve.executor.input_batch import ProcessorCall, StepParams
from pdserve.model.forward_batch import IntArray, to_device

_LOG = logging.getLogger(__name__)
Params = Mapping[str, Any]
"""`custom_params` of a request."""


class LogitProcessor(Protocol):
    """Changes the logits of the tokens that are sampled next.

    It is a pure function of each row: it keeps no state between calls, and no row depends on another one. So a request
    has the same tokens in any batch, with drafts, and at any server.
    """

    def __call__(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """Return the new logits, of the shape of `logits`. It may change `logits` in place.

        `logits`: float32 `[rows, vocab]` on the device of the model. `params`: `custom_params` of the request of each
        row. Tokens whose logit is minus infinity stay forbidden, whatever is returned for them.
        """
        ...


class LogitProcessors:
    """The processors of this server, by name."""

    def __init__(self, known: Mapping[str, LogitProcessor] | None = None) -> None:
        self._known = known or {}

    @classmethod
    def load(cls, names: Sequence[str]) -> LogitProcessors:
        """Import the packages of the processors `names`, and make the processors.

        Raises:
            ConfigError: a name is no entry point, or its package cannot be imported.
        """
        return cls({name: load_plugin("logit_processors", name, (), PROCESSOR_PLUGINS)() for name in names})

    def begin(self, params: StepParams) -> StepProcessors | None:
        """Return the processors of a step; None where none of its rows has one."""
        return StepProcessors(self._known, params.processors) if params.processors else None


@dataclasses.dataclass
class StepProcessors:
    """The processors of one step. `calls`: by row of the logits."""

    known: Mapping[str, LogitProcessor]
    calls: Mapping[int, ProcessorCall]
    failed: list[int] = dataclasses.field(default_factory=list)
    """Rows whose processor has failed; their logits are as they were."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return `logits`, float32 `[S, V]`, with the rows of `calls` processed; `logits` is not changed."""
        by_name: dict[str, list[int]] = defaultdict(list)
        for row, call in self.calls.items():
            by_name[call.name].append(row)
        changed = logits.clone()
        for name, rows in by_name.items():
            self._process(name, rows, logits, changed)
        return changed

    def _process(self, name: str, rows: list[int], logits: Tensor, changed: Tensor) -> None:
        """Write the processed `rows` into `changed`. If a call with several rows fails, each row has its own."""
        index = to_device(np.array(rows, dtype=np.int64), logits.device)
        own = logits.index_select(0, index)
        try:
            found = self.known[name](own.clone(), [self.calls[row].params for row in rows])
            if not isinstance(found, Tensor) or found.shape != own.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(f"it returned {shape} for logits {tuple(own.shape)}")
            kept = found.to(own).masked_fill(own == -torch.inf, -torch.inf)
        except Exception:
            if len(rows) > 1:
                for row in rows:
                    self._process(name, [row], logits, changed)
            else:
                _LOG.exception("the logit processor %s failed; its request ends", name)
                self.failed += rows
        else:
            changed.index_copy_(0, index, kept)

    def mark(self, failed: Tensor, constrained: IntArray) -> Tensor:
        """Return `failed`, int64 `[len(constrained)]`, with 1 where a processor has failed."""
        if not self.failed:
            return failed
        places = np.searchsorted(constrained, np.array(sorted(self.failed), dtype=np.int64))
        return failed.index_fill(0, to_device(places, failed.device), 1)
