"""Directories that are made once and then only read, even when two processes want them at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdserve.errors import ModelError

EXPORT_VERSION = 1
"""Part of the names of what `hf_export` has written: raise it when it writes something else."""


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, filled by `make` if it does not exist yet.

    `make` works in a fresh directory beside it, which is then renamed: a reader sees all of it or nothing. Of two
    processes that race, the first to finish wins and the other throws its copy away.

    Raises:
        ModelError: the cache cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            make(work)
            work.chmod(0o755)
            with contextlib.suppress(FileExistsError, OSError):
                os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write {target.parent}: {error}; set PDSERVE_CACHE to a writable place") from error
    if not target.is_dir():
        raise ModelError(f"cannot move the converted files to {target}; set PDSERVE_CACHE to a writable place")
    return target


def cache_root() -> Path:
    """Where converted models are kept: $PDSERVE_CACHE, else pdserve/ below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PDSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdserve"
