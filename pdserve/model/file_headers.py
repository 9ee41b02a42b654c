"""Checks the headers of weight files in milliseconds, before torch is imported: GGUF and safetensors.

Called by the launchers. It finds files that are of another kind, cut short, or only pointers of Git LFS. Loaders read
the rest later.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pdserve.errors import ModelError
from pdserve.model.families import FAMILIES

ARCHITECTURES = tuple(dict.fromkeys(family.gguf.architecture for family in FAMILIES.values() if family.gguf))
"""Names of architectures in gguf files."""
_LFS = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
_MAGIC = b"GGUF"
_EXTRA = "__metadata__"
_KEY = b"general.architecture"
_STRING = 8
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by type."""
_MAX_TEXT, _MAX_KEYS = 1 << 16, 64
"""The architecture is among the first keys; the search ends here or at the first array."""


def unsupported(path: Path, architecture: object) -> ModelError:
    """Return the error for an architecture that is not in `ARCHITECTURES`."""
    names = ", ".join(ARCHITECTURES)
    return ModelError(f"{path}: gguf architecture {architecture!r} is not supported; supported: {names}")


def check_safetensors(path: Path) -> None:
    """Refuse a file that is not safetensors, or whose tensors end elsewhere than the file.

    Raises:
        ModelError: the message names the file and what is wrong.
    """
    with _reading(path, "safetensors") as (file, start):
        size = file.seek(0, 2)
        (length,) = struct.unpack_from("<Q", start)
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a safetensors file, or is cut short: its header would not fit")
        file.seek(8)
        header = json.loads(file.read(length))
        ends = (each["data_offsets"][1] for name, each in header.items() if name != _EXTRA)
        end = 8 + length + max(ends, default=0)
    if end > size:
        raise ModelError(f"{path} is cut short: it has {size} of {end} bytes; download it again")


def check_gguf(path: Path) -> None:
    """Refuse a file that is not GGUF, or of another architecture if the first keys name it.

    Raises:
        ModelError: the message names the file and what is wrong.
    """
    with _reading(path, "gguf") as (file, start):
        if start[: len(_MAGIC)] != _MAGIC:
            text = f"{path} is not a gguf file: it does not begin with {_MAGIC.decode()!r}"
            raise ModelError(f"{text}; download it again, or give another file")
        file.seek(len(_MAGIC))
        architecture = _architecture(file)
    if architecture is not None and architecture not in ARCHITECTURES:
        raise unsupported(path, architecture)


@contextlib.contextmanager
def _reading(path: Path, kind: str) -> Iterator[tuple[IO[bytes], bytes]]:
    """Open a file of the format `kind`, and read its first bytes. Errors while it is read become a ModelError."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS))
            if start == _LFS:
                raise ModelError(
                    f"{path} is a pointer of Git LFS in place of the file: run `git lfs pull` in its directory"
                )
            yield file, start
    except (OSError, struct.error, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelError(f"{path} is not a readable {kind} file: {error}") from error


def _architecture(file: IO[bytes]) -> str | None:
    """Return the value of the key `general.architecture`; None if it is not among the first keys."""
    _, _, num_keys = _read(file, "<IQQ")
    for _ in range(min(num_keys, _MAX_KEYS)):
        key = _text(file)
        (kind,) = _read(file, "<I")
        if kind == _STRING:
            value = _text(file)
            if key == _KEY:
                return value.decode("utf-8")
        elif kind in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[kind], 1)
        else:
            return None
    return None


def _read(file: IO[bytes], form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _text(file: IO[bytes]) -> bytes:
    (length,) = _read(file, "<Q")
    if length > _MAX_TEXT:
        raise ValueError(f"a text of {length} bytes among the first keys")
    return file.read(length)
