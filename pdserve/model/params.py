"""Destinations of checkpoint tensors. A family declares its parameters; the loader fills them in place.

A rank of a split model declares the part of each tensor that it holds. The loader reads only that part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, within
from pdserve.model.named_weights import MemoryRange, NamedRows, check_size, named_rows
from pdserve.model.tensor_sources import ParamPiece, PieceSource, QuantizedPieceSource, QuantizedSource, TensorSource

_DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8,
    "fp8_e4m3": torch.uint8,
}  # fmt: skip
_NUM_SAMPLES = 32
EXPERT_SAMPLES = 2
"""Values of each weight of an expert that are compared with other ranks and peers: a model has thousands of them."""
_STRIDE = 2654435761
"""A prime near 2^32 / golden ratio: its multiples, modulo a tensor's size, spread over all rows and columns."""

WeightSamples = dict[str, dict[int, float]]
"""Maps a checkpoint name to values at fixed flat positions of the whole tensor, limited to the part this rank holds."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`: bfloat16, float16 or float32, or that of the codes of 8-bit KV."""
    return _DTYPES[name]


@dataclasses.dataclass(frozen=True)
class Param:
    """A checkpoint tensor: its name, its `shape`, and the indices of dimension `dim` that this rank holds.

    `held` is None when the rank holds all. `num_samples` values are compared with other ranks and peers.

    With `order` the rows of each block of `len(order)` rows are stored in this order. A rank holds whole blocks.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    held: range | None = None
    num_samples: int = _NUM_SAMPLES
    order: tuple[int, ...] | None = None

    def ordered(self, value: Tensor) -> Tensor:
        """Return the held part `value` with its rows in the order in which they are stored."""
        if self.order is None:
            return value
        blocks = value.view(-1, len(self.order), *value.shape[1:])
        return blocks[:, list(self.order)].view(value.shape)

    def unordered(self, stored: Tensor) -> Tensor:
        """Return stored rows, whole blocks, in the order of the checkpoint."""
        if self.order is None or not len(stored):
            return stored
        blocks = stored.reshape(-1, len(self.order), *stored.shape[1:])
        found = torch.empty_like(blocks)
        found[:, list(self.order)] = blocks
        return found.view(stored.shape)

    def ordered_rows(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return `ordered` of a weight that is not dequantized."""
        return weight if self.order is None else weight.rows(self.ordered(torch.arange(len(weight.values))))

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank holds."""
        if self.held is None:
            return self.shape
        return (*self.shape[: self.dim], len(self.held), *self.shape[self.dim + 1 :])

    @property
    def part(self) -> tuple[slice, ...] | None:
        """The part that this rank holds, one slice per dimension; None for the whole tensor."""
        if self.held is None or len(self.held) == self.shape[self.dim]:
            return None
        whole = [slice(0, size) for size in self.shape]
        whole[self.dim] = slice(self.held.start, self.held.stop)
        return tuple(whole)


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads a stacked tensor that was repacked. `rows(start, stop)` returns its rows `[stop - start, ...]`.

    `is_exact`: the rows are copies of the values that were packed, and may be read beside steps.
    """

    rows: Callable[[int, int], Tensor]
    is_exact: bool


@dataclasses.dataclass
class _Waiting:
    """An action to run once all parameters in `missing` are filled."""

    missing: set[str]
    action: Callable[[], None]


