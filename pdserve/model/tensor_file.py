"""Tensors of a safetensors file that another process may change or cut meanwhile: read by calls, never mapped.

A mapped file that its owner cuts would end this process. Here a short read is a ModelError. Used for the tensors of
`/update_weights_from_tensor`; checkpoints are read by `loader`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pdserve.errors import ModelError

MAX_HEADER_BYTES = 16 << 20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXTRA = "__metadata__"


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """Implements `TensorSource` for a tensor in an open file, `num_bytes` from `start` on.

    `file`: what errors call the file.
    """

    name: str
    file: str
    descriptor: _Descriptor
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        """See `TensorSource`. Reads only the rows of `part`. Raises ModelError when the file is shorter by now."""
        rows = slice(0, self.shape[0]) if part is None or not self.shape else part[0]
        row_bytes = self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes
        shape = (rows.stop - rows.start, *self.shape[1:]) if self.shape else ()
        data = bytearray(math.prod(shape) * self.dtype.itemsize)
        view, at = memoryview(data), self.start + (rows.start * row_bytes if self.shape else 0)
        while view:
            try:
                count = os.preadv(self.descriptor.number, [view], at)
            except OSError as error:
                raise ModelError(f"{self.file} cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelError(f"{self.file} is cut short within the tensor {self.name}")
            view, at = view[count:], at + count
        if not data:
            return torch.empty(shape, dtype=self.dtype)
        values = torch.frombuffer(data, dtype=self.dtype).view(shape)
        return values if part is None else values[(slice(None), *part[1:])]


class _Descriptor:
    """A file descriptor, which closes with the last tensor of the file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def tensors_in(path: str, file: str) -> Mapping[str, FileTensor]:
    """Return the tensors of a safetensors file of this process's user, by name. `file`: what errors call it.

    Raises:
        ModelError: the file is missing, another user's, no regular file, or damaged; a tensor is not of floats.
    """
    try:
        descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        facts = os.fstat(descriptor.number)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ModelError(f"{file} is not a regular file of this server's user")
        length = _header_bytes(file, descriptor.number, facts.st_size)
        header = json.loads(os.pread(descriptor.number, length, 8))
        assert isinstance(header, dict)
        found = {
            name: _tensor(file, name, fields, descriptor, 8 + length, facts.st_size)
            for name, fields in header.items()
            if name != _EXTRA
        }
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {type(error).__name__}: {error}") from error
    if not found:
        raise ModelError(f"{file} has no tensors")
    return found


def _header_bytes(file: str, descriptor: int, size: int) -> int:
    """Return the length of the JSON header."""
    start = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ModelError(f"{file} is not a safetensors file, or is cut short: its header would not fit")
    return int(length)


def _tensor(file: str, name: str, fields: Any, descriptor: _Descriptor, start: int, size: int) -> FileTensor:
    """Check one entry of the header."""
    kind = fields["dtype"]
    if kind not in _DTYPES:
        raise ModelError(f"{file}: the tensor {name} is {kind}; supported: {', '.join(_DTYPES)}")
    shape = tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(isinstance(each, int) and each >= 0 for each in (*shape, begin, end)):
        raise ModelError(f"{file}: shape and offsets of the tensor {name} must be counts")
    if end - begin != math.prod(shape) * _DTYPES[kind].itemsize or start + end > size:
        raise ModelError(f"{file}: the tensor {name} has other bytes than its shape, or is cut short")
    return FileTensor(name, file, descriptor, start + begin, end - begin, _DTYPES[kind], shape)
