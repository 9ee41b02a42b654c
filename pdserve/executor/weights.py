"""Loads other weights of the same model beside those in use, and puts them into an executor.

    WeightsSource ──> WeightsLoader.prepare: a thread loads and binds a second model ──> PreparedWeights
                          └─ a missing or wrong tensor, another model, too little memory: the first model is untouched
    PreparedWeights ──> WeightsLoader.install: the executor computes with them; the former weights are dropped

Each rank has a loader, made by `factory` with its executor. Until `install` both models are in memory. LoRA adapters
stay, and change the new model's layers from then on. With `--enable-eplb` the new experts are loaded at their first
places, and `install` moves them to the present ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import torch

from pdserve.base.host_memory import give_back_freed
from pdserve.base.startup_times import StartupTimes
from pdserve.errors import ModelError, PdserveError
from pdserve.executor.draft_loading import add_drafter
from pdserve.executor.local_executor import LocalExecutor
from pdserve.executor.memory_sizing import free_bytes
from pdserve.executor.model_in_use import ModelParts
from pdserve.executor.model_loading import LoadedModel, ModelToLoad, load, read_model
from pdserve.executor.weights_group import WeightsGroups
from pdserve.model.drafting.interface import DraftModel
from pdserve.model.loader import quantization_of
from pdserve.model.params import ParamSlots, WeightSamples
from pdserve.model.paths import resolve_model_path
from pdserve.model.tensor_sources import TensorSource
from pdserve.model.weights_digest import weights_digest

LoadFormat = Literal["auto", "dummy"]


ReadTensors = Callable[[], Mapping[str, TensorSource]]
"""Returns tensors by their names in the checkpoint, on the thread that loads. Raises ModelError."""


@dataclasses.dataclass(frozen=True)
class WeightsSource:
    """Where weights come from: a checkpoint on this rank's host, as `--model-path` and `--load-format` name one.

    `overlay`: tensors by their names in the checkpoint, which are read instead of those of its files.
    """

    path: str
    load_format: LoadFormat = "auto"
    overlay: Mapping[str, TensorSource] = dataclasses.field(default_factory=dict)
    read_tensors: ReadTensors | None = None
    """Reads tensors of a part of the weights; all others stay as they are in use. None: all come from the checkpoint.
    """

    @property
    def name(self) -> str:
        """What errors call the weights."""
        return self.path if self.read_tensors is None else "the model with the tensors"


@dataclasses.dataclass(frozen=True)
class PreparedWeights:
    """Weights that are loaded and bound to the pools. `samples` and `draft_samples`: for `fingerprint_of`."""

    source: WeightsSource
    loaded: LoadedModel
    parts: ModelParts
    samples: WeightSamples
    draft_samples: WeightSamples
    digest: str = ""
    """Digest of all values, for keys of pages; empty: of random weights, or where no page has a key."""
    draft_model: DraftModel | None = None


Bind = Callable[[ModelToLoad, LoadedModel, DraftModel | None], ModelParts]
"""Binds a model, and the model that drafts for it, to the executor's pools."""


