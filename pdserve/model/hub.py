"""Models of the Hugging Face hub, by id `org/name[@revision]`: looks in the local cache, else downloads once.

    parse_model_id ──> find_cached ── complete ──> the snapshot's directory, without any network
                           └─ not ──> hub: what the revision holds ──> config, tokenizer ──> check ──> weights

The cache has the layout of huggingface_hub and is shared with it. Only safetensors, tokenizer and config files are
downloaded. `huggingface_hub` is imported for downloads only, since its import takes time. Called by the launchers, in
one process per server and before any other starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.base.startup_progress import EVERY_S, ticking
from pdserve.errors import ConfigError, ModelError
from pdserve.model.config import read_json

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

log = logging.getLogger(__name__)

ENDPOINT = "https://huggingface.co"
MAIN = "main"
LOOK_UP_S = 6.0
"""Seconds in which the hub must describe the model. Later answers are not waited for."""
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration and tokenizer files, as glob patterns."""
WEIGHT_FILES = ("*.safetensors",)
LEFT_OUT = ("*/*", "consolidated*", "training_args*", "trainer_state*")
"""Second copies of the weights in other formats, and records of the training."""
POOLING_FILE = "?_Pooling/config.json"
"""How an embedding model pools; `model/pooling.py` reads it."""
INDEX = "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A complete tokenizer has at least one of these files."""
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MB = 1_000_000
_DISK_ERRORS = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)
NUM_THREADS = 4
"""Files that are downloaded at once."""
BAR_S = 0.5
"""Seconds between two updates of the bar on a terminal."""


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of the hub. `revision` is a branch, a tag or a commit; `cache` has a directory for each model."""

    repo: str
    revision: str
    cache: Path

    @property
    def directory(self) -> Path:
        """The model's directory in the cache."""
        return self.cache / f"models--{self.repo.replace('/', '--')}"

    @property
    def name(self) -> str:
        """The id for messages, with its revision unless that is the default."""
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"


def parse_model_id(text: str, revision: str | None = None, download_dir: str | None = None) -> HubModel | None:
    """Parse `org/name[@revision]`; None for a text of any other form. Whether a directory has that name is not checked.

    `revision`: of `--revision`, `download_dir`: the cache; None: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.

    Raises:
        ConfigError: the id and `revision` name different revisions, or `revision` is malformed.
    """
    found = _ID.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        return None
    if revision is not None and (not re.fullmatch(r"[\w.][\w./-]*", revision, re.ASCII) or ".." in revision):
        raise ConfigError(f"--revision {revision!r} is not the name of a branch, tag or commit", field="revision")
    if revision is not None and found["revision"] not in (None, revision):
        raise ConfigError(
            f"--revision is {revision!r}, but --model-path {text!r} names another; give one of them", field="revision"
        )
    cache = hub_cache() if download_dir is None else Path(download_dir).expanduser().absolute()
    return HubModel(found["repo"], revision or found["revision"] or MAIN, cache)


