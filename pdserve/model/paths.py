"""From what the user wrote after `--model-path` to files on disk. Called by launchers and the factory."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import ModelError

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
    from pdserve.model.hf_export import tokenizer_directory

    return tokenizer_directory(model_path)
