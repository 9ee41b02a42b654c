"""Environment variables that pdserve reads, each through one typed function. Everything else is a flag."""

from __future__ import annotations

import os

from pdserve.errors import ConfigError

CONTROL_TOKEN = "PDSERVE_CONTROL_TOKEN"
CACHE_DIR = "PDSERVE_CACHE_DIR"


def control_token() -> str:
    """The secret that the servers of one deployment share, from `PDSERVE_CONTROL_TOKEN`; empty: none.

    Raises:
        ConfigError: it cannot travel in an HTTP header: not printable ASCII, or with spaces inside.
    """
    token = os.environ.get(CONTROL_TOKEN, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{CONTROL_TOKEN} must be printable ASCII without spaces")
    return token


def cache_dir() -> str:
    """Where converted checkpoints are kept: `PDSERVE_CACHE_DIR`, else `$XDG_CACHE_HOME/pdserve`, else `~/.cache/pdserve`."""
    explicit = os.environ.get(CACHE_DIR)
    if explicit:
        return os.path.abspath(os.path.expanduser(explicit))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "pdserve")
