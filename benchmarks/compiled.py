"""C++ sources of benchmarks, compiled where they are used. Called by `fused_step` and `strip_reader`."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

_FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-std=c++20", "-fPIC", "-fopenmp"]


def build(source: Path) -> ctypes.CDLL:
    """Compile `source` and load it, linked to torch's OpenMP, so that there is one pool of threads.

    Raises:
        subprocess.CalledProcessError: the compiler refuses it; `stderr` says why.
    """
    openmp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    linked = ["-shared", "-Wl,--no-as-needed", f"-L{openmp.parent}", f"-l:{openmp.name}"]
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / f"lib{source.stem}.so"
        subprocess.run(["g++", *_FLAGS, str(source), *linked, "-o", str(library)], check=True, capture_output=True)
        return ctypes.CDLL(str(library))
