"""Environment variables that pdserve reads, each through one typed function. Everything else is a flag."""

from __future__ import annotations

import os

from pdserve.errors import ConfigError

CONTROL_TOKEN = "PDSERVE_CONTROL_TOKEN"
TRITON_INTERPRET = "TRITON_INTERPRET"
"""Triton's own."""


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels are run by its interpreter, in numpy, on CPU tensors: for tests."""
    return os.environ.get(TRITON_INTERPRET) == "1"


def control_token() -> str:
    """The secret that the servers of one deployment share, from `PDSERVE_CONTROL_TOKEN`; empty: none.

    Raises:
        ConfigError: it cannot travel in an HTTP header: not printable ASCII, or with spaces inside.
    """
    token = os.environ.get(CONTROL_TOKEN, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{CONTROL_TOKEN} must be printable ASCII without spaces")
    return token
