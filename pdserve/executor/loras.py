"""`LoraAdapters`: the adapters that one rank has loaded, and the rows that use them.

`factory` makes it with the executor. The scheduler loads and unloads adapters by commands, which all ranks of a replica
handle in the same order, and gives each row its request's adapter. A step takes the adapters of its rows when it is
launched. An adapter that is unloaded stays in memory until its last request has left.

A thread reads an adapter beside the steps (`prepare`), and the scheduler thread installs it (`load`).

Other weights of the base model have layers of their own: `attach` gives them adapters, and `use` begins with them. The
adapters stay loaded.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from pdserve.base.parallel import layers_of
from pdserve.config.groups import ServerConfig
from pdserve.config.lora_group import DEFAULT_MAX_RANK, wrong_name
from pdserve.errors import ConfigError, ModelError, RequestError
from pdserve.executor.input_batch import HostBatch
from pdserve.executor.model_loading import LoadedModel, ModelToLoad
from pdserve.memory.cache_recorder import CacheAdapter
from pdserve.model.attention.interface import AttentionBackend, CapturableBackend, StepAttention
from pdserve.model.decoder import Decoder
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.lora import Adapters, LoraAdapter, lora_targets, read_adapter, read_scaling
from pdserve.model.lora_layers import LoraStep, attach_lora
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.lora import LoraSites

KEY_BITS = 32
"""Bits of a key of the prefix cache, see `LoraAdapters.key_offset`."""


def check_adapters(config: ServerConfig) -> int:
    """Check the adapters of `--lora-paths` as far as their configs tell; returns the largest rank to be served.

    Raises:
        ConfigError: an adapter is missing, not supported, or of a larger rank than `--max-lora-rank`.
    """
    lora, largest = config.lora, 0
    for name, path in lora.adapters.items():
        try:
            rank, _ = read_scaling(Path(path))
        except ModelError as error:
            raise ConfigError(f"--lora-paths {name}: {error}", field="lora_paths") from error
        if lora.max_lora_rank is not None and rank > lora.max_lora_rank:
            raise ConfigError(
                f"--lora-paths {name}: rank {rank} is larger than --max-lora-rank {lora.max_lora_rank}",
                field="lora_paths",
            )
        largest = max(largest, rank)
    return lora.max_lora_rank or max(largest, DEFAULT_MAX_RANK)


@dataclasses.dataclass(frozen=True)
class LoraLayers:
    """The layers of one model that adapters change: those that torch computes, or packed ones of the CPU kernels."""

    step: LoraStep | None
    sites: LoraSites | None


class LoraAdapters:
    """The adapters of one rank, by name. Scheduler thread only, except at start-up.

    Takes over the linear layers of `decoder`, which is loaded, or of `kernels`, which computes it by the CPU kernels
    and is not bound yet. `max_loaded`: most adapters at a time.
    """

    def __init__(self, decoder: Decoder, max_rank: int, max_loaded: int, kernels: NativeDecoder | None = None) -> None:
        spec, coord = decoder.spec, decoder.parallel.coord
        self._targets = lora_targets(spec, coord)
        self._first = layers_of(spec.num_layers, coord.shape.pp_size, coord.pp_rank).start
        self.layers = self.attach(decoder, kernels)
        """The layers of the model in use."""
        self._dtype, self._device = decoder.dtype, decoder.params.device
        self._max_rank, self._max_loaded = max_rank, max_loaded
        self._shift = (spec.vocab_size - 1).bit_length()
        self._loaded: dict[str, LoraAdapter] = {}
        self._numbers: dict[str, int] = {}
        """By digest, the number of each adapter that was ever loaded."""
        self._identities: dict[int, CacheAdapter] = {}
        self._rows: dict[int, LoraAdapter] = {}
        self._reading: dict[tuple[str, str], Future[LoraAdapter]] = {}
        """By name and path, the adapters that a thread reads."""

    def attach(self, decoder: Decoder, kernels: NativeDecoder | None) -> LoraLayers:
        """Give the layers of a model adapters; the arguments are those of the class. Any thread.

        The model is the one in use, with other weights. Adapters are packed alike for both.
        """
        if kernels is None:
            return LoraLayers(attach_lora(decoder, self._targets, self._first), None)
        return LoraLayers(None, kernels.take_adapters(self._targets, self._first))

    def use(self, layers: LoraLayers) -> None:
        """Change the layers of another model, from `attach`, from now on. No row has an adapter."""
        assert not self._rows, "weights change while no request has a row"
        self.layers = layers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._loaded)

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the loaded adapters by name, as in `CacheAdapter`."""
        return {name: adapter.digest for name, adapter in self._loaded.items()}

    def prepare(self, name: str, path: str) -> Future[LoraAdapter] | None:
        """Begin to read an adapter on a thread; None: `load` will refuse it, or it is being read.

        The future has the adapter, or the exception of the read. `load` takes the result.
        """
        if (name, path) in self._reading or self._refusal(name) is not None:
            return None
        future: Future[LoraAdapter] = Future()
        self._reading[name, path] = future
        threading.Thread(target=self._read_into, args=(future, name, path), name="lora-read", daemon=True).start()
        return future

    def load(self, name: str, path: str) -> LoraAdapter:
        """Load the adapter in the directory `path` as `name`. Waits for the read that `prepare` began, or reads it.

        Raises:
            ModelError: the name is taken or wrong, too many adapters are loaded, there is no memory for another one, or
                as `read_adapter`.
        """
        reading = self._reading.pop((name, path), None)
        refusal = self._refusal(name)
        if refusal is not None:
            raise ModelError(refusal)
        found = self._read(name, path) if reading is None else reading.result()
        number = self._numbers.setdefault(found.digest, len(self._numbers) + 1)
        if number >> (KEY_BITS - self._shift):
            raise ModelError(
                f"{number} different adapters were loaded since the start, more than keys of prefixes tell"
            )
        adapter = dataclasses.replace(found, number=number)
        self._loaded[name] = adapter
        self._identities[number] = CacheAdapter(number, name, found.digest)
        return adapter

    def _refusal(self, name: str) -> str | None:
        """Return why no adapter can be loaded as `name`; None when one can."""
        reason = wrong_name(name)
        if reason is not None:
            return f"the adapter {reason}"
        if name in self._loaded:
            return f"an adapter {name!r} is loaded already; unload it first"
        if len(self._loaded) >= self._max_loaded:
            return f"{len(self._loaded)} adapters are loaded, as many as --max-loras-per-batch allows"
        return None

    def _read(self, name: str, path: str) -> LoraAdapter:
        """Read an adapter, and pack it where the CPU kernels compute. Raises ModelError. Any thread."""
        try:
            found = read_adapter(Path(path), name, 0, self._targets, self._dtype, self._device, self._max_rank)
            sites = self.layers.sites
            return found if sites is None else sites.pack(found)
        except (MemoryError, RuntimeError) as error:  # of torch: no memory; of json: too many levels
            raise ModelError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error

    def _read_into(self, future: Future[LoraAdapter], name: str, path: str) -> None:
        """Read an adapter on a thread of its own."""
        try:
            future.set_result(self._read(name, path))
        except BaseException as error:
            future.set_exception(error)

    def unload(self, name: str) -> None:
        """Forget the adapter `name`; requests that have it keep it. Raises ModelError when there is none."""
        if name not in self._loaded:
            raise ModelError(f"there is no adapter {name!r}")
        del self._loaded[name]

    def find(self, name: str) -> LoraAdapter:
        """Return the adapter `name`. Raises RequestError, a 404, when it is not loaded."""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise RequestError(
                f"the LoRA adapter {name!r} is not loaded", field="lora_path", status=404, code="lora_not_found"
            )
        return adapter

    @property
    def key_shift(self) -> int:
        """Bits of a token id in a key of the prefix cache; the adapter's number is above them."""
        return self._shift

    def adapter_of_key(self, number: int) -> CacheAdapter:
        """Return the adapter with this number, by its latest name; it may be unloaded."""
        return self._identities[number]

    def key_offset(self, adapter: LoraAdapter) -> int:
        """Return what is added to token ids in keys of the prefix cache: bits above those of all token ids."""
        return adapter.number << self._shift

    # ------------------------------------------------------------------ rows

    def open_row(self, row: int, adapter: LoraAdapter) -> None:
        """Give an open row of the executor an adapter."""
        self._rows[row] = adapter

    def close_row(self, row: int) -> None:
        """Forget the adapter of a row, if it has one."""
        self._rows.pop(row, None)

    def of_rows(self, rows: Iterable[int]) -> Adapters | None:
        """Return the adapter of each row; None when no row has one."""
        if not self._rows:
            return None
        found = tuple(map(self._rows.get, rows))
        return found if any(found) else None

    def fingerprint(self, row: int) -> int:
        """Return a number that tells the contents of the row's adapter; 0 without one. Equal on all ranks."""
        adapter = self._rows.get(row)
        return 0 if adapter is None else int(adapter.digest, 16)

    def into(self, batch: HostBatch) -> HostBatch:
        """Return `batch` with the adapters of its rows."""
        adapters = self.of_rows(batch.table_rows.tolist()) if self._rows else None
        return batch if adapters is None else dataclasses.replace(
            batch, rows=dataclasses.replace(batch.rows, adapters=adapters)
        )  # fmt: skip


