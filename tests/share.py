"""Marks the less informative values of a parametrized test as slow, so that the default run takes a few of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], *, keep: int = 1) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize`; those after the first `keep` are marked slow.

    A tuple stands for several arguments.
    """
    found = list(values)
    slow = [value if isinstance(value, tuple) else (value,) for value in found[keep:]]
    return [*found[:keep], *(pytest.param(*value, marks=pytest.mark.slow) for value in slow)]
