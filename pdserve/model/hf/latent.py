"""Finds the multi-head latent attention (MLA) of transformers models, whose expansion of latents pages can stand for.

transformers expands the latents of the whole context to keys and values of all heads, in every step. The layers found
here attend over the latents instead; see `attention/latents.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pdserve.model.attention.latents import LatentProjection
from pdserve.model.hf.probe import CacheProbe

_CHECKED_TOKENS = 3
_TOLERANCE = 0.02
"""Largest relative difference between the keys and values of a layer's own code and of `LatentProjection.expand`."""


def find_projections(decoder: nn.Module, found: CacheProbe) -> dict[int, tuple[Any, LatentProjection]]:
    """Return by layer the attention modules whose `expand_kv` is understood, and their projections.

    A module is understood when its `expand_kv` gives the keys and values of `LatentProjection.expand`.
    """
    projections: dict[int, tuple[Any, LatentProjection]] = {}
    for module in decoder.modules():
        number: Any = getattr(module, "layer_idx", -1)
        layer = found.layers.get(number)
        if layer is None or layer.kv is None or not layer.is_latent or not hasattr(module, "expand_kv"):
            continue
        projection = _projection(module, layer.kv[0][1], layer.kv[1][1])
        if projection is not None:
            projections[number] = module, projection
    return projections


def _projection(module: Any, rank: int, rope_width: int) -> LatentProjection | None:
    linear = getattr(module, "kv_b_proj", None)
    if type(linear) is not nn.Linear or linear.bias is not None:
        return None
    weight = linear.weight.detach()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(_CHECKED_TOKENS, rank + rope_width, generator=generator).to(weight)
    theirs = module.expand_kv(latents[None, None, :, :rank], latents[None, None, :, rank:])
    num_heads, nope, v_width = theirs[0].shape[1], theirs[0].shape[-1] - rope_width, theirs[1].shape[-1]
    if weight.shape != (num_heads * (nope + v_width), rank):
        return None
    projection = LatentProjection(weight, num_heads, nope, v_width, rope_width)
    for own, their in zip(projection.expand(latents), theirs, strict=True):
        if not (own - their[0]).float().norm() <= _TOLERANCE * their.float().norm():
            return None
    return projection
