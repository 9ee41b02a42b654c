"""Linear layers of a `Decoder` with LoRA adapters. A step's tokens are grouped by adapter, in torch.

`attach_lora` replaces the layers of a loaded model. A step without adapters computes what the model computes without
this module. With adapters, each linear layer adds one product pair for each adapter of the step and each of its
checkpoint's layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.decoder import Attention, Decoder
from pdserve.model.forward_batch import HostRows, to_device
from pdserve.model.layer_spec import Activation
from pdserve.model.layers.dense import DenseMLP, Linear
from pdserve.model.layers.kernels import Kernels
from pdserve.model.lora import LoraAdapter, LoraTarget

Group = tuple[LoraAdapter, Tensor | None]
"""An adapter, and the flat indices of its tokens, int64; None: all tokens of the step are its own."""


class LoraStep:
    """The adapters of the step under way. The layers of one model share it; `begin` is called before each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.groups: Sequence[Group] = ()

    def begin(self, rows: HostRows) -> None:
        """Group the tokens of a step by adapter."""
        self.groups = () if rows.adapters is None else self._grouped(rows, rows.adapters)

    def _grouped(self, rows: HostRows, adapters: Sequence[LoraAdapter | None]) -> list[Group]:
        lengths = rows.ends - rows.starts
        found: dict[LoraAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                found.setdefault(adapter, []).append(row)
        if len(found) == 1 and None not in adapters:
            return [(adapter, None) for adapter in found]
        tokens = np.arange(int(lengths.sum()))
        pieces = np.split(tokens, rows.offsets[1:])
        return [
            (adapter, to_device(np.concatenate([pieces[row] for row in own]), self._device))
            for adapter, own in found.items()
        ]

    def add(self, out: Tensor, x: Tensor, parts: Sequence[tuple[str, range]]) -> Tensor:
        """Add to `out` `[N, out]` what the step's adapters make of `x` `[N, in]`; returns `out`.

        `parts`: names of the checkpoint's layers, and their columns of `out`.
        """
        for adapter, tokens in self.groups:
            mine: Tensor | None = None
            for name, columns in parts:
                if name not in adapter.weights:
                    continue
                a, b = adapter.weights[name]
                if mine is None:
                    mine = x if tokens is None else x.index_select(0, tokens)
                change, into = F.linear(F.linear(mine, a), b), out[:, columns.start : columns.stop]
                if tokens is None:
                    into += change
                else:
                    into.index_add_(0, tokens, change)
        return out


class LoraLinear(Linear):
    """A linear layer with adapters. `parts`: see `LoraStep.add`."""

    def __init__(self, base: Linear, kernels: Kernels, step: LoraStep, parts: Sequence[tuple[str, range]]) -> None:
        super().__init__(kernels, base.weight, base.bias)
        self._step, self._parts = step, parts

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = super().__call__(x)
        return self._step.add(out, x, self._parts) if self._step.groups else out


class LoraMLP:
    """This rank's columns of a dense layer with adapters; see `DenseMLP.product`."""

    def __init__(
        self, gate_up: LoraLinear, down: LoraLinear, act: Activation, kernels: Kernels, step: LoraStep
    ) -> None:
        self._gate_up, self._down, self._act, self._kernels, self._step = gate_up, down, act, kernels, step

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to a partial sum of `[N, hidden]`."""
        if not self._step.groups:
            return self._down(self._kernels.gated(x, self._gate_up.weight, self._gate_up.bias, self._act))
        gate, up = self._gate_up(x).chunk(2, -1)
        opened = F.silu(gate) if self._act == "silu" else F.gelu(gate, approximate="tanh")
        return self._down(opened * up)


def attach_lora(decoder: Decoder, targets: dict[str, LoraTarget], first: int) -> LoraStep:
    """Give the layers of `decoder`, which are loaded, adapters. Returns the step that they share.

    `targets`: `lora_targets` of its rank. `first`: number of its first layer.
    """
    step, names_of, kernels = LoraStep(decoder.params.device), decoder.spec.names, decoder.kernels

    def linear(base: Linear, *names: str) -> LoraLinear:
        parts, at = [], 0
        for name in names:
            width = len(targets[name].rows)
            parts.append((name, range(at, at + width)))
            at += width
        assert at == len(base.weight), names
        return LoraLinear(base, kernels, step, parts)

    for index, layer in enumerate(decoder.layers, first):
        names = names_of.layer.under(names_of.layers.format(layer=index))
        for op in layer.operations:
            if isinstance(op, Attention):
                op.qkv, op.out = linear(op.qkv, names.q, names.k, names.v), linear(op.out, names.o)
            elif isinstance(op, DenseMLP):
                gate_up, down = linear(op.gate_up, names.gate, names.up), linear(op.down, names.down)
                op.product = LoraMLP(gate_up, down, op.act, kernels, step)
    return step
