"""`Decoder`: the torch modules of a model of any family, built from the layers of its `ModelSpec`.

Built by the loader, which fills `params`; run by the executor. A rank of a split model (`Parallel`) has its
stage's layers, its share of their heads and feed-forward columns, and its share of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pdserve.base.parallel import RankCoord, kv_heads_of, layers_of, part_of
from pdserve.model.attention.interface import Heads, StepAttention
from pdserve.model.attention.layer_backends import states_of
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.gated_delta_net import GatedDeltaNet
from pdserve.model.interface import LayerTaps, MoELayer
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, LayerNames, MLASpec, MLPSpec, Operation
from pdserve.model.layers.dense import (
    DenseMLP,
    FeedForward,
    Linear,
    Outputs,
    RMSNorm,
    VocabEmbedding,
    WholeQKNorm,
    accept_stacked,
    column_linear,
    row_linear,
    vocab_rows,
)
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.kernels import FastKernels, Kernels, Rotary
from pdserve.model.layers.moe import TPMoE
from pdserve.model.mla import MLA
from pdserve.model.named_weights import MemoryRange
from pdserve.model.parallel import Parallel, SingleRank
from pdserve.model.params import Param, ParamSlots
from pdserve.model.placement import ExpertMap
from pdserve.model.rope import RopeSpec


class Decoder:
    """Implements `Model` with torch. Weights are allocated here, uninitialised, and filled through `params`.

    `kernels` None selects `FastKernels`. `parallel` None means the rank has the whole model. With `expert_map` each
    rank has whole experts; with None it has a part of every expert. With `has_ends` False the model has no embedding
    and no head: its caller passes hidden states, and sets `head`. `on_host`: see `ParamSlots`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        parallel: Parallel | None = None,
        expert_map: ExpertMap | None = None,
        *,
        has_ends: bool = True,
        on_host: Collection[str] = (),
    ) -> None:
        self._kernels = kernels = kernels or FastKernels()
        self.spec = spec
        self.dtype = dtype
        self.params = ParamSlots(dtype, device, on_host)
        self.parallel = parallel or SingleRank()
        self._coord = coord = self.parallel.coord
        ropes = spec.rotations
        self.rotaries = tuple(Rotary(rope, head_dim, dtype, device) for rope, head_dim in ropes)
        """Rotary angles of the kinds of attention, those that rotate alike once."""
        embedding = self._embedding_rows() if has_ends else None
        mine = layers_of(spec.num_layers, coord.shape.pp_size, coord.pp_rank)
        self.expert_map = expert_map
        build = _LayerBuilder(spec, self.params, kernels, self.parallel, expert_map, ropes)
        self.layers = [build.layer(index, local) for local, index in enumerate(mine)]
        self.moe_layers = {
            index: op
            for index, layer in zip(mine, self.layers, strict=True)
            for op in layer.operations
            if isinstance(op, MoELayer)
        }
        """This rank's feed-forward layers with experts, by index in the model."""
        elsewhere = (index for index in range(spec.num_layers) if index not in mine)
        self.params.ignore_under(spec.names.layers.format(layer=index) for index in elsewhere)
        self.params.ignore_under(spec.names.ignored)
        self.params.rename_under(spec.names.renamed_in(spec.num_layers))
        self.embedding: VocabEmbedding | None = None
        self.read_embedding: VocabEmbedding | None = None
        """What layers read beside hidden states; set by the owner of a model with `spec.reads_embeddings`."""
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if embedding is not None and coord.is_first_stage:
            self.embedding = VocabEmbedding(embedding, spec.vocab_size, self.parallel, spec.embedding_scale)
        norm = f"{spec.names.norm}.weight"
        if coord.is_last_stage:
            weight = self.params.new(norm, spec.hidden_size)
            self.norm = RMSNorm(weight, spec.rms_norm_eps, kernels, spec.norm_offset)
        else:
            self.params.ignore(norm)
        head = self._head_rows(embedding) if has_ends else None
        if head is not None:
            self.head = Linear(kernels, head)

    @property
    def kernels(self) -> Kernels:
        """The kernels between products."""
        return self._kernels

    @property
    def num_layers(self) -> int:
        """Number of layers on this rank."""
        return len(self.layers)

    @property
    def argmax(self) -> None:
        """See `Model.argmax`. Always None."""

    def weight_memory(self) -> list[MemoryRange]:
        """See `Model.weight_memory`."""
        return self.params.memory()

    def idle(self) -> None:
        """See `Model.idle`."""
        nothing = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.params.device)
        for layer in self.layers:
            for op in layer.operations:
                if not isinstance(op, Attention | MLA | GatedDeltaNet):
                    op(nothing)

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `Model.forward`."""
        if self.embedding is not None:
            assert hidden is None, "the first stage takes tokens, not hidden states"
            x = self.embedding(batch.input_ids)
            if batch.embeds is not None:
                batch.embeds.put(x)
        else:
            assert hidden is not None, "this stage takes hidden states"
            x = hidden
        angles = [
            self._kernels.angles(batch.positions, rotary.inverse, rotary.factor, rotary.dtype)
            for rotary in self.rotaries
        ]
        embeds = None if self.read_embedding is None else self.read_embedding(batch.input_ids)
        rest: Tensor | None = None
        for index, layer in enumerate(self.layers):
            rest = layer(x, rest, angles, attention, embeds)
            if on_layer is not None:
                on_layer(index)
            if taps is not None and index in taps.layers:
                taps.put(index, x if rest is None else x + rest)
        if rest is not None:
            x += rest
        if self.norm is None or self.head is None:
            return x
        if on_hidden is not None:
            on_hidden(x)
        return self._logits(x.index_select(0, batch.sample_index))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._logits(hidden).float()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `Model.final_norm`."""
        assert self.norm is not None, "only the last stage has the final norm"
        return self.norm(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states before the final norm to this rank's logits: `[N, hidden]` to `[N, share]`."""
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        logits, spec = self.head(self.norm(hidden)), self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = self._kernels.softcap(logits, spec.logit_softcap)
        return logits

    def _embedding_rows(self) -> Tensor | None:
        """Allocate embedding rows on the first stage, and on the last when the head is tied; None elsewhere."""
        name, coord = f"{self.spec.names.embedding}.weight", self._coord
        if coord.is_first_stage or (coord.is_last_stage and self.spec.tied_embeddings):
            return vocab_rows(self.params, name, self.spec.vocab_size, self.spec.hidden_size, coord)
        self.params.ignore(name)
        return None

    def _head_rows(self, embedding: Tensor | None) -> Tensor | None:
        """Return rows of the head on the last stage; None elsewhere."""
        name, coord = f"{self.spec.names.head}.weight", self._coord
        if self.spec.tied_embeddings or not coord.is_last_stage:
            self.params.ignore(name)
            return embedding if coord.is_last_stage else None
        return vocab_rows(self.params, name, self.spec.vocab_size, self.spec.hidden_size, coord)


Angles = tuple[Tensor, Tensor]
"""cos and sin of a step; see `angle_tables`."""


class Attention:
    """Attention of this rank's heads, with the projections before and after it.

    `local` is the layer's index on this rank; `rotary` the index of its angles in `Decoder.rotaries`; None: nothing is
    rotated. `q_norm` and `k_norm` are per-head norms, both or neither None; `whole_norms` is what the layer has instead
    with `AttentionSpec.whole_qk_norm`. `sinks` float32 `[num_heads]`: see `AttentionSpec`. With `reads_embeddings` its
    inputs are twice as wide: those of the embeddings, then those of the hidden states.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        local: int,
        rotary: int | None,
        hidden_size: int,
        eps: float,
        norm_offset: float,
        names: LayerNames,
        params: ParamSlots,
        kernels: Kernels,
        parallel: Parallel,
        *,
        reads_embeddings: bool = False,
    ) -> None:
        self._parallel, self._local, self._head_dim = parallel, local, spec.head_dim
        self.reads_embeddings = reads_embeddings
        self.spec, self.rotary, self._kernels = spec, rotary, kernels
        q, kv = head_shares(spec, parallel.coord)
        self.num_heads, self.num_kv_heads = len(q), len(kv)
        order = spec.head_order
        outputs = _by_head(names.q, spec.num_heads, q, spec.q_width // spec.num_heads, order)
        queries = _by_head(names.q, spec.num_heads, q, spec.head_dim)
        keys = _by_head(names.k, spec.num_kv_heads, kv, spec.head_dim, order)
        qkv = (outputs, keys, _by_head(names.v, spec.num_kv_heads, kv, spec.head_dim))
        num_in = 2 * hidden_size if reads_embeddings else hidden_size
        self.qkv = column_linear(kernels, params, qkv, num_in, spec.qkv_bias)
        accept_stacked(params, names.qkv, qkv, num_in, spec.qkv_bias)
        first = parallel.coord.tp_rank == 0
        self.out = row_linear(kernels, params, names.o, hidden_size, queries, bias=spec.o_bias, adds_bias=first)
        self.q_norm = self.k_norm = None
        self.whole_norms: WholeQKNorm | None = None
        if spec.qk_norm and spec.whole_qk_norm:
            q_weight, k_weight = (
                params.stacked(Param(f"{name}.weight", (part.total,), 0, part.held, order=order))
                for name, part in ((names.q_norm, queries), (names.k_norm, keys))
            )
            self.whole_norms = WholeQKNorm(q_weight, k_weight, eps, norm_offset, parallel)
        elif spec.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    params.stacked(Param(f"{name}.weight", (spec.head_dim,), order=order)), eps, kernels, norm_offset
                )
                for name in (names.q_norm, names.k_norm)
            )
        self.sinks: Tensor | None = None
        if spec.sinks:
            self.sinks = params.stacked(Param(names.sinks, (spec.num_heads,), 0, q), dtype=torch.float32)

    def __call__(self, x: Tensor, angles: Sequence[Angles], attention: StepAttention) -> Tensor:
        """Map `[N, num_in]` to `[N, hidden]`, equal on all tensor ranks. `angles`: those of `Decoder.rotaries`."""
        qkv, has_gates = self.qkv(x), self.spec.output_gate
        if self.whole_norms is not None:
            qkv = self.whole_norms(qkv)
        qkv = qkv.view(x.shape[0], -1, self._head_dim)
        cos, sin = (None, None) if self.rotary is None else angles[self.rotary]
        heads = Heads(qkv, self.num_heads, self.num_kv_heads, self.q_norm, self.k_norm, cos, sin, has_gates, self.sinks)
        mixed = attention.attend(self._local, heads)
        if has_gates:
            gates = qkv[:, 1 : 2 * self.num_heads : 2]
            mixed = self._kernels.gate(mixed.view(gates.shape), gates).flatten(1)
        return self._parallel.all_reduce(self.out(mixed))


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """Adds `residual_scale * post_norm(op(norm(x)))` to the hidden states `x`; see `SublayerSpec`."""

    norm: RMSNorm | None
    op: Attention | MLA | GatedDeltaNet | FeedForward
    embedding_norm: RMSNorm | None = None
    post_norm: RMSNorm | None = None
    residual_scale: float = 1.0

    def normed(self, x: Tensor, rest: Tensor | None) -> Tensor:
        """Return the operation's input for hidden states `x + rest`, `[N, hidden]`; overwrites `x` with the sum."""
        if self.norm is None:
            if rest is not None:
                x += rest
            return x
        return self.norm(x) if rest is None else self.norm.of_sum(x, rest)

    def finished(self, out: Tensor) -> Tensor:
        """Return what is added to the hidden states for the operation's output."""
        if self.post_norm is not None:
            out = self.post_norm(out)
        return out if self.residual_scale == 1.0 else out * self.residual_scale


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """A transformer layer; see `DecoderLayerSpec`."""

    sublayers: tuple[Sublayer, ...]

    @property
    def operations(self) -> tuple[Attention | MLA | GatedDeltaNet | FeedForward, ...]:
        """The operations of the sublayers, in order."""
        return tuple(sublayer.op for sublayer in self.sublayers)

    def __call__(
        self,
        x: Tensor,
        rest: Tensor | None,
        angles: Sequence[Angles],
        attention: StepAttention,
        embeds: Tensor | None = None,
    ) -> Tensor | None:
        """Run one layer over `x + rest`, `[N, hidden]` each; `rest` None means zero. `embeds`: see `SublayerSpec`.

        Returns the last sublayer's output without adding it to `x`; `x` holds all earlier terms. The next norm adds the
        two, which fuses the sum with the norm.
        """
        for sublayer in self.sublayers:
            op, normed = sublayer.op, sublayer.normed(x, rest)
            if sublayer.embedding_norm is not None:
                assert embeds is not None, "this layer reads embeddings"
                normed = torch.cat((sublayer.embedding_norm(embeds), normed), -1)
            if isinstance(op, Attention | MLA):
                rest = op(normed, angles, attention)
            elif isinstance(op, GatedDeltaNet):
                rest = op(normed, states_of(attention, op.local))
            else:
                rest = op(normed)
            rest = sublayer.finished(rest)
        return rest


def head_shares(spec: AttentionSpec, coord: RankCoord) -> tuple[range, range]:
    """Return query heads and KV heads of a tensor rank; its query heads belong to its KV heads."""
    tp_size, rank = coord.shape.tp_size, coord.tp_rank
    return part_of(spec.num_heads, tp_size, rank), kv_heads_of(spec.num_kv_heads, tp_size, rank)


@dataclasses.dataclass(frozen=True)
class _LayerBuilder:
    """Builds the layers of one rank, and allocates their weights in `params`."""

    spec: ModelSpec
    params: ParamSlots
    kernels: Kernels
    parallel: Parallel
    expert_map: ExpertMap | None
    ropes: tuple[tuple[RopeSpec, int], ...]
    """Rotation and head size of each of `Decoder.rotaries`."""

    def layer(self, index: int, local: int) -> DecoderLayer:
        """Build the layer with index `index` in the model and `local` on this rank."""
        spec, names = self.spec, self.spec.names
        prefix = names.layers.format(layer=index)
        built = []
        for sublayer in spec.layers[index].sublayers:
            reads_embeddings = sublayer.embedding_norm is not None
            op = self._operation(sublayer.op, index, local, names.layer.under(prefix), reads_embeddings)
            norm, embedding_norm, post_norm = (
                None if name is None else self._norm(prefix + name)
                for name in (sublayer.norm, sublayer.embedding_norm, sublayer.post_norm)
            )
            built.append(Sublayer(norm, op, embedding_norm, post_norm, sublayer.residual_scale))
        return DecoderLayer(tuple(built))

    def _norm(self, name: str) -> RMSNorm:
        """Build the RMS norm `name` of hidden states."""
        spec = self.spec
        weight = self.params.new(f"{name}.weight", spec.hidden_size)
        return RMSNorm(weight, spec.rms_norm_eps, self.kernels, spec.norm_offset)

    def _operation(
        self, op: Operation, index: int, local: int, names: LayerNames, reads_embeddings: bool
    ) -> Attention | MLA | GatedDeltaNet | FeedForward:
        """Build one operation. `names` are complete."""
        params, kernels, hidden_size, group = (
            self.params,
            self.kernels,
            self.spec.hidden_size,
            self.parallel.dp_attention_group,
        )
        if isinstance(op, AttentionSpec):
            spec = self.spec
            rotary = None if op.rope is None else self.ropes.index((op.rope, op.head_dim))
            return Attention(
                op, local, rotary, hidden_size, spec.rms_norm_eps, spec.norm_offset, names, params, kernels,
                self.parallel, reads_embeddings=reads_embeddings,
            )  # fmt: skip
        if isinstance(op, MLASpec):
            turn = None if op.rope is None else self.ropes.index((op.rope, op.rope_dim))
            return MLA(op, local, turn, hidden_size, names, params, kernels, self.parallel)
        if isinstance(op, GatedDeltaSpec):
            eps = self.spec.rms_norm_eps
            return GatedDeltaNet(op, local, hidden_size, eps, names, params, kernels, self.parallel)
        if isinstance(op, MLPSpec):
            return DenseMLP(kernels, params, names, hidden_size, op, group)
        if self.expert_map is None:
            return TPMoE(kernels, params, names, hidden_size, op, group)
        return ExpertParallelMoe(kernels, params, names, hidden_size, op, group, self.expert_map.rows[index])


def _by_head(name: str, num_heads: int, held: range, head_dim: int, order: tuple[int, ...] | None = None) -> Outputs:
    """Return the outputs of a projection to heads. The rank holds heads `held`. `order`: see `Outputs`."""
    return Outputs(name, num_heads * head_dim, range(held.start * head_dim, held.stop * head_dim), order)
