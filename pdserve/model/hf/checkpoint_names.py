"""Weights of a transformers model by the names that they have in its checkpoint.

transformers stacks the experts of a layer in one parameter, and renames others; native code reads the names of the
file. By these names the weights of both builds of a model have the same fingerprint, and the same random values.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pdserve.model.params import EXPERT_SAMPLES, ParamSlots

_LOG = logging.getLogger(__name__)
_EXPERTS_DIM = 3
"""Dimensions of a parameter that stacks the matrices of a layer's experts."""


class _View(Tensor):
    """A tensor whose parts stay views: transformers' conversions copy them by `contiguous`."""

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        """Return this tensor."""
        return self


def adopt_weights(model: Any, params: ParamSlots) -> None:
    """Let `params` take over the weights that the language model reads; those of other towers count as bytes.

    A parameter has its name in the module where the tensors of the checkpoint are not parts of it.
    """
    stacked = {_storage(parameter) for parameter in model.parameters() if parameter.dim() == _EXPERTS_DIM}
    num_adopted = 0
    for name, tensor in _checkpoint_tensors(model).items():
        is_expert = tensor.dim() < _EXPERTS_DIM and _storage(tensor) in stacked
        params.adopt(name, tensor, *((EXPERT_SAMPLES,) if is_expert else ()))
        num_adopted += tensor.numel() * tensor.element_size()
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    params.add_bytes(max(0, num_bytes - num_adopted))


def _checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Return the weights of the language model as views of its parameters and buffers, by name in the checkpoint."""
    weights = _text_weights(model)
    views: dict[str, Tensor] = {name: tensor.as_subclass(_View) for name, tensor in weights.items()}
    try:
        reverted = revert_weight_conversion(model, views)
    except Exception as error:  # transformers' code may raise anything
        _LOG.debug("weights have the names of their modules: %s", error)
        return weights
    found = {name: tensor.as_subclass(Tensor) for name, tensor in reverted.items()}
    used = Counter(_storage(tensor) for tensor in weights.values())
    covered: Counter[int] = Counter()
    for tensor in found.values():
        covered[_storage(tensor)] += tensor.numel()

    def is_covered(tensor: Tensor) -> bool:
        return used[_storage(tensor)] == 1 and covered[_storage(tensor)] == tensor.numel()

    split = {_storage(tensor) for tensor in weights.values() if is_covered(tensor)}
    parts = {name: tensor for name, tensor in found.items() if _storage(tensor) in split}
    return parts | {name: tensor for name, tensor in weights.items() if _storage(tensor) not in split}


def _text_weights(model: Any) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, each once; those of other towers, such as vision, are left out."""
    base, decoder = getattr(model, model.base_model_prefix), model.get_decoder()
    text = {_place(tensor) for tensor in decoder.state_dict().values()}
    others = {_place(tensor) for tensor in base.state_dict().values()} - text
    weights: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and _place(tensor) not in others:
            weights.setdefault(_place(tensor), (name, tensor.detach()))
    return dict(weights.values())


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
