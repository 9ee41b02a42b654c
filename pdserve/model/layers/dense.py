"""Linear layers. Several checkpoint matrices may be stacked into one, so that one product computes them all.

`column_linear` and `row_linear` build the layers of a tensor-parallel model (arXiv:1909.08053). A column layer splits
its outputs over the tensor ranks. A row layer takes such outputs as inputs; the sum over ranks is the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.base.parallel import RankCoord, part_of, vocab_of
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.layer_spec import Activation, LayerNames, MLPSpec
from pdserve.model.layers.kernels import Kernels
from pdserve.model.parallel import Parallel
from pdserve.model.params import Param, ParamSlots
from pdserve.model.tensor_sources import ParamPiece


class PackedProduct(Protocol):
    """A product with a weight that stays quantized; see `Linear.packed`."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map `[N, in]` to `[N, out]`; `bias` is `[out]` or None."""
        ...


class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, `bias` `[out]` or None."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: PackedProduct | None = None
        """Replacement for the product with `weight`, whose memory is released; None: use `kernels`."""
        self._kernels = kernels
        num_out, num_in = weight.shape
        kernels.prepare_linear(num_out, num_in, weight.dtype, weight.device, bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[N, in]` to `[N, out]`."""
        if self.packed is not None:
            return self.packed(x, self.bias)
        return self._kernels.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, act: Activation = "silu") -> Tensor:
        """Map `[N, in]` to `act(gate) * up` of the halves of its outputs: `[N, out / 2]`."""
        if self.packed is None:
            return self._kernels.gated(x, self.weight, self.bias, act)
        gate, up = self.packed(x, self.bias).chunk(2, -1)
        return self._kernels.swiglu(gate, up) if act == "silu" else self._kernels.geglu(gate, up)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The layer must not be called afterwards."""
        self.weight = self.weight.new_empty(0)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of the checkpoint's linear layer `name`: `total` in all. A rank computes `held`.

    `order`: see `Param`.
    """

    name: str
    total: int
    held: range
    order: tuple[int, ...] | None = None


def column_linear(kernels: Kernels, params: ParamSlots, parts: tuple[Outputs, ...], num_in: int, bias: bool) -> Linear:
    """Build one layer that stacks the held parts of `parts`: `[N, num_in]` to `[N, sum of held]`."""
    weight = params.stacked(
        *(Param(f"{part.name}.weight", (part.total, num_in), 0, part.held, order=part.order) for part in parts)
    )
    biases = None
    if bias:
        biases = params.stacked(
            *(Param(f"{part.name}.bias", (part.total,), 0, part.held, order=part.order) for part in parts)
        )
    return Linear(kernels, weight, biases)


def accept_stacked(params: ParamSlots, name: str, parts: tuple[Outputs, ...], num_in: int, bias: bool) -> None:
    """Accept checkpoints that have `parts` as one linear layer `name`, one behind the other."""
    total = sum(part.total for part in parts)
    for kind, deep in (("weight", (num_in,)), *((("bias", ()),) if bias else ())):
        pieces, first = [], 0
        for part in parts:
            pieces.append(ParamPiece(f"{part.name}.{kind}", (part.total, *deep), first))
            first += part.total
        params.divide(f"{name}.{kind}", (total, *deep), pieces)


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


class WholeQKNorm:
    """RMS norms of all heads of Q together and of all heads of K, which the ranks of a stage split.

    `q_weight` and `k_weight` are this rank's parts. `eps` and `offset` as in `RMSNorm`.
    """

    def __init__(self, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, parallel: Parallel) -> None:
        self.weights = (q_weight, k_weight)
        self._eps, self._offset, self._parallel = eps, offset, parallel

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return `[N, q and k and v]` with Q and K normalised in float32; keeps shape and dtype."""
        widths = [len(weight) for weight in self.weights]
        q, k, v = torch.split(qkv, [*widths, qkv.shape[1] - sum(widths)], 1)
        wide = (q.float(), k.float())
        # A head that several ranks hold counts once on each: the mean over ranks of the local means is exact.
        means = torch.cat([part.square().mean(1, keepdim=True) for part in wide], 1)
        means = self._parallel.all_reduce(means) / self._parallel.coord.shape.tp_size
        scales = torch.rsqrt(means + self._eps).chunk(2, 1)
        normed = (
            (part * scale * (self._offset + weight.float())).to(qkv.dtype)
            for part, scale, weight in zip(wide, scales, self.weights, strict=True)
        )
        return torch.cat((*normed, v), 1)


def vocab_rows(params: ParamSlots, name: str, vocab_size: int, hidden_size: int, coord: RankCoord) -> Tensor:
    """Allocate this rank's rows of the checkpoint's `[vocab, hidden]` matrix `name`: `[share, hidden]`."""
    tp_size = coord.shape.tp_size
    held = vocab_of(vocab_size, tp_size, coord.tp_rank)
    share = len(vocab_of(vocab_size, tp_size, 0))
    return params.stacked(Param(name, (vocab_size, hidden_size), 0, held), num_rows=share)


class VocabEmbedding:
    """Vocab-parallel embedding. One rank has a token's row, and the other ranks add zero: the sum is exact.

    Rows are multiplied by `scale`, rounded to their dtype.
    """

    def __init__(self, weight: Tensor, vocab_size: int, parallel: Parallel, scale: float = 1.0) -> None:
        self.weight = weight
        self._parallel = parallel
        self.scale = float(torch.tensor(scale, dtype=weight.dtype))
        self._held = vocab_of(vocab_size, parallel.coord.shape.tp_size, parallel.coord.tp_rank)

    def release_weights(self) -> None:
        """Drop the weights, which were repacked elsewhere. The embedding must not be called afterwards."""
        self.weight = self.weight.new_empty(0)

    def __call__(self, ids: Tensor) -> Tensor:
        """Map int64 `[N]` to `[N, hidden]`, equal on all ranks."""
        rows = self._rows(ids)
        return rows if self.scale == 1.0 else rows * self.scale

    def _rows(self, ids: Tensor) -> Tensor:
        """Look the rows up."""
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
    """Gated MLP; the ranks of `group` split its columns. `names` are complete."""

    def __init__(
        self,
        kernels: Kernels,
        params: ParamSlots,
        names: LayerNames,
        hidden_size: int,
        mlp: MLPSpec,
        group: DPAttentionGroup,
    ) -> None:
        self.group, self.act = group, mlp.act
        self.product: Callable[[Tensor], Tensor] | None = None
        """Replacement for this rank's columns, `[N, hidden]` to a partial sum of `[N, hidden]`; None: use `kernels`."""
        inner = part_of(mlp.intermediate_size, group.size, group.rank)
        gate, up = (Outputs(name, mlp.intermediate_size, inner) for name in (names.gate, names.up))
        self.gate_up = column_linear(kernels, params, (gate, up), hidden_size, mlp.bias)
        accept_stacked(params, names.gate_up, (gate, up), hidden_size, mlp.bias)
        first = group.rank == 0
        self.down = row_linear(kernels, params, names.down, hidden_size, gate, bias=mlp.bias, adds_bias=first)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        x = self.group.gather(x)
        if self.product is not None:
            return self.group.reduce_sum(self.product(x))
        return self.group.reduce_sum(self.down(self.gate_up.gated(x, self.act)))
