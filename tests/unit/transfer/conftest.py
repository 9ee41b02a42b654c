"""Fixtures that several files here share."""

from __future__ import annotations

import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.transfer.events import TransferEvent


@pytest.fixture
def mailbox() -> Mailbox[TransferEvent]:
    return Mailbox()
