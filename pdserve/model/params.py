"""Where each tensor of a checkpoint goes. A family declares its parameters, the loader fills them in place."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pdserve.errors import ModelError


class ParamSlots:
    """Destination tensors by checkpoint name; several names may be slices of one stacked tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._slots: dict[str, Tensor] = {}
        self._ignored: set[str] = set()
        self._filled: set[str] = set()

    def new(self, name: str, *shape: int) -> Tensor:
        """Allocate the parameter `name`."""
        self._slots[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._slots[name]

    def stacked(self, parts: tuple[tuple[str, int], ...], *inner: int) -> Tensor:
        """Allocate one tensor `[sum of rows, *inner]` whose row ranges are the parameters `(name, rows)` in `parts`."""
        whole = torch.empty((sum(rows for _, rows in parts), *inner), dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts:
            self._slots[name] = whole[first : first + rows]
            first += rows
        return whole

    def ignore(self, name: str) -> None:
        """Accept `name` in a checkpoint without using it."""
        self._ignored.add(name)

    def fill(self, name: str, value: Tensor) -> None:
        """Copy `value` into the parameter `name`, converting its dtype. Raises ModelError when it does not fit."""
        if name in self._ignored or name.endswith("rotary_emb.inv_freq"):
            return
        slot = self._slots.get(name)
        if slot is None:
            raise ModelError(f"the checkpoint has a tensor {name} that this architecture does not use")
        if slot.shape != value.shape:
            raise ModelError(f"tensor {name} is {list(value.shape)}, expected {list(slot.shape)}")
        slot.copy_(value)
        self._filled.add(name)

    def check_filled(self, where: str) -> None:
        """Raise ModelError when a parameter has not been given."""
        missing = sorted(self._slots.keys() - self._filled)
        if missing:
            raise ModelError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")

    def fill_random(self, seed: int) -> None:
        """Seeded random values: norms are 1, all else normal with deviation 0.02, whatever the order of tensors."""
        generator = torch.Generator(self._device)
        for name, slot in self._slots.items():
            if name.endswith("norm.weight"):
                slot.fill_(1.0)
            else:
                salt = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
                generator.manual_seed(int.from_bytes(salt, "little"))
                slot.normal_(0.0, 0.02, generator=generator)
            self._filled.add(name)

    def fingerprint(self) -> str:
        """Short hash of a sample of every parameter's values: equal for two servers that loaded the same weights."""
        digest = hashlib.blake2b(digest_size=8)
        for name, slot in sorted(self._slots.items()):
            flat = slot.reshape(-1) if slot.is_contiguous() else slot.flatten()
            step = max(1, flat.numel() // 16)
            digest.update(name.encode())
            digest.update(flat[::step].float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(slot.numel() * slot.element_size() for slot in self._slots.values())
