"""Finds out which transfer engines are installed, without importing them. Called by `resolve` and `pdserve env`.

An engine's own import starts threads and takes up to a second, and belongs into the engine processes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

MOONCAKE_HELP = (
    "`pip install 'pdserve[mooncake]'` on a machine without CUDA ('pdserve[cuda]' for CUDA 12, 'pdserve[cuda13]' for "
    "CUDA 13), and `apt-get install libibverbs1 libnuma1 libcurl4`"
)
NIXL_HELP = "`pip install 'pdserve[nixl]'`, on a machine with CUDA 13 'pdserve[nixl-cu13]'; without CUDA either does"
NIXL_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Module names. The first selects one of the others, but its package installs both of them."""
SYSTEM_LIBRARIES = ("libibverbs.so.1", "libnuma.so.1")
"""Libraries that Mooncake links to and its wheel does not contain. libcurl is left out: it would load thirty others."""


def missing_engines() -> dict[str, str]:
    """Return the reason for each transfer backend whose engine cannot be imported here, and how to install it."""
    return dict(_missing())


def _missing() -> Iterator[tuple[str, str]]:
    if not _package_files("mooncake", "engine*.so"):
        yield "mooncake", f"the Mooncake transfer engine is not installed: {MOONCAKE_HELP}"
    elif absent := [name for name in SYSTEM_LIBRARIES if not _loads(name)]:
        yield "mooncake", f"the Mooncake transfer engine needs {' and '.join(absent)}: {MOONCAKE_HELP}"
    if not any(importlib.util.find_spec(name) for name in NIXL_MODULES):
        yield "nixl", f"the NIXL transfer engine is not installed: {NIXL_HELP}"


def _package_files(package: str, pattern: str) -> list[Path]:
    """Return the files of an installed package that match `pattern`; an empty list without the package."""
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return [file for place in places for file in Path(place).glob(pattern)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
