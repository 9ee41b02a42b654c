"""Environment variables, read in one place and typed."""

from __future__ import annotations

import os

CONTROL_TOKEN = "PDSERVE_CONTROL_TOKEN"


def control_token() -> str:
    """The secret that seals messages between servers; empty when the operator set none."""
    return os.environ.get(CONTROL_TOKEN, "")
