"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import tiny_tokenizer, token_ids


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Token ids of a text."""
    return lambda text: token_ids(tokenizer, text)
