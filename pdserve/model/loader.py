"""Loads a model from a resolved path: HF safetensors, a gguf file, or random weights.

Called by the executor factory. Files are memory-mapped. A rank copies its part of each tensor straight to its
destination in the target dtype; `ParamSlots.when_given` then triggers packing. After every `WINDOW_BYTES` the pages of
a file are dropped, which bounds those that count towards resident memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.config import ModelSpec, read_json, read_model_spec
from pdserve.model.decoder import Decoder
from pdserve.model.grouped_weights import GroupFormat
from pdserve.model.layers.kernels import Kernels
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots, torch_dtype
from pdserve.model.paths import weight_files
from pdserve.model.placement import ExpertMap
from pdserve.model.quantization.config import Quantization, read_quantization
from pdserve.model.quantization.layers import QuantizedLayers
from pdserve.model.tensor_sources import QuantizedSource, TensorSource

OnProgress = Callable[[int, int], None]
"""Called with the bytes that were read, and the bytes of all files."""
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ITEM_BYTES = 4
"""Largest element size of a supported dtype, in bytes."""
WINDOW_BYTES = 64 << 20
"""Bytes of a checkpoint file that may be resident beside the weights. A larger tensor may exceed it on its own."""


def read_spec(path: Path) -> ModelSpec:
    """Read the spec of the checkpoint at `path` (a directory or a .gguf file). Raises ModelError."""
    return gguf_file.read_spec(path) if path.suffix == ".gguf" else read_model_spec(path)


def resolve_dtype(path: Path, spec: ModelSpec, asked: str, *, load_format: Literal["auto", "dummy"]) -> str:
    """Resolve the dtype to run in: `asked`, or for "auto" the checkpoint's (config first, then its first tensor)."""
    if asked != "auto":
        return asked
    if spec.dtype is not None:
        return spec.dtype
    if load_format == "dummy" or path.suffix == ".gguf" or quantization_of(path) is not None:
        return "bfloat16"
    first = weight_files(path)[0]
    with _open(first) as file:
        names = sorted(file.keys())
        if not names:
            raise ModelError(f"{first} has no tensors")
        name = file.get_slice(names[0]).get_dtype()
    if name not in _SAFETENSORS_DTYPES:
        raise ModelError(f"{path}: tensors are {name}; supported: {', '.join(_SAFETENSORS_DTYPES)}")
    return _SAFETENSORS_DTYPES[name]


def quantization_of(path: Path) -> Quantization | None:
    """Read `quantization_config` of the checkpoint at `path`; None where there is none, and for gguf files.

    Raises:
        ModelError: `config.json` is damaged, or pdserve does not support the scheme.
    """
    if path.suffix == ".gguf":
        return None
    config = read_json(path / "config.json")
    inner = config.get("text_config")
    if "quantization_config" not in config and isinstance(inner, dict):
        config = inner
    return read_quantization(config, str(path))


def quantized_formats(path: Path, spec: ModelSpec) -> dict[str, GroupFormat]:
    """Return the formats of all weights that can be read without being dequantized, by their names in the checkpoint.

    Raises:
        ModelError: a file is missing or damaged, or its tensors do not fit its `quantization_config`.
    """
    if path.suffix == ".gguf":
        return {
            source.name: source.format
            for source in gguf_file.sources(path, spec)
            if isinstance(source, gguf_file.QuantizedGgufSource)
        }
    quantization = quantization_of(path)
    if quantization is None:
        return {}
    files = weight_files(path)
    index = _index(files)
    layers = QuantizedLayers(index, quantization)
    formats = {}
    for file_path in files:
        with _open(file_path) as file:
            find = _finder(file, file_path, index)
            for main in layers.mains:
                if index[main] == file_path:
                    name, source = layers.weight(main, find)
                    if isinstance(source, QuantizedSource):
                        formats[name] = source.format
    return formats


def load_model(
    path: Path,
    spec: ModelSpec,
    dtype: str,
    device: torch.device,
    *,
    load_format: Literal["auto", "dummy"],
    seed: int,
    kernels: Kernels | None = None,
    parallel: Parallel | None = None,
    expert_map: ExpertMap | None = None,
) -> Decoder:
    """Build the model of `spec` with the weights at `path`, or with random weights.

    `kernels`, `parallel`, `expert_map`: see `Decoder`.

    Raises:
        ConfigError: `kernels` cannot provide their guarantee on this device.
        ModelError: a file or tensor is missing, damaged, of another shape, or not of this architecture.
    """
    model = empty_model(spec, dtype, device, kernels=kernels, parallel=parallel, expert_map=expert_map)
    fill_model(model, path, load_format=load_format, seed=seed)
    return model


