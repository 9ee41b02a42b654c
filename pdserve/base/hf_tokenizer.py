"""Opens the Hugging Face tokenizer of a model directory, to tokenize text and to obey grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.base.env import tokenize_in_the_calling_thread
from pdserve.errors import ConfigError

COMPLETE_CLASSES = frozenset(
    {"PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2TokenizerFast"}
)
"""Tokenizers whose tokenizer.json says all there is; others change it by what else their config says."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def open_hf_tokenizer(directory: str | Path) -> Any | None:
    """A fast tokenizer of transformers, or None when the directory holds none.

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
    """All about the tokens of a model as text, in the form of a tokenizer.json; None when the directory has none.

    Quick where there is such a file and it says everything: nothing is imported then.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    file = Path(directory) / "tokenizer.json"
    if file.is_file() and _class_of(file.parent) in COMPLETE_CLASSES:
        return file.read_text(encoding="utf-8")
    loaded = open_hf_tokenizer(directory)
    return None if loaded is None else str(loaded.backend_tokenizer.to_str())


def _load(path: Path) -> Any:
    """Where tokenizer.json says everything, it is read as it is: what finds the right class for the others imports
    torch, which takes seconds and memory that an API process has no use for.
    """
    if (path / "tokenizer.json").is_file() and _class_of(path) in COMPLETE_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), use_fast=True, local_files_only=True)


def _class_of(path: Path) -> str:
    """The class that tokenizer_config.json names."""
    config = path / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return str(fields.get("tokenizer_class")) if isinstance(fields, dict) else ""
