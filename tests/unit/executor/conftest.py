"""Fixtures that several files here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.executor.gang import Gang, open_gang


@pytest.fixture(scope="package")
def gang() -> Iterator[Gang]:
    """Four processes that may be the ranks of any replica; ended after the last test here."""
    with open_gang(4) as processes:
        yield processes
