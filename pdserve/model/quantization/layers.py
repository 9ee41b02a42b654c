"""The tensors of a quantized checkpoint as those of the model: one `TensorSource` for the weight of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pdserve.errors import ModelError
from pdserve.model.quantization.config import Quantization
from pdserve.model.quantization.schemes import QuantMethod
from pdserve.model.quantization.weight_sources import weight_source
from pdserve.model.tensor_sources import TensorSource

_OF_KV = (".k_scale", ".v_scale", ".q_scale", ".output_scale", ".kv_scale", ".prob_scale")
"""Endings of scales of an 8-bit KV cache, which the KV cache here does not use."""


class QuantizedLayers:
    """The quantized layers of a checkpoint, found by the names of its tensors.

    Raises:
        ModelError: a layer has no method, or lacks a tensor.
    """

    def __init__(self, names: Iterable[str], quantization: Quantization) -> None:
        present = set(names)
        self._by_main: dict[str, tuple[str, QuantMethod, tuple[str, ...]]] = {}
        """Layer, method, and endings of the tensors that it has, by the name of the tensor with the values."""
        self._others: set[str] = {name for name in present if name.endswith(_OF_KV)}
        endings = {end for _, method in quantization.methods for end in method.scales}
        for name in sorted(present):
            layer = next((name.removesuffix(end) for end in endings if name.endswith(end)), None)
            if layer is None:
                continue
            method = quantization.method_of(layer)
            if method is None:
                reason = "is not to be quantized" if quantization.ignores(layer) else "is in none of its groups"
                raise ModelError(f"the checkpoint has {name}, but by its quantization_config {layer} {reason}")
            main = layer + method.main
            if main not in present:
                raise ModelError(f"the checkpoint has {name} but no tensor {main}")
            ends = tuple(end for end in (method.main, *method.scales, *method.others) if layer + end in present)
            self._by_main[main] = layer, method, ends
            self._others.update(layer + end for end in ends if end != method.main)

    @property
    def mains(self) -> Iterable[str]:
        """Names of the tensors with the values, one for each layer."""
        return self._by_main

    def weight(self, main: str, find: Callable[[str], TensorSource]) -> tuple[str, TensorSource]:
        """Return name and source of the weight whose values are in the tensor `main`. `find` opens a tensor by name.

        Raises:
            ModelError: the shapes of its tensors do not fit.
        """
        layer, method, ends = self._by_main[main]
        return layer + method.weight, weight_source(method, layer, {end: find(layer + end) for end in ends})

    def of_model(
        self, tensors: Iterable[tuple[str, TensorSource]], find: Callable[[str], TensorSource]
    ) -> Iterator[tuple[str, TensorSource]]:
        """Yield the tensors of the model for those of the checkpoint. `find` is as in `weight`."""
        for name, source in tensors:
            if name in self._by_main:
                yield self.weight(name, find)
            elif name not in self._others:
                yield name, source
