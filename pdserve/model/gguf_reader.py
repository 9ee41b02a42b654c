"""Reads the header of a GGUF file: its fields and where its tensors lie. Called by `gguf_file` and `hf_export`.

The reader of the `gguf` package makes several objects for each token of the vocabulary, which takes seconds. This one
only skips the lists, and decodes one when it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_FORMS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""numpy's dtype of a field's value, by type."""
_VALUES = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""numpy's dtype of the tensor types that are not blocks."""
_LENGTH_BYTES = 8
_MAX_KEY_BYTES = 1 << 16
_MAX_DIMENSIONS = 4
_SHORT = 4096
"""Numbers of an array that is decoded at once; all arrays with one value for each layer are shorter."""
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GgufArray:
    """An array field that is not decoded: its first byte in the file, its number of elements, and their type."""

    offset: int
    length: int
    kind: int


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file. `shape` has the slowest dimension first, as in torch. `offset` is its first byte."""

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    mapped: mmap.mmap = dataclasses.field(repr=False, compare=False)

    @property
    def data(self) -> npt.NDArray[Any]:
        """The values, or uint8 `[..., bytes of a row]` for types of blocks. The array is read-only."""
        from gguf.quants import quant_shape_to_byte_shape

        form = _VALUES.get(self.tensor_type.name)
        shape = quant_shape_to_byte_shape(self.shape, self.tensor_type) if form is None else self.shape
        dtype = np.dtype(form or "<u1")
        count = self.n_bytes // dtype.itemsize
        return np.frombuffer(self.mapped, dtype, count, self.offset).reshape(shape)


class GgufReader:
    """An open GGUF file.

    `fields` has the values of all fields: numbers, texts and short lists of numbers; a `GgufArray` for texts and long
    lists. `tensors` are in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Raises:
            OSError: the file cannot be opened.
            ValueError: it is not a GGUF file of version 2 or 3, or its header is damaged.
        """
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.fields: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"its header is damaged: {error}") from error

    def array(self, name: str) -> list[Any]:
        """Return the list in the field `name`, decoded; an empty list when the file lacks it.

        Raises:
            ValueError: the field is no list, or a text in it is not UTF-8.
        """
        value = self.fields.get(name, [])
        if isinstance(value, GgufArray):
            return self._texts(value) if value.kind == _STRING else self._numbers(value)
        if not isinstance(value, list):
            raise ValueError(f"its field {name} is no list")
        return value

    def release_pages(self) -> None:
        """Drop the file's pages from this process's resident memory; they are read again when they are used."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        if self._mapped[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._mapped, len(_MAGIC))
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported; supported: {', '.join(map(str, _VERSIONS))}")
        at = len(_MAGIC) + struct.calcsize("<IQQ")
        for _ in range(num_fields):
            name, at = self._text(at, most=_MAX_KEY_BYTES)
            (kind,) = struct.unpack_from("<I", self._mapped, at)
            if name in self.fields:
                raise ValueError(f"it has the field {name} twice")
            self.fields[name], at = self._value(at + 4, kind)
        infos = []
        for _ in range(num_tensors):
            name, at = self._text(at, most=_MAX_KEY_BYTES)
            (num_dims,) = struct.unpack_from("<I", self._mapped, at)
            if not 1 <= num_dims <= _MAX_DIMENSIONS:
                raise ValueError(f"its tensor {name} has {num_dims} dimensions")
            *sizes, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._mapped, at + 4)
            infos.append((name, tuple(reversed(sizes)), kind, offset))
            at += 4 + struct.calcsize(f"<{num_dims}QIQ")
        align = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise ValueError(f"general.alignment is {align}, expected a power of two")
        start = -(-at // align) * align
        self.tensors = [self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos]
        if len({tensor.name for tensor in self.tensors}) < len(infos):
            raise ValueError("it has two tensors of one name")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor_type = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if shape[-1] % block:
            raise ValueError(f"its tensor {name} has rows of {shape[-1]} values, and blocks of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._mapped):
            raise ValueError(f"it is cut short: the tensor {name} ends at byte {offset + num_bytes}")
        return GgufTensor(name, tensor_type, shape, offset, num_bytes, self._mapped)

    def _value(self, at: int, kind: int) -> tuple[Any, int]:
        """Return the value of type `kind` at byte `at`, and where it ends."""
        if kind == _STRING:
            return self._text(at)
        if kind != _ARRAY:
            values = self._numbers(GgufArray(at, 1, kind))
            return values[0], at + self._form(kind).itemsize
        of_elements, length = struct.unpack_from("<IQ", self._mapped, at)
        array = GgufArray(at + struct.calcsize("<IQ"), length, of_elements)
        end = self._end(array)
        return (self._numbers(array) if of_elements != _STRING and length <= _SHORT else array), end

    def _end(self, array: GgufArray) -> int:
        """Return where an array ends."""
        size, left = len(self._mapped), len(self._mapped) - array.offset
        least = _LENGTH_BYTES if array.kind == _STRING else self._form(array.kind).itemsize
        if array.length * least > left:
            raise ValueError(f"it is cut short: a list of {array.length} elements does not fit")
        if array.kind != _STRING:
            return array.offset + array.length * least
        at, read, mapped = array.offset, struct.Struct("<Q").unpack_from, self._mapped
        for _ in range(array.length):
            at += _LENGTH_BYTES + read(mapped, at)[0]
            if at > size:
                raise ValueError("it is cut short: a list of texts does not fit")
        return at

    def _numbers(self, array: GgufArray) -> list[Any]:
        form = self._form(array.kind)
        if array.offset + array.length * form.itemsize > len(self._mapped):
            raise ValueError("it is cut short: a number does not fit")
        values = np.frombuffer(self._mapped, form, array.length, array.offset)
        found: list[Any] = (values != 0 if array.kind == _BOOL else values).tolist()
        return found

    def _texts(self, array: GgufArray) -> list[str]:
        at, found, read, mapped = array.offset, [], struct.Struct("<Q").unpack_from, self._mapped
        for _ in range(array.length):
            end = at + _LENGTH_BYTES + read(mapped, at)[0]
            found.append(str(mapped[at + _LENGTH_BYTES : end], "utf-8"))
            at = end
        return found

    def _text(self, at: int, *, most: int | None = None) -> tuple[str, int]:
        """Return the text at byte `at`, and where it ends."""
        (length,) = struct.unpack_from("<Q", self._mapped, at)
        end = at + _LENGTH_BYTES + length
        if end > len(self._mapped) or (most is not None and length > most):
            raise ValueError(f"a text of {length} bytes does not fit")
        return str(self._mapped[at + _LENGTH_BYTES : end], "utf-8"), end

    @staticmethod
    def _form(kind: int) -> np.dtype[Any]:
        if kind not in _FORMS:
            raise ValueError(f"a field has the unknown type {kind}")
        return np.dtype(_FORMS[kind])
