"""Linear layers. Several checkpoint matrices may be stacked into one, so that one product computes them all.

`column_linear` and `row_linear` build the layers of a tensor-parallel model (arXiv:1909.08053). A column layer splits
its outputs over the tensor ranks. A row layer takes such outputs as inputs; the sum over ranks is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from pdserve.base.parallel import RankCoord, part_of, vocab_of
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.layer_spec import LayerNames, MLPSpec
from pdserve.model.layers.kernels import Kernels
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamSlots


class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, `bias` `[out]` or None."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._kernels = kernels
        num_out, num_in = weight.shape
        kernels.prepare_linear(num_out, num_in, weight.dtype, weight.device, bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, in]` to `[N, out]`."""
        return self._kernels.linear(x, self.weight, self.bias)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The layer must not be called afterwards."""
        self.weight = self.weight.new_empty(0)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of the checkpoint's linear layer `name`: `total` in all, of which a rank computes `held`."""

    name: str
    total: int
    held: range


def column_linear(kernels: Kernels, params: ParamSlots, parts: tuple[Outputs, ...], num_in: int, bias: bool) -> Linear:
    """Build one layer that stacks the held parts of `parts`: `[N, num_in]` to `[N, sum of held]`."""
    weight = params.stacked(*(Param(f"{part.name}.weight", (part.total, num_in), 0, part.held) for part in parts))
    biases = None
    if bias:
        biases = params.stacked(*(Param(f"{part.name}.bias", (part.total,), 0, part.held) for part in parts))
    return Linear(kernels, weight, biases)


def row_linear(
    kernels: Kernels, params: ParamSlots, name: str, num_out: int, inputs: Outputs, *, bias: bool, adds_bias: bool
) -> Linear:
    """Build a layer from the held part of `inputs` to a partial sum of `[N, num_out]`. One rank sets `adds_bias`."""
    weight = params.stacked(Param(f"{name}.weight", (num_out, inputs.total), 1, inputs.held))
    biases = None
    if bias and adds_bias:
        biases = params.new(f"{name}.bias", num_out)
    elif bias:
        params.ignore(f"{name}.bias")
    return Linear(kernels, weight, biases)


class RMSNorm:
    """Normalises the last dimension in float32, then scales by `weight` in the input's dtype.

    With `offset` other than 0 it scales by `offset + weight`, in float32.
    """

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x`; keeps shape and dtype."""
        return self._kernels.norm(x, self.weight, self.eps, self.offset)

    def of_sum(self, x: Tensor, more: Tensor) -> Tensor:
        """Normalise `x + more`, and overwrite `x` with the sum."""
        return self._kernels.add_norm(x, more, self.weight, self.eps, self.offset)


def vocab_rows(params: ParamSlots, name: str, vocab_size: int, hidden_size: int, coord: RankCoord) -> Tensor:
    """Allocate this rank's rows of the checkpoint's `[vocab, hidden]` matrix `name`: `[share, hidden]`."""
    tp_size = coord.shape.tp_size
    held = vocab_of(vocab_size, tp_size, coord.tp_rank)
    share = len(vocab_of(vocab_size, tp_size, 0))
    return params.stacked(Param(name, (vocab_size, hidden_size), 0, held), num_rows=share)


class VocabEmbedding:
    """Vocab-parallel embedding. One rank has a token's row, and the other ranks add zero: the sum is exact."""

    def __init__(self, weight: Tensor, vocab_size: int, parallel: Parallel) -> None:
        self.weight = weight
        self._parallel = parallel
        self._held = vocab_of(vocab_size, parallel.coord.shape.tp_size, parallel.coord.tp_rank)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The embedding must not be called afterwards."""
        self.weight = self.weight.new_empty(0)

    def __call__(self, ids: Tensor) -> Tensor:
        """Map int64 `[N]` to `[N, hidden]`, equal on all ranks."""
        if self._parallel.coord.shape.tp_size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self._held.start
        elsewhere = (local < 0) | (local >= len(self._held))
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._parallel.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))


class FeedForward(Protocol):
    """One layer's feed-forward on one rank."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, hidden]` to `[N, hidden]`; both are equal on all tensor ranks.

        All ranks of `Parallel.dp_attention_group` call it together. N may be 0.
        """
        ...


class DenseMLP:
    """SiLU-gated MLP; the ranks of `group` split its columns. `names` are complete."""

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        mlp: MLPSpec,
        group: DPAttentionGroup,
    ) -> None:
        self._kernels, self.group = kernels, group
        self.product: Callable[[Tensor], Tensor] | None = None
        """Replacement for this rank's columns, `[N, hidden]` to a partial sum of `[N, hidden]`; None: use `kernels`."""
        inner = part_of(mlp.intermediate_size, group.size, group.rank)
        gate, up = (Outputs(name, mlp.intermediate_size, inner) for name in (names.gate, names.up))
        self.gate_up = column_linear(kernels, params, (gate, up), hidden_size, mlp.bias)
        first = group.rank == 0
        self.down = row_linear(kernels, params, names.down, hidden_size, gate, bias=mlp.bias, adds_bias=first)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        x = self.group.gather(x)
        if self.product is not None:
            return self.group.reduce_sum(self.product(x))
        gated = self._kernels.gated(x, self.gate_up.weight, self.gate_up.bias)
        return self.group.reduce_sum(self.down(gated))
