"""Fixtures that several files here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.unit.ranks.kit import Tap


@pytest.fixture
def tap() -> Iterator[Tap]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield Tap(context)
    context.destroy(linger=0)