def begin_with(layers: LoraLayers, backend: AttentionBackend) -> AttentionBackend:
    """Return `backend` with the grouping of a step's tokens by adapter, where torch computes."""
    return backend if layers.step is None else LoraBackend(backend, layers.step)


class LoraBackend:
    """An attention backend that begins `LoraStep` with each step. Captured steps have no adapters."""

    def __init__(self, backend: AttentionBackend, step: LoraStep) -> None:
        self._backend, self._step = backend, step

    def begin(self, batch: ForwardBatch) -> StepAttention:
        """See `AttentionBackend.begin`."""
        self._step.begin(batch.host)
        return self._backend.begin(batch)

    def capturing(self) -> CapturableBackend | None:
        """See `AttentionBackend.capturing`. It computes steps without adapters."""
        return self._backend.capturing()


def make_loras(wanted: ModelToLoad, loaded: LoadedModel, max_rank: int) -> LoraAdapters | None:
    """Give a loaded model adapters, and load those of `--lora-paths`; None without --enable-lora.

    `max_rank`: see `check_adapters`. Raises ConfigError, which names the adapter.
    """
    lora = wanted.config.lora
    if not lora.is_on:
        return None
    decoder = loaded.decoder
    assert decoder is not None, "a model through transformers takes no adapters"
    adapters = LoraAdapters(decoder, max_rank, lora.max_loras_per_batch, loaded.kernels)
    for name, path in lora.adapters.items():
        try:
            adapters.load(name, path)
        except ModelError as error:
            raise ConfigError(f"--lora-paths {name}: {error}", field="lora_paths") from error
    return adapters