def hub_cache() -> Path:
    """Return huggingface_hub's cache directory, from the environment variables that it reads."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` forbids the network, read as huggingface_hub reads them."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.strip().upper() in ("1", "ON", "YES", "TRUE")


def find_cached(model: HubModel) -> Path | None:
    """Return the cached snapshot of the revision, which may lack files; None if the cache has none. No network."""
    commit = model.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (model.directory / "refs" / commit).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    snapshot = model.directory / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def missing_file(snapshot: Path, *, weights: bool, config: bool = True) -> str | None:
    """Return the name of a file that a server needs and the snapshot lacks; None: it is complete.

    `weights`, `config` False: these are not needed. The tokenizer is looked for last, since some models have none.
    """
    if config and not (snapshot / "config.json").is_file():
        return "config.json"
    if weights and (snapshot / INDEX).is_file():
        for name in sorted(set(read_json(snapshot / INDEX).get("weight_map", {}).values())):
            if not (snapshot / str(name)).is_file():
                return str(name)
    elif weights and any(snapshot.glob("model-*-of-*.safetensors")):
        return INDEX
    elif weights and not any(snapshot.glob("*.safetensors")):
        return "model.safetensors"
    return None if any((snapshot / name).is_file() for name in VOCABULARIES) else VOCABULARIES[0]


def fetch(
    model: HubModel,
    check: Callable[[Path], None] = lambda snapshot: None,
    *,
    weights: bool = True,
    config: bool = True,
) -> Path:
    """Return a directory with the model's files: from the cache if they are all there, else downloaded into it.

    `check` gets a directory that has at least the configuration, before weights are downloaded; what it raises ends the
    download. `weights` False: weights are not downloaded; `config` False: the model may be without a configuration.

    Raises:
        ModelError: the model is not cached and cannot be downloaded; the message has the cause and the cache.
    """
    cached = find_cached(model)
    missing = None if cached is None else missing_file(cached, weights=weights, config=config)
    if cached is not None and missing is None:
        log.info("model %s is in the cache: %s", model.name, cached)
        check(cached)
        return cached
    state = "is not" if cached is None else f"is without {missing}"
    without_tokenizer = cached if missing == VOCABULARIES[0] else None
    if is_offline():
        if without_tokenizer is not None:
            check(without_tokenizer)
            return without_tokenizer
        raise ModelError(
            f"model {model.name!r} {state} in the cache {model.cache}, and HF_HUB_OFFLINE forbids downloads; download "
            "it once without HF_HUB_OFFLINE, or give a directory"
        )
    download = _Download(model, state)
    try:
        info = download.describe()
    except ModelError as error:
        if without_tokenizer is None:
            raise
        log.warning("the cached model is used without a tokenizer: %s", error)
        check(without_tokenizer)
        return without_tokenizer
    return download.run(info, check, weights=weights, config=config)


class _Download:
    """One download. The hub must answer the first question within `LOOK_UP_S` seconds."""

    def __init__(self, model: HubModel, state: str) -> None:
        """`state`: what the cache lacks, as the predicate of a sentence."""
        self._model, self._state = model, state
        self._endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")

    def run(self, info: ModelInfo, check: Callable[[Path], None], *, weights: bool, config: bool) -> Path:
        """Download what is missing of `info`: first configuration and tokenizer, then weights. See `fetch`."""
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if (config and "config.json" not in sizes) or (weights and not _matching(sizes, WEIGHT_FILES)):
            raise ModelError(self._without(sizes))
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise ModelError(f"{self._endpoint} names no commit of model {self._model.name!r}")
        snapshot = self._model.directory / "snapshots" / info.sha
        self._get(info.sha, _matching(sizes, DESCRIPTION_FILES))
        self._note_commit(info.sha)
        check(snapshot)
        if weights:
            self._get(info.sha, _matching(sizes, WEIGHT_FILES))
            missing = missing_file(snapshot, weights=True)
            if missing not in (None, VOCABULARIES[0]):
                raise ModelError(f"model {self._model.name!r} has no {missing} at {self._endpoint}")
        return snapshot

    def _note_commit(self, commit: str) -> None:
        """Write the commit of the revision to the cache, where `find_cached` looks for it."""
        if self._model.revision != commit:
            ref = self._model.directory / "refs" / self._model.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f".{ref.name}.{os.getpid()}")
            new.write_text(commit, encoding="utf-8")
            new.replace(ref)

    def describe(self) -> ModelInfo:
        """Ask the hub for the files of the revision, in a thread that is left behind if the answer takes too long."""
        model, outcome = self._model, list[Any]()
        log.info("model %s %s in the cache %s; asking %s", model.name, self._state, model.cache, self._endpoint)
        from huggingface_hub import HfApi

        def ask() -> None:
            api = HfApi(endpoint=self._endpoint)
            try:
                outcome.append(
                    api.model_info(model.repo, revision=model.revision, timeout=LOOK_UP_S, files_metadata=True)
                )
            except Exception as error:  # raised below, in the calling thread
                outcome.append(error)

        thread = threading.Thread(target=ask, name="hub", daemon=True)
        thread.start()
        with ticking(lambda: log.info("%s has not answered yet", self._endpoint)):
            thread.join(LOOK_UP_S)
        if not outcome:
            raise ModelError(self._unreachable(f"no answer within {LOOK_UP_S:g} s"))
        if isinstance(outcome[0], Exception):
            raise ModelError(self._cause(outcome[0])) from outcome[0]
        info: ModelInfo = outcome[0]
        return info

    def _get(self, commit: str, sizes: Mapping[str, int]) -> None:
        """Download files of the snapshot, with a bar on a terminal and lines elsewhere; cached files are kept.

        The threads are daemons, and are left behind by an exception such as that of a signal: huggingface_hub's own
        threads would first finish their files.
        """
        from tqdm.auto import tqdm

        model, total = self._model, sum(sizes.values())
        blobs = model.directory / "blobs"
        before = _bytes_in(blobs)
        log.info("downloading %d files (%d MB) of %s to %s", len(sizes), total // _MB, model.name, model.cache)
        on_terminal = sys.stderr.isatty()
        bar = tqdm(total=total, desc=f"downloading {model.name}", unit="B", unit_scale=True, disable=not on_terminal)

        def tell() -> None:
            done = min(total, _bytes_in(blobs) - before)
            bar.update(done - bar.n)
            if not on_terminal:
                log.info("downloading %s: %d of %d MB", model.name, done // _MB, total // _MB)

        names = queue.SimpleQueue[str]()
        for name in sizes:
            names.put(name)
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=self._work, args=(commit, names, errors), name=f"hub-{i}", daemon=True)
            for i in range(min(NUM_THREADS, len(sizes)))
        ]
        with bar, ticking(tell, BAR_S if on_terminal else EVERY_S), _without_bars():
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():  # a wait without a timeout would defer signals
                    thread.join(0.5)
            bar.update(total - bar.n if not errors else 0)
        if errors:
            raise ModelError(self._cause(errors[0])) from errors[0]

    def _work(self, commit: str, names: queue.SimpleQueue[str], errors: list[Exception]) -> None:
        """Download files until none is left, or one cannot be downloaded."""
        from huggingface_hub import hf_hub_download

        while not errors:
            try:
                name = names.get_nowait()
            except queue.Empty:
                return
            try:
                hf_hub_download(
                    self._model.repo, name, revision=commit, cache_dir=self._model.cache, endpoint=self._endpoint
                )
            except Exception as error:  # of any library below huggingface_hub; raised in the calling thread
                errors.append(error)

    def _cause(self, error: Exception) -> str:
        """Return the sentence for an error of huggingface_hub."""
        from huggingface_hub import errors

        name = self._model.name
        match error:
            case errors.GatedRepoError():
                page = f"{self._endpoint}/{self._model.repo}"
                return f"model {name!r} is gated: accept its terms at {page}, and set HF_TOKEN to your token"
            case errors.RepositoryNotFoundError():
                return (
                    f"model {name!r} is neither a directory here, nor in the cache {self._model.cache}, nor a public "
                    f"model of {self._endpoint}; check the name, or set HF_TOKEN to a token that may read it"
                )
            case errors.RevisionNotFoundError():
                return f"model {self._model.repo!r} has no revision {self._model.revision!r} at {self._endpoint}"
            case errors.HfHubHTTPError():
                status = error.response.status_code
                return f"{self._endpoint} answered with status {status} for model {name!r}; try again later"
            case _:
                text = " ".join(str(error).split()) or type(error).__name__
                if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                    return f"cannot write to the cache {self._model.cache}: {text}; set HF_HOME or --download-dir"
                return self._unreachable(text)

    def _unreachable(self, cause: str) -> str:
        return (
            f"model {self._model.name!r} {self._state} in the cache {self._model.cache}, and {self._endpoint} "
            f"cannot be reached ({cause}); check the network, or give a directory"
        )

    def _without(self, names: Iterable[str]) -> str:
        """Return the sentence for a repository that has no model which pdserve can read."""
        name = f"model {self._model.name!r} of {self._endpoint}"
        if any(each.endswith(".gguf") for each in names):
            return f"{name} has only .gguf files: download one of them and give its path"
        return f"{name} has no config.json with .safetensors weights, which pdserve needs"


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Switch off huggingface_hub's progress bars, one for each file."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_off = are_progress_bars_disabled()
    if not were_off:
        disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            enable_progress_bars()


def _matching(sizes: Mapping[str, int], patterns: Iterable[str]) -> dict[str, int]:
    """Return the files that match one of the patterns and are not left out."""
    return {
        name: size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name, each) for each in patterns)
        and (fnmatch.fnmatch(name, POOLING_FILE) or not any(fnmatch.fnmatch(name, each) for each in LEFT_OUT))
    }


def _bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue  # renamed meanwhile
    return total
