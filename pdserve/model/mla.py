"""`MLA`: multi-head latent attention (arXiv:2405.04434), with the projections before and after it.

A token's latent is `[kv_lora_rank + rope_dim]`: what `kv_b` expands to the keys and values of all heads, and a rotated
key that the heads share. Tensor ranks split the query heads; each has the latents of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.base.parallel import part_of
from pdserve.model.attention.interface import StepAttention
from pdserve.model.attention.latent_index import REUSED, Index, IndexInputs
from pdserve.model.attention.latents import LatentProjection
from pdserve.model.attention.layer_backends import latents_of
from pdserve.model.layer_spec import IndexSpec, LayerNames, MLASpec
from pdserve.model.layers.dense import Linear, Outputs, RMSNorm, column_linear, row_linear
from pdserve.model.layers.kernels import Kernels, rotate
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamSlots

INDEX_EPS = 1e-6
"""Of the layer norm of index keys."""


class Indexer:
    """The projections of an index (DSA). Every tensor rank has all of them.

    `norm`: weight and bias of the layer norm of keys, `[head_dim]`.
    """

    def __init__(
        self, spec: MLASpec, index: IndexSpec, hidden_size: int, names: LayerNames, params: ParamSlots, kernels: Kernels
    ) -> None:
        assert spec.q_lora_rank is not None, "an index reads the queries' lower rank"
        self.spec = index
        width, dim = index.num_heads * index.head_dim, index.head_dim
        self.q = column_linear(
            kernels, params, (Outputs(names.index_q, width, range(width)),), spec.q_lora_rank, bias=False
        )
        self.k = column_linear(kernels, params, (Outputs(names.index_k, dim, range(dim)),), hidden_size, bias=False)
        self.norm = params.new(f"{names.index_k_norm}.weight", dim), params.new(f"{names.index_k_norm}.bias", dim)
        heads = Outputs(names.index_weights, index.num_heads, range(index.num_heads))
        self.weights = column_linear(kernels, params, (heads,), hidden_size, bias=False)

    def __call__(self, x: Tensor, lower: Tensor, angles: tuple[Tensor, Tensor] | None) -> IndexInputs:
        """Compute what selects the tokens of `x` `[N, hidden]`. `lower` `[N, q_lora_rank]`: the normed `q_a(x)`."""
        spec = self.spec
        query = self.q(lower).view(len(x), spec.num_heads, spec.head_dim)
        key = F.layer_norm(self.k(x), (spec.head_dim,), *self.norm, eps=INDEX_EPS)
        both = torch.cat((query, key[:, None]), 1)
        if angles is not None and spec.interleaved:
            rotated = angles[0].shape[-1]
            both = torch.cat((parted(both[..., :rotated]), both[..., rotated:]), -1)
        if angles is not None:
            both = rotate(both, *angles)
        weights = self.weights(x).float() * spec.num_heads**-0.5
        return IndexInputs(both[:, :-1], both[:, -1], weights, spec.top_k)


class MLA:
    """Latent attention of this rank's heads.

    `local` is the layer's index on this rank; `rotary` the index of its angles in `Decoder.rotaries`, None for a layer
    that rotates nothing. `q_a` and `q_a_norm` are None without a `q_lora_rank`. `kv_b` is `[heads * (nope_dim +
    value_dim), kv_lora_rank]`.
    """

    def __init__(
        self,
        spec: MLASpec,
        local: int,
        rotary: int | None,
        hidden_size: int,
        names: LayerNames,
        params: ParamSlots,
        kernels: Kernels,
        parallel: Parallel,
    ) -> None:
        self.spec, self.local, self.rotary, self._parallel = spec, local, rotary, parallel
        coord = parallel.coord
        heads = part_of(spec.num_heads, coord.shape.tp_size, coord.tp_rank)
        self.num_heads = len(heads)
        self.q_a: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        num_in, q_name = hidden_size, names.q
        if spec.q_lora_rank is not None:
            num_in, q_name = spec.q_lora_rank, names.q_b
            outputs = Outputs(names.q_a, num_in, range(num_in))
            self.q_a = column_linear(kernels, params, (outputs,), hidden_size, spec.bias)
            self.q_a_norm = RMSNorm(params.new(f"{names.q_a_norm}.weight", num_in), spec.norm_eps, kernels)
        self.q = column_linear(kernels, params, (_by_head(q_name, spec, heads, spec.key_dim),), num_in, bias=False)
        latent = Outputs(names.kv_a, spec.latent_dim, range(spec.latent_dim))
        self.kv_a = column_linear(kernels, params, (latent,), hidden_size, spec.bias)
        rank = spec.kv_lora_rank
        self.kv_a_norm = RMSNorm(params.new(f"{names.kv_a_norm}.weight", rank), spec.norm_eps, kernels)
        expanded = _by_head(names.kv_b, spec, heads, spec.nope_dim + spec.value_dim)
        self.kv_b = params.stacked(Param(f"{expanded.name}.weight", (expanded.total, rank), 0, expanded.held))
        values = _by_head(names.o, spec, heads, spec.value_dim)
        first = coord.tp_rank == 0
        self.out = row_linear(kernels, params, names.o, hidden_size, values, bias=spec.bias, adds_bias=first)
        self._projection: LatentProjection | None = None
        self.index: Indexer | None = None
        if spec.index is not None and not spec.index.shared:
            self.index = Indexer(spec, spec.index, hidden_size, names, params, kernels)

    def __call__(self, x: Tensor, angles: Sequence[tuple[Tensor, Tensor]], attention: StepAttention) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`, equal on all tensor ranks. `angles`: those of `Decoder.rotaries`."""
        spec = self.spec
        if self._projection is None:
            self._projection = LatentProjection(self.kv_b, self.num_heads, spec.nope_dim, spec.value_dim, spec.rope_dim)
        lower = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        queries = self.q(lower).view(len(x), self.num_heads, spec.key_dim)
        down = self.kv_a(x)
        latent = self.kv_a_norm(down[:, : spec.kv_lora_rank].contiguous())
        ropes = torch.cat((queries[..., spec.nope_dim :], down[:, None, spec.kv_lora_rank :]), 1)
        if self.rotary is not None:
            ropes = self._rotated(ropes, *angles[self.rotary])
        query = torch.cat((queries[..., : spec.nope_dim], ropes[:, :-1]), -1)
        latents = torch.cat((latent, ropes[:, -1]), -1)
        index: Index | None = None if spec.index is None else REUSED
        if self.index is not None:
            index = self.index(x, lower, None if self.rotary is None else angles[self.rotary])
        step = latents_of(attention)
        mixed = step.attend_latents(self.local, query, latents, self._projection, spec.scale, index)
        return self._parallel.all_reduce(self.out(mixed.flatten(1)))

    def release_kv_b(self) -> None:
        """Drop `kv_b`, which was repacked elsewhere. The layer must not be called afterwards."""
        self.kv_b = self.kv_b.new_empty(0)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `[N, heads, rope_dim]`, whose pairs the checkpoint may have side by side."""
        rope = self.spec.rope
        if rope is None or not rope.interleaved:
            return rotate(heads, cos, sin)
        turned = rotate(parted(heads), cos, sin)
        return beside(turned) if self.spec.caches_pairs else turned


def parted(heads: Tensor) -> Tensor:
    """Move the two dimensions of each pair, which are side by side, into the two halves of the last dimension."""
    return heads.view(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def beside(heads: Tensor) -> Tensor:
    """Move the two halves of the last dimension so that the dimensions of each pair are side by side."""
    return heads.view(*heads.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def _by_head(name: str, spec: MLASpec, held: range, width: int) -> Outputs:
    """Return the outputs of a projection to heads of `width`. The rank holds heads `held`."""
    return Outputs(name, spec.num_heads * width, range(held.start * width, held.stop * width))
