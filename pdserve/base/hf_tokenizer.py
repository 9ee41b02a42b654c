"""Opens the Hugging Face tokenizer of a model directory, for tokenization and for grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.base.env import tokenize_in_the_calling_thread
from pdserve.errors import ConfigError

COMPLETE_CLASSES = frozenset(
    {"PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2TokenizerFast"}
)
"""Tokenizer classes that tokenizer.json describes completely. Other classes apply further settings of their config."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def open_hf_tokenizer(directory: str | Path) -> Any | None:
    """Open a fast tokenizer with transformers; None if the directory has no tokenizer files.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    tokenize_in_the_calling_thread()
    path = Path(directory)
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        loaded = _load(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"cannot read the tokenizer in {path}: {error}", field="tokenizer_path") from error
    if not loaded.is_fast:
        raise ConfigError(f"the tokenizer in {path} has no tokenizer.json and none can be made", field="tokenizer_path")
    return loaded


def read_tokenizer_json(directory: str | Path) -> str | None:
    """Return the content of a tokenizer.json for the model; None if the directory has no tokenizer.

    For the classes of `COMPLETE_CLASSES` the file is read as it is, without importing transformers.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    file = Path(directory) / "tokenizer.json"
    if file.is_file() and _class_of(file.parent) in COMPLETE_CLASSES:
        return file.read_text(encoding="utf-8")
    loaded = open_hf_tokenizer(directory)
    return None if loaded is None else str(loaded.backend_tokenizer.to_str())


def _load(path: Path) -> Any:
    """Load a tokenizer; the classes of `COMPLETE_CLASSES` are loaded from tokenizer.json directly.

    `AutoTokenizer` imports torch, which costs an API process seconds and memory.
    """
    if (path / "tokenizer.json").is_file() and _class_of(path) in COMPLETE_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), use_fast=True, local_files_only=True, trust_remote_code=False)


def _class_of(path: Path) -> str:
    """Return the class named in tokenizer_config.json; empty without that file."""
    config = path / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return str(fields.get("tokenizer_class")) if isinstance(fields, dict) else ""
