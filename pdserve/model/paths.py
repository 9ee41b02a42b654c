"""From what the user wrote after `--model-path` to files on disk. Called by launchers and the factory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdserve.errors import ModelError
from pdserve.model.cache import EXPORT_VERSION, cache_root, made_once

SMOLLM2 = "smollm2"


def resolve_model_path(model_path: str) -> Path:
    """A directory with `config.json`, or a `.gguf` file. "smollm2" is converted into the cache the first time.

    Raises:
        ModelError: it is none of these; the message says what was looked for.
    """
    path = Path(model_path).expanduser()
    if model_path == SMOLLM2 and not path.is_dir():
        from pdserve.model.smollm2 import smollm2_directory

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
    """A directory that `AutoTokenizer.from_pretrained` reads. For a .gguf file one is made in the cache.

    `model_path` is what `resolve_model_path` gave. Raises ModelError.
    """
    if model_path.suffix != ".gguf":
        return model_path
    stat = model_path.stat()
    version = f"{model_path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = hashlib.blake2b(version.encode(), digest_size=8).hexdigest()
    target = cache_root() / f"tokenizer-{model_path.stem}-{key}-v{EXPORT_VERSION}"
    return made_once(target, lambda work: _export_tokenizer(model_path, work))


def _export_tokenizer(path: Path, work: Path) -> None:
    from pdserve.model import gguf_file  # torch: not in a process that only asks where the files are
    from pdserve.model.hf_export import export_tokenizer

    export_tokenizer(path, gguf_file.open_gguf(path), work)
