"""Looks into the installed transformers package without importing it, which takes seconds and imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.config import read_json
from pdserve.model.fields import read_texts

_PACKAGE = "transformers"


def check_architecture(directory: Path, native: UnsupportedModelError) -> None:
    """Check that transformers has the first architecture of the checkpoint in `directory`.

    `native`: why no native code runs the checkpoint.

    Raises:
        ModelError: transformers does not have it either, or the checkpoint is quantized.
    """
    fields = read_json(directory / "config.json")
    if fields.get("quantization_config"):
        raise ModelError(f"{native}; through transformers, quantization_config is not supported")
    names = read_texts(fields, "architectures", str(directory))
    if not names or not any(_defines(source, names[0]) for source in _sources(str(fields.get("model_type", "")))):
        version = importlib.metadata.version(_PACKAGE)
        raise ModelError(f"{native}; transformers {version} does not have it either") from native


def _sources(model_type: str) -> Iterator[Path]:
    """Yield the files that define models, those of `model_type` first."""
    found = importlib.util.find_spec(_PACKAGE)
    for location in (found.submodule_search_locations or []) if found is not None else []:
        models = Path(location) / "models"
        own = models / model_type
        if own.parent == models and own.is_dir():
            yield from sorted(own.glob("modeling_*.py"))
        yield from sorted(models.glob("*/modeling_*.py"))


def _defines(source: Path, architecture: str) -> bool:
    return f"class {architecture}(" in source.read_text(encoding="utf-8")
