"""Fixtures of the tests of what a server tells."""

from __future__ import annotations

import pytest

from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()