class ParamSlots:
    """Destination tensors by checkpoint name. Several names may be row ranges of one stacked tensor.

    On CPU a tensor takes memory from when it is filled (`when_given`) until it is repacked (`release_weights`).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, on_host: Collection[str] = ()) -> None:
        """`on_host`: parameters that are filled in host memory, because they are repacked for `device` later."""
        self._dtype = dtype
        self._device = device
        self._on_host = on_host
        self._params: dict[str, Param] = {}
        self._slots: dict[str, Tensor] = {}
        self._divided: dict[str, tuple[tuple[int, ...], Sequence[ParamPiece]]] = {}
        self._renamed: tuple[tuple[str, str], ...] = ()
        self._ignored: set[str] = set()
        self._ignored_prefixes: tuple[str, ...] = ()
        self._filled: set[str] = set()
        self._waiting: list[_Waiting] = []
        self._samples: WeightSamples = {}
        self._repacked_bytes = 0
        self._quantized: dict[str, QuantizedWeight | None] = {}
        """Parameters that are kept as the checkpoint has them, too; None: not filled yet."""
        self._repacked: dict[str, tuple[RowReader, int]] = {}
        """By repacked parameter: how to read the tensor that it is in, and the number of its first row there."""

    @property
    def device(self) -> torch.device:
        """Device of all parameters."""
        return self._device

    def new(self, name: str, *shape: int) -> Tensor:
        """Allocate the parameter `name`, which this rank holds whole."""
        return self.stacked(Param(name, shape))

    def stacked(self, *params: Param, num_rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate one tensor whose row ranges are the held parts of `params`, in order.

        With `num_rows` it has that many rows, and the rows after the last parameter are zero. `dtype` None stands for
        the model's. Raises ModelError when memory runs out.
        """
        shapes = [param.held_shape for param in params]
        used = sum(shape[0] for shape in shapes)
        rows = used if num_rows is None else num_rows
        shape_of_all = (rows, *shapes[0][1:])
        try:
            device = torch.device("cpu") if params[0].name in self._on_host else self._device
            whole = torch.empty(shape_of_all, dtype=dtype or self._dtype, device=device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"out of memory for {params[0].name}, {list(shape_of_all)}: {reason}") from error
        whole[used:].zero_()
        first = 0
        for param, shape in zip(params, shapes, strict=True):
            self._params[param.name] = param
            self._slots[param.name] = whole[first : first + shape[0]]
            first += shape[0]
        return whole

    def adopt(self, name: str, tensor: Tensor, num_samples: int = _NUM_SAMPLES) -> None:
        """Take over a parameter that is filled already, and that this rank holds whole. `num_samples`: see `Param`."""
        self._params[name] = Param(name, tuple(tensor.shape), num_samples=num_samples)
        self._slots[name] = tensor
        self._filled.add(name)

    def ignore(self, name: str) -> None:
        """Accept `name` in a checkpoint without using it."""
        self._ignored.add(name)

    def ignore_under(self, prefixes: Iterable[str]) -> None:
        """Accept and skip names that begin with one of `prefixes`; other ranks check them."""
        self._ignored_prefixes += tuple(prefixes)

    def divide(self, name: str, shape: tuple[int, ...], pieces: Sequence[ParamPiece]) -> None:
        """Accept a checkpoint tensor `name` of `shape` that has the parameters `pieces`.

        A checkpoint has a parameter as a tensor of its own, or in one tensor that is divided.
        """
        self._divided[name] = shape, pieces

    def rename_under(self, renamed: Iterable[tuple[str, str]]) -> None:
        """Accept names that begin with the first text of a pair as names that begin with the second."""
        self._renamed += tuple(renamed)

    def fill(self, name: str, source: TensorSource) -> None:
        """Copy the held part of parameter `name`, converting its dtype. Raises ModelError when it does not fit."""
        name = self._rename(name)
        if name in self._divided:
            shape, pieces = self._divided[name]
            if source.shape != shape:
                raise ModelError(f"tensor {name} is {list(source.shape)}, expected {list(shape)}")
            for piece in pieces:
                if isinstance(source, QuantizedSource):
                    self.fill(piece.name, QuantizedPieceSource(source, piece))
                else:
                    self.fill(piece.name, PieceSource(source, piece))
            return
        slot = self._slots.get(name)
        if slot is None:
            if self._is_ignored(name):
                return
            if name in self._filled:
                raise ModelError(f"the checkpoint has the tensor {name} twice")
            raise ModelError(f"the checkpoint has a tensor {name} that this architecture does not use")
        param = self._params[name]
        if source.shape != param.shape:
            raise ModelError(f"tensor {name} is {list(source.shape)}, expected {list(param.shape)}")
        if name in self._quantized and isinstance(source, QuantizedSource):
            self._quantized[name] = quantized = param.ordered_rows(source.read_quantized(param.part))
            if source.is_exact:
                quantized.dequantize_into(slot)
            else:
                slot.copy_(param.ordered(source.read(param.part)))
        elif slot.numel():
            value = source.read(param.part)
            if slot.is_floating_point() and not (value.is_floating_point() and value.itemsize > 1):
                kind = str(value.dtype).removeprefix("torch.")
                raise ModelError(f"tensor {name} is {kind}, and no tensors beside it say how it was quantized")
            slot.copy_(param.ordered(value))
        self._given(name)

    def carry_over(self, other: ParamSlots, given: Collection[str]) -> None:
        """Fill all parameters but `given` with the values that `other`, of an equal model, has of them.

        Raises:
            ModelError: `other` has one of them in fewer bits, or in a form that cannot be read back.
        """
        for name in [name for name in self._slots if name not in given and name not in self._filled]:
            slot = self._slots[name]
            reader = other.reader(name)
            if reader is not None and not reader.is_exact:
                raise ModelError(
                    f"{name} is kept in fewer bits than {slot.dtype}, so tensors of all parameters must be sent"
                )
            slot.copy_(other.stored_rows(name, len(slot)))
            self._given(name)

    def reader(self, name: str) -> RowReader | None:
        """Return the reader of a parameter that was repacked; None: it was not, or cannot be read back."""
        return self._repacked[name][0] if name in self._repacked else None

    def stored_rows(self, name: str, count: int) -> Tensor:
        """Return the first `count` rows of a parameter that this rank holds, in the order in which they are stored.

        Raises:
            ModelError: it is in a form that cannot be read back.
        """
        slot = self._slots.get(name)
        if slot is not None:
            return slot[:count]
        if name not in self._repacked:
            raise ModelError(f"{name} is kept in a packed form that cannot be read back")
        reader, first = self._repacked[name]
        return reader.rows(first, first + count)

    def params_in(self, whole: Tensor) -> list[Param]:
        """Return the parameters in `whole`, from `stacked`, in order."""
        return [self._params[name] for name in self._names_in(whole)]

    def formats_in(self, whole: Tensor, formats: Mapping[str, GroupFormat]) -> list[GroupFormat] | None:
        """Return the format of each parameter in `whole`, from `stacked`; `formats` are the checkpoint's.

        None: some parameter cannot be kept in its format. This rank's inputs may cut a group.
        """
        found = []
        for param in self.params_in(whole):
            form = formats.get(param.name)
            if form is not None and param.held is not None and param.dim == 1:
                form = within(form, param.held)
            if form is None:
                return None
            found.append(form)
        return found

    @property
    def of_some_inputs(self) -> list[Param]:
        """The parameters whose input dimension is split over the ranks."""
        return [param for param in self._params.values() if param.part is not None and param.dim == 1]

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters that this rank holds."""
        return self._params.keys()

    def names_of(self, name: str) -> list[str]:
        """Return the parameters that the checkpoint's tensor `name` has; see `rename_under` and `divide`."""
        name = self._rename(name)
        return [piece.name for piece in self._divided[name][1]] if name in self._divided else [name]

    def keep_quantized(self, whole: Tensor) -> None:
        """Keep the parameters in `whole`, from `stacked`, as `QuantizedSource` has them beside their values."""
        self._quantized |= dict.fromkeys(self._names_in(whole))

    def take_quantized(self, whole: Tensor) -> list[QuantizedWeight]:
        """Return, in order, what `keep_quantized` kept, and keep it no longer. The parameters are filled.

        Raises:
            ModelError: the checkpoint has one of them in another form than its headers said.
        """
        names = self._names_in(whole)
        found = [self._quantized.pop(name) for name in names]
        kept = [weight for weight in found if weight is not None]
        if len(kept) < len(found):
            raise ModelError(f"the checkpoint has {names[found.index(None)]} twice, once without quantization")
        return kept

    def when_given(self, wholes: Iterable[Tensor], action: Callable[[], None]) -> None:
        """Run `action` once all parameters in `wholes`, from `stacked`, are filled; at once if they already are."""
        names = {name for whole in wholes for name in self._names_in(whole)}
        assert names, "the tensors hold parameters"
        waiting = _Waiting(names - self._filled, action)
        if waiting.missing:
            self._waiting.append(waiting)
        else:
            action()

    def check_filled(self, where: str) -> None:
        """Raise ModelError when a parameter is not filled."""
        missing = sorted(self._slots.keys() - self._filled)
        if missing:
            first = missing[0]
            wholes = [name for name, (_, pieces) in self._divided.items() if any(p.name == first for p in pieces)]
            also = f", which may be a part of {wholes[0]}" if wholes else ""
            raise ModelError(f"{where}: {len(missing)} tensors are missing, the first is {first}{also}")

    def fill_random(self, seed: int) -> None:
        """Fill with seeded random values: norms are 1, all others normal with standard deviation 0.02.

        Values depend on the seed and the name, not on the order of tensors. The whole tensor is generated, so that
        each rank holds a part of the same model as an unsplit server.
        """
        generator = torch.Generator(self._device)
        for name in list(self._slots):
            slot = self._slots[name]
            if name.endswith("norm.weight"):
                slot.fill_(1.0)
            elif slot.numel():
                param = self._params[name]
                salt = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
                generator.manual_seed(int.from_bytes(salt, "little"))
                whole = torch.empty(param.shape, dtype=self._dtype, device=self._device)
                whole.normal_(0.0, 0.02, generator=generator)
                slot.copy_(whole if param.part is None else whole[param.part])
            self._given(name)

    def samples(self) -> WeightSamples:
        """Return sample values of every parameter. All ranks' samples together identify the weights in any split."""
        held = {name: _samples(self._params[name], slot) for name, slot in self._slots.items()}
        return {name: self._samples[name] if name in self._samples else held[name] for name in self._params}

    def release_weights(self, whole: Tensor, num_bytes: int, read: RowReader | None = None) -> None:
        """Drop the parameters in `whole`, from `stacked`, which were repacked into `num_bytes` elsewhere.

        Their samples are kept. `read` returns rows of `whole`; None: they cannot be read back.
        """
        for name in self._names_in(whole):
            slot = self._slots.pop(name)
            self._samples[name] = _samples(self._params[name], slot)
            if read is not None:
                self._repacked[name] = read, slot.storage_offset() // slot.stride(0)
        self._repacked_bytes += num_bytes

    def memory(self) -> list[MemoryRange]:
        """Return the memory of the parameters that are not repacked. A range may occur more than once."""
        storages = (slot.untyped_storage() for slot in self._slots.values())
        return [MemoryRange(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]

    def read(self, name: str, max_rows: int) -> list[NamedRows]:
        """Return what this rank holds of the first `max_rows` rows of the checkpoint's tensor `name`, in float32.

        Empty: another rank has it, or this model does not use it. Weights in fewer bits are dequantized.

        Raises:
            ModelError: this architecture has no such tensor, it is too large, or its form cannot be read back.
        """
        name = self._rename(name)
        if name not in self._divided:
            param = self._param(name)
            if param is None:
                return []
            check_size(name, param.shape, max_rows)
            first_row, values = self._held_rows(param, max_rows)
            return [named_rows(param.shape, first_row, self._first_column(param), values)]
        shape, pieces = self._divided[name]
        check_size(name, shape, max_rows)
        found = []
        for piece in pieces:
            param = self._param(piece.name)
            if param is not None and (piece.index is None or piece.index < max_rows):
                first_row, values = self._held_rows(param, piece.shape[0])
                found.append(named_rows(shape, first_row, self._first_column(param), values, piece))
        return found

    def _param(self, name: str) -> Param | None:
        """Return the parameter `name`; None: other ranks have it, or none. Raises ModelError for an unknown one."""
        param = self._params.get(name)
        if param is None and not self._is_ignored(name):
            raise ModelError(f"this model has no tensor {name}")
        return param

    @staticmethod
    def _first_column(param: Param) -> int:
        return param.held.start if param.held is not None and param.dim == 1 else 0

    def _held_rows(self, param: Param, max_rows: int) -> tuple[int, Tensor]:
        """Return the held ones of the first `max_rows` rows of a parameter, and the number of the first of them."""
        held = range(param.shape[0]) if param.held is None or param.dim == 1 else param.held
        count = max(0, min(len(held), max_rows - held.start))
        block = 1 if param.order is None else len(param.order)
        num_stored = -(-count // block) * block
        stored = self.stored_rows(param.name, num_stored) if count else torch.empty(0)
        return held.start, param.unordered(stored)[:count]

    def add_bytes(self, num_bytes: int) -> None:
        """Count `num_bytes` for a second copy of parameters in another format."""
        self._repacked_bytes += num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all held parameters, in any format."""
        return self._repacked_bytes + sum(slot.numel() * slot.element_size() for slot in self._slots.values())

    def _names_in(self, whole: Tensor) -> list[str]:
        """Names of the parameters that are stored in `whole`."""
        memory = whole.untyped_storage().data_ptr()
        return [name for name, slot in self._slots.items() if slot.untyped_storage().data_ptr() == memory]

    def _rename(self, name: str) -> str:
        for old, new in self._renamed:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return name

    def _given(self, name: str) -> None:
        """Mark a parameter as filled and run the actions that waited for it."""
        self._filled.add(name)
        for waiting in [waiting for waiting in self._waiting if name in waiting.missing]:
            waiting.missing.remove(name)
            if not waiting.missing:
                self._waiting.remove(waiting)
                waiting.action()

    def _is_ignored(self, name: str) -> bool:
        unused = name in self._ignored or name.endswith("rotary_emb.inv_freq")
        return unused or name.startswith(self._ignored_prefixes)


def fingerprint_of(samples: Iterable[WeightSamples]) -> str:
    """Hash all ranks' samples: equal for two servers that loaded the same weights, in any split.

    Raises:
        ModelError: two ranks hold different values for the same position, so their weights differ.
    """
    merged: dict[str, dict[int, bytes]] = {}
    for of_rank in samples:
        for name, values in of_rank.items():
            known = merged.setdefault(name, {})
            for position, value in values.items():
                packed = struct.pack("<f", value)
                if known.setdefault(position, packed) != packed:
                    raise ModelError(f"the ranks of this server have loaded different values of {name}")
    digest = hashlib.blake2b(digest_size=8)
    for name, packed_values in sorted(merged.items()):
        digest.update(name.encode())
        for position, packed in sorted(packed_values.items()):
            digest.update(struct.pack("<q", position) + packed)
    return digest.hexdigest()


def _samples(param: Param, slot: Tensor) -> dict[int, float]:
    """Return the held sample values of one tensor, by flat position in the whole tensor."""
    size = int(np.prod(param.shape))
    positions = np.unique(np.arange(param.num_samples, dtype=np.int64) * _STRIDE % size)
    index = np.stack(np.unravel_index(positions, param.shape))
    if param.held is not None:
        along = index[param.dim] - param.held.start
        inside = (along >= 0) & (along < len(param.held))
        index[param.dim] = along
        index, positions = index[:, inside], positions[inside]
    values = slot[tuple(torch.from_numpy(line).to(slot.device) for line in index)]
    return dict(zip(positions.tolist(), values.float().tolist(), strict=True))