def empty_model(
    spec: ModelSpec,
    dtype: str,
    device: torch.device,
    *,
    kernels: Kernels | None = None,
    parallel: Parallel | None = None,
    expert_map: ExpertMap | None = None,
    has_ends: bool = True,
    on_host: Collection[str] = (),
) -> Decoder:
    """Build the model of `spec` without weights; on CPU they take no memory yet. See `Decoder`. Raises ConfigError."""
    with torch.inference_mode():
        made = torch_dtype(dtype), device, kernels, parallel, expert_map
        return Decoder(spec, *made, has_ends=has_ends, on_host=on_host)


def fill_model(
    model: Decoder,
    path: Path,
    *,
    load_format: Literal["auto", "dummy"],
    seed: int,
    on_progress: OnProgress = lambda num_bytes, total: None,
    prefix: str = "",
    overlay: Mapping[str, TensorSource] | None = None,
    carried: ParamSlots | None = None,
) -> None:
    """Fill `model` with the weights at `path`, or with random ones. Raises ModelError, as `load_model`.

    `on_progress` gets the bytes of the files that have been read, and of all files, after every tensor. Tensors whose
    names do not begin with `prefix` are not read. `overlay`: tensors by name that are read instead of those at `path`.
    `carried`: parameters of an equal model whose values are taken instead of those at `path`.
    """
    overlay = overlay or {}
    with torch.inference_mode():
        if carried is not None:
            given = {own for name in overlay for own in model.params.names_of(name)}
            model.params.carry_over(carried, given)
            for name, source in overlay.items():
                if name.startswith(prefix):
                    model.params.fill(name, source)
            return
        if load_format == "dummy":
            model.params.fill_random(seed)
            return
        if path.suffix == ".gguf":
            tensors = _gguf(path, model.spec, on_progress)
        else:
            tensors = _safetensors(path, quantization_of(path), on_progress)
        for name, source in tensors:
            if name.startswith(prefix) and name not in overlay:
                model.params.fill(name, source)
        for name, source in overlay.items():
            if name.startswith(prefix):
                model.params.fill(name, source)
        model.params.check_filled(str(path))


def has_tensors(path: Path, prefix: str) -> bool:
    """Return whether the checkpoint at `path` has tensors whose names begin with `prefix`; False for gguf files.

    Raises:
        ModelError: a file is missing or damaged.
    """
    if path.suffix == ".gguf":
        return False
    for file_path in weight_files(path):
        with _open(file_path) as file:
            if any(name.startswith(prefix) for name in file.keys()):  # noqa: SIM118
                return True
    return False


@dataclasses.dataclass(frozen=True)
class _MappedSource:
    """One tensor of a mapped safetensors file. Implements `TensorSource`; a read touches only the requested part."""

    file: safe_open
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        file: Any = self.file  # its methods have no annotations
        return tuple(file.get_slice(self.name).get_shape())

    @property
    def num_bytes(self) -> int:
        """Upper bound of the tensor's size in the file, in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        file: Any = self.file
        tensor: Tensor = file.get_tensor(self.name) if part is None else file.get_slice(self.name)[part]
        return tensor


def _safetensors(
    directory: Path, quantization: Quantization | None, on_progress: OnProgress
) -> Iterator[tuple[str, TensorSource]]:
    """Yield all tensors of a directory, by name. Read each one before advancing the iterator."""
    files = weight_files(directory)
    sizes = [file.stat().st_size for file in files]
    index = _index(files) if quantization is not None else {}
    layers = None if quantization is None else QuantizedLayers(index, quantization)
    for number, path in enumerate(files):
        with _open(path) as file:
            names = list(file.keys())
        left, num_read = iter(names), 0
        for first in left:
            with _open(path) as file:
                mapped, find = 0, _finder(file, path, index)
                for name in itertools.chain((first,), left):
                    source = _MappedSource(file, name)
                    yield from ((name, source),) if layers is None else layers.of_model(((name, source),), find)
                    num_read += 1
                    on_progress(sum(sizes[:number]) + sizes[number] * num_read // len(names), sum(sizes))
                    mapped += source.num_bytes
                    if mapped >= WINDOW_BYTES:
                        break


def _index(files: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each tensor."""
    found = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _finder(file: safe_open, path: Path, index: Mapping[str, Path]) -> Callable[[str], TensorSource]:
    """Return a function that opens a tensor of a quantized weight: in `file`, mapped from `path`, or another one."""
    return lambda name: _MappedSource(file if index[name] == path else _open(index[name]), name)


def _gguf(path: Path, spec: ModelSpec, on_progress: OnProgress) -> Iterator[tuple[str, TensorSource]]:
    """Yield all tensors of a gguf file, by HF name."""
    reader, num_bytes, mapped, total = gguf_file.open_gguf(path), 0, 0, path.stat().st_size
    for source in gguf_file.sources(path, spec, reader):
        yield source.name, source
        num_bytes += source.num_bytes
        mapped += source.num_bytes
        if mapped >= WINDOW_BYTES:
            reader.release_pages()
            mapped = 0
        on_progress(num_bytes, total)


def _open(path: Path) -> safe_open:
    """Map one safetensors file."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
