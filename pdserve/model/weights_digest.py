"""A digest over all bytes of a model's weight files, computed once and kept beside them.

The fingerprint of the loaded weights (`params.fingerprint_of`) is quick, but covers samples only. Keys of pages have
this digest as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve.base.startup_progress import told
from pdserve.errors import ModelError
from pdserve.model.paths import cache_root, weight_files

log = logging.getLogger(__name__)

NAME = ".pdserve-weights.json"
_VERSION = 1
_PIECE_BYTES = 1 << 20
_THREADS = 4


def weights_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of the weights at `path`, a model directory or a `.gguf` file.

    The result is kept in `NAME` in the model's directory, or in the cache directory where that cannot be written. It is
    computed again when the size or the time of a file has changed.

    Raises:
        ModelError: the weights cannot be read.
    """
    files = [path] if path.suffix == ".gguf" else weight_files(path)
    try:
        facts = _facts(files)
        kept = _places(files[0].parent, facts)
        for place in kept:
            found = _read(place, facts)
            if found is not None:
                return found
        num_bytes = sum(size for _, size, _ in facts)
        with told(log.info, f"hashing {num_bytes / 1e9:.1f} GB of weights in {files[0].parent}, once"):
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-digest") as pool:
                digests = list(pool.map(_digest_of, files))
    except OSError as error:
        raise ModelError(f"the weights at {path} cannot be read: {error}") from error
    digest = hashlib.sha256(b"".join(digests)).hexdigest()
    for place in kept:
        if _write(place, facts, digest):
            break
    else:
        log.warning("the digest of the weights cannot be kept, and will be computed at each start; set PDSERVE_CACHE")
    return digest


def _digest_of(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.digest()


Facts = Sequence[tuple[str, int, int]]
"""Name, size in bytes and time of change (ns) of each file."""


def _facts(files: Sequence[Path]) -> Facts:
    stats = [(file, file.stat()) for file in files]
    return [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def _places(directory: Path, facts: Facts) -> tuple[Path, Path]:
    """Return where a digest may be kept, the preferred place first."""
    key = hashlib.blake2b(f"{directory.resolve()}:{facts}".encode(), digest_size=8).hexdigest()
    return directory / NAME, cache_root() / f"weights-{key}.json"


def _read(place: Path, facts: Facts) -> str | None:
    try:
        kept = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    expected = {"version": _VERSION, "files": [list(one) for one in facts]}
    if not isinstance(kept, dict) or any(kept.get(name) != value for name, value in expected.items()):
        return None
    digest = kept.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _write(place: Path, facts: Facts, digest: str) -> bool:
    """Keep a digest; False when the place cannot be written. Readers see a whole file or none."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w") as file:
            os.fchmod(handle, 0o644)  # other users may serve the same files
            json.dump({"version": _VERSION, "files": list(facts), "sha256": digest}, file)
        os.replace(name, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        return False
    return True
