"""Programs for the tests of the CPU kernels, with memory that must not be read, or written, made to show it.

Behind the rows that are used, each buffer has one more, which is poisoned: a kernel that reads it gives NaN, or what
is as wrong, and one that writes it is found out by `taken`. Vectors that a kernel is given have NaN behind them.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from pdserve.model.native.program import Program
from pdserve.model.native.resources import Buffer, Threads
from tests.unit.model.native_kit import LEVELS_HERE, batch_of

TOLERANCE = 0.004
"""Of the norm of a product, whose inputs are rounded here as they are there; a few fall to the other side."""
FEW = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
levels = pytest.mark.parametrize("level", LEVELS_HERE)
NOWHERE = -(1 << 40)
"""As an index, memory that is not there."""


def program(level: str, threads: int) -> Program:
    """One for operations that know no heads."""
    return Program(Threads(threads), level)


def begin(p: Program, rows: int, *, of_samples: bool = False) -> None:
    """A step of a prompt of `rows`, or of so many samples alone, with room for one more."""
    p.reserve(rows + 1, rows + 1)
    p.begin_samples(rows) if of_samples else p.begin(batch_of([(0, rows)], 1)[0])


def put(p: Program, buffer: Buffer, x: Tensor, *, behind: float = torch.nan) -> None:
    """The rows `x`, and poison in the one behind them: `behind`, or in integers an index of nothing."""
    poison(p, buffer, len(x), behind=behind)
    p.view(buffer, len(x)).copy_(x)


def poison(p: Program, buffer: Buffer, rows: int, *, behind: float = torch.nan) -> None:
    """Poison in the first `rows` and in the one behind them."""
    p.view(buffer, rows + 1).fill_(behind if buffer.dtype.is_floating_point else NOWHERE)


def taken(p: Program, buffer: Buffer, rows: int) -> Tensor:
    """The first `rows` of a poisoned buffer; the one behind them must be as it was."""
    last = p.view(buffer, rows + 1)[rows]
    assert bool((last.isnan() if buffer.dtype.is_floating_point else last == NOWHERE).all()), "written behind the rows"
    return p.view(buffer, rows)


def fenced(x: Tensor) -> Tensor:
    """`x` with NaN in the memory behind it."""
    whole = torch.full((x.numel() + 64,), torch.nan, dtype=x.dtype)
    whole[: x.numel()] = x.flatten()
    return whole[: x.numel()].view(x.shape)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Error over size; NaN where there is any."""
    return float((got.float() - wanted).norm() / wanted.norm())
