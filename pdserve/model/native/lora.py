"""LoRA adapters for the CPU kernels: which packed layers have them, and the packing of an adapter's weights.

`NativeDecoder.take_adapters` makes `LoraSites`. The program marks the operations of these layers, and a step has the
address of each row's adapter. `csrc/lora.h` computes the changes.

A layer that stacks several layers of the checkpoint, as q, k and v, has one A that stacks theirs, and a B in which each
has columns of its own. The ranks of an adapter are padded to a multiple of 32 for each packed layer.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdserve.base.native import PdkAdapter, PdkLora
from pdserve.model.decoder import Decoder
from pdserve.model.lora import LoraAdapter, LoraTarget, PackedLora
from pdserve.model.native.packer import PackedAttention, PackedMLP, PackedOperation
from pdserve.model.native.weights import BLOCK, Arena, Packed, open_packed


@dataclasses.dataclass(frozen=True)
class LoraSite:
    """A packed layer that adapters may change.

    `parts`: the checkpoint's layers that it stacks, and their rows. `order`: see `Packer.linear`.
    """

    layer: Packed
    parts: tuple[tuple[str, range], ...]
    order: Tensor | None = None


class LoraSites:
    """The packed layers of a decoder that adapters may change: projections of attention and of dense MLPs.

    `layers`: the packed operations of each layer of `model`. `targets`: `lora_targets` of its rank. `first`: number of
    its first layer.
    """

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[Sequence[PackedOperation]],
        targets: Mapping[str, LoraTarget],
        first: int,
    ) -> None:
        self._targets = targets
        self._sites: list[LoraSite] = []
        names_of = model.spec.names
        for index, operations in enumerate(layers, first):
            names = names_of.layer.under(names_of.layers.format(layer=index))
            for packed in operations:
                if isinstance(packed, PackedAttention):
                    self._add(packed.qkv, names.q, names.k, names.v, order=packed.order)
                    self._add(packed.out, names.o)
                elif isinstance(packed, PackedMLP):
                    self._add(packed.gate_up, names.gate, names.up)
                    self._add(packed.down, names.down)

    @property
    def numbers(self) -> Mapping[int, int]:
        """See `Program.adapted`."""
        return {id(site.layer): number for number, site in enumerate(self._sites)}

    def pack(self, adapter: LoraAdapter) -> LoraAdapter:
        """See `pack_adapter`."""
        return pack_adapter(self._sites, adapter)

    def _add(self, layer: Packed, *names: str, order: Tensor | None = None) -> None:
        parts, at = [], 0
        for name in names:
            width = len(self._targets[name].rows)
            parts.append((name, range(at, at + width)))
            at += width
        assert at == layer.num_out, names
        self._sites.append(LoraSite(layer, tuple(parts), order))


def pack_adapter(sites: Sequence[LoraSite], adapter: LoraAdapter) -> LoraAdapter:
    """Return the adapter with packed weights in place of its own, for `sites` by their number. Raises MemoryError."""
    arena = Arena()
    layers = (PdkLora * len(sites))()
    kept: list[object] = [layers]
    most_low = 0
    for number, site in enumerate(sites):
        packed = _packed(arena, site, adapter)
        if packed is None:
            continue
        a, b = packed
        low = a.data.shape[1] * BLOCK
        layers[number] = PdkLora(a.data.data_ptr(), b.data.data_ptr(), a.data.shape[2] * 2, low)
        most_low = max(most_low, low)
        kept += packed
    whole = PdkAdapter(ctypes.addressof(layers), most_low)
    return dataclasses.replace(adapter, weights={}, packed=PackedLora(ctypes.addressof(whole), (whole, *kept)))


def _packed(arena: Arena, site: LoraSite, adapter: LoraAdapter) -> tuple[Packed, Packed] | None:
    """Pack A and B of one layer; None: the adapter does not change it."""
    parts = [(adapter.weights[name], rows) for name, rows in site.parts if name in adapter.weights]
    if not parts:
        return None
    layer = site.layer
    down = torch.cat([a for (a, _), _ in parts])
    up = torch.zeros(layer.num_out, len(down), dtype=down.dtype)
    at = 0
    for (_, b), rows in parts:
        up[rows.start : rows.stop, at : at + b.shape[1]] = b
        at += b.shape[1]
    packed_a = open_packed(arena, "bf16", *down.shape)
    packed_b = open_packed(arena, "bf16", *up.shape, num_parts=layer.num_parts)
    assert packed_b.data.shape[1] == layer.data.shape[1] and packed_a.num_in == layer.num_in, "of the same shape"
    packed_a.put(down)
    packed_b.put(up if site.order is None else up[site.order])
    return packed_a, packed_b