def digest_of_tensors(before: str, tensors: Mapping[str, TensorSource]) -> str:
    """Return the SHA-256 (hex) of `tensors`, names and values, which replace some of the weights of digest `before`."""
    digest = hashlib.sha256(before.encode())
    for name, source in sorted(tensors.items()):
        value = source.read(None).contiguous().cpu()
        digest.update(f"{name}:{value.dtype}:{list(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_experts(given: Mapping[str, TensorSource], in_use: ParamSlots) -> None:
    """Raise ModelError unless all tensors of experts are given: those in use have moved, and are not read by name."""
    names = {own for name in given for own in in_use.names_of(name)}
    missing = next((name for name in in_use.names if ".experts." in name and name not in names), None)
    if missing is not None:
        raise ModelError(
            f"{missing} is not sent: with --enable-eplb experts move between ranks, so tensors of all experts must be"
        )


class WeightsLoader:
    """Loads weights for one executor. Scheduler thread; `prepare` loads on a thread of its own.

    `wanted`, `loaded`: the model in use; `draft_model`: the one that drafts for it. `bind` makes the parts of another
    one. `make_ready` captures steps.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        wanted: ModelToLoad,
        loaded: LoadedModel,
        bind: Bind,
        make_ready: Callable[[], None],
        draft_model: DraftModel | None = None,
    ) -> None:
        self._executor, self._wanted, self._loaded, self._draft_model = executor, wanted, loaded, draft_model
        self._bind, self._make_ready = bind, make_ready
        self.groups = WeightsGroups(wanted.device)
        """Process groups in which a trainer sends weights."""
        self.source = WeightsSource(wanted.config.model.model_path, wanted.config.model.load_format)
        """Where the weights in use come from."""
        self.digest = ""
        """See `PreparedWeights`; empty: those of the start."""

    def prepare(self, source: WeightsSource) -> Future[PreparedWeights | None]:
        """Begin to load `source` beside the weights in use.

        The future's exception is a PdserveError: the weights are missing, damaged, of another model or in another
        number format, or there is too little memory.
        """
        future: Future[PreparedWeights | None] = Future()
        threading.Thread(target=self._into, args=(future, source), name="weights", daemon=True).start()
        return future

    def run(self, action: Callable[[], None]) -> Future[PreparedWeights | None]:
        """Begin `action` on a thread. The future's result is None, or its exception that of the action."""
        future: Future[PreparedWeights | None] = Future()

        def into() -> None:
            try:
                action()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=into, name="weights-group", daemon=True).start()
        return future

    def install(self, prepared: PreparedWeights) -> None:
        """Compute with `prepared` from the next step on. No row is open, and no step is unresolved.

        Raises what the capture of decode steps raises on CUDA; the executor is not usable then.
        """
        self._executor.swap_model(prepared.parts)
        self._loaded, self._draft_model = prepared.loaded, prepared.draft_model
        self.source = dataclasses.replace(prepared.source, overlay={}, read_tensors=None)
        self.digest = prepared.digest
        self._make_ready()
        give_back_freed()

    def _into(self, future: Future[PreparedWeights | None], source: WeightsSource) -> None:
        """Load on the thread "weights"."""
        try:
            future.set_result(self._load(source))
        except PdserveError as error:
            future.set_exception(error)
        except (MemoryError, RuntimeError, OSError, ValueError) as error:
            future.set_exception(ModelError(f"{source.name} cannot be loaded: {type(error).__name__}: {error}"))
        except BaseException as error:
            future.set_exception(error)

    def _load(self, source: WeightsSource) -> PreparedWeights:
        if source.path != self.source.path and not Path(source.path).exists():
            raise ModelError(f"there is no model at {source.path} on this server")
        self._check_memory()
        present = self._wanted
        model = dataclasses.replace(present.config.model, model_path=source.path, load_format=source.load_format)
        config = dataclasses.replace(present.config, model=model)
        path = resolve_model_path(source.path)
        wanted = read_model(config, path, present.device, present.parallel, StartupTimes())
        self._check_model(wanted)
        wanted = dataclasses.replace(wanted, dtype=present.dtype, beside=self._loaded, overlay=source.overlay)
        if source.read_tensors is not None:
            self._check_partial()
            in_use = self._loaded.model.params
            draft = None if self._draft_model is None else self._draft_model.params
            overlay = source.read_tensors()
            wanted = dataclasses.replace(wanted, overlay=overlay, carried=in_use, carried_draft=draft)
            if present.config.parallel.enable_eplb:
                _check_experts(wanted.overlay, in_use)
        loaded, draft_model = add_drafter(wanted, load(wanted))
        if (loaded.layout, loaded.arithmetic) != (self._loaded.layout, self._loaded.arithmetic):
            raise ModelError(
                f"{source.name} runs as {loaded.arithmetic}, this server as {self._loaded.arithmetic}: weights of "
                "another number format or KV layout cannot replace those in use"
            )
        parts = self._bind(wanted, loaded, draft_model)
        drafts = {} if parts.drafter is None else parts.drafter.weight_samples()
        digest = self._digest(path, source, wanted.overlay)
        return PreparedWeights(source, loaded, parts, loaded.model.params.samples(), drafts, digest, draft_model)

    def _digest(self, path: Path, source: WeightsSource, overlay: Mapping[str, TensorSource]) -> str:
        """Return the digest of the weights for keys of pages, at rank 0 of a server that has such keys.

        Tensors that replace some of the weights in use have the digest of these before them.
        """
        config = self._wanted.config
        has_keys = config.storage.hicache_storage_backend is not None or config.kv_events is not None
        if not has_keys or self._wanted.parallel.coord.rank:
            return ""
        before = self.digest if source.read_tensors is not None else ""
        if not before and source.load_format != "dummy":
            before = weights_digest(path)
        return digest_of_tensors(before, overlay) if overlay else before

    def _check_partial(self) -> None:
        """Raise ModelError where single tensors of the model in use cannot be replaced."""
        if self._wanted.source is not None:
            raise ModelError("this model runs through transformers: its weights change from disk only")
        if self._loaded.formats or quantization_of(self._wanted.path) is not None:
            raise ModelError("this model has quantized weights, which change from disk only")

    def _check_memory(self) -> None:
        """Raise ModelError where a second copy of the weights does not fit beside the first."""
        needed, free = self._executor.weight_bytes, free_bytes(self._wanted.device)
        if needed > free:
            where = "this GPU" if self._wanted.device.type == "cuda" else "this host"
            raise ModelError(
                f"other weights are loaded beside those in use, which takes {needed >> 20} MB: {where} has "
                f"{free >> 20} MB free"
            )

    def _check_model(self, wanted: ModelToLoad) -> None:
        """Raise ModelError where the checkpoint is of another model: names the first field that differs."""
        present = self._wanted
        if wanted.spec == present.spec and (wanted.source is None) == (present.source is None):
            return
        for field in dataclasses.fields(present.spec):
            ours, theirs = getattr(present.spec, field.name), getattr(wanted.spec, field.name)
            if ours != theirs and field.name != "dtype":
                raise ModelError(f"{wanted.path} is of another model: its {field.name} differs from the one in use")
