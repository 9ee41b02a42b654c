"""Packs the weights of a decoder for the CPU kernels, one operation after the other, and drops the originals.

Feed-forward layers whose tokens travel between ranks are not part of the program. For them `Packer` installs modules of
`native/modules.py`, which compute this rank's part with the CPU kernels. The layers and the exchange of tokens are
unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from pdserve.model.attention.interface import Heads
from pdserve.model.decoder import Attention, Decoder
from pdserve.model.forward_batch import ForwardBatch, IntArray
from pdserve.model.gated_delta_net import GatedDeltaNet, LowRankGates
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, common_format, quantize, stacked
from pdserve.model.layer_spec import Activation
from pdserve.model.layers.dense import DenseMLP, FeedForward, Linear, VocabEmbedding
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.moe import Experts, SharedExpert, TPMoE
from pdserve.model.mla import MLA, Indexer
from pdserve.model.native.modules import NativeFeedForward, PackedExperts, PackedRouter, PackedShared
from pdserve.model.native.unpack import (
    is_bf16,
    packed_biases,
    packed_rows,
    reader_of,
    reader_of_columns,
    reader_of_layers,
)
from pdserve.model.native.weights import Arena, Format, Packed, inputs_of, open_packed
from pdserve.model.params import ParamSlots


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """Packed projections of an `Attention`. `qkv`: queries, keys, values, and then output gates if there are any.

    `of_embeddings`: the part of `qkv` that reads embeddings, where `qkv` reads the hidden states only; None: there is
    none. `order`: that of the outputs of `qkv`, see `Packer.linear`.
    """

    op: Attention
    qkv: Packed
    out: Packed
    of_embeddings: Packed | None = None
    order: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class PackedIndex:
    """Packed projections of an `Indexer`. `weights` is bf16 in every number format."""

    op: Indexer
    q: Packed
    k: Packed
    weights: Packed


@dataclasses.dataclass(frozen=True)
class PackedMLA:
    """Packed projections of an `MLA`. `q_a` is None without a `q_lora_rank`, `index` in a layer without an index.

    `absorb` and `project` have one layer for each head: the parts of `kv_b` for keys, transposed, and for values. They
    are bf16 in every number format.
    """

    op: MLA
    q_a: Packed | None
    q: Packed
    kv_a: Packed
    absorb: Packed
    project: Packed
    out: Packed
    index: PackedIndex | None


@dataclasses.dataclass(frozen=True)
class PackedDelta:
    """Packed projections of a `GatedDeltaNet`. `gates`, always bf16: those of `LowRankGates`, a layer for each head."""

    op: GatedDeltaNet
    project: Packed
    out: Packed
    gates: Packed | None = None


@dataclasses.dataclass(frozen=True)
class PackedMLP:
    """Packed linear layers of a `DenseMLP`, and its activation."""

    gate_up: Packed
    down: Packed
    act: Activation


@dataclasses.dataclass(frozen=True)
class PackedMoe:
    """Packed linear layers of a `TPMoE`; `gate_up` and `down` hold one layer per expert."""

    op: TPMoE
    router: Packed
    gate_up: Packed
    down: Packed
    shared: PackedShared | None


@dataclasses.dataclass(frozen=True)
class PackedOutside:
    """A feed-forward that runs in Python at a sync point of the program. It calls the CPU kernels on packed weights."""

    op: FeedForward


PackedOperation = PackedAttention | PackedMLA | PackedDelta | PackedMLP | PackedMoe | PackedOutside


@dataclasses.dataclass(frozen=True)
class Packer:
    """Makes packed layers that receive their weights once `params` has them.

    `formats` are those of quantized weights of the checkpoint, by parameter, which are packed as they are. All other
    weights get `format`.
    """

    arena: Arena
    format: Format
    params: ParamSlots
    packing: Callable[[], AbstractContextManager[object]]
    formats: Mapping[str, GroupFormat] = dataclasses.field(default_factory=dict)

    def operation(self, op: Attention | MLA | GatedDeltaNet | FeedForward) -> PackedOperation:
        """Pack one operation of a layer. Takes ownership of its weights."""
        if isinstance(op, Attention) and op.reads_embeddings:
            of_embeddings, qkv = self.halves(op.qkv)
            return PackedAttention(op, qkv, self.linear(op.out), of_embeddings)
        if isinstance(op, Attention):
            order = _gates_last(op) if op.spec.output_gate else None
            return PackedAttention(op, self.linear(op.qkv, order=order), self.linear(op.out), order=order)
        if isinstance(op, MLA):
            q_a, index = None if op.q_a is None else self.linear(op.q_a), op.index
            rest = self.linear(op.q), self.linear(op.kv_a), *self.kv_b(op), self.linear(op.out)
            return PackedMLA(op, q_a, *rest, None if index is None else self.index(index))
        if isinstance(op, GatedDeltaNet):
            gates = None if op.low_rank is None else self.low_rank(op, op.low_rank)
            return PackedDelta(op, self.linear(op.project), self.linear(op.out), gates)
        if isinstance(op, DenseMLP):
            gate_up, down = self.feed_forward(op.gate_up, op.down)
            if not op.group.spans_replicas:
                return PackedMLP(gate_up, down, op.act)
            op.product = NativeFeedForward(gate_up, down, op.act)
            return PackedOutside(op)
        assert isinstance(op, TPMoE | ExpertParallelMoe) and isinstance(op.experts, Experts), op
        gate_up, down = self.experts(op.experts)
        router = self.linear(op.router.linear, format="bf16")
        shared: PackedShared | None = None
        if op.shared is not None:
            assert isinstance(op.shared, SharedExpert), op.shared
            shared_gate_up, shared_down = self.feed_forward(op.shared.gate_up, op.shared.down)
            gate = None if op.shared.router is None else self.linear(op.shared.router, format="bf16")
            shared = PackedShared(shared_gate_up, shared_down, gate)
        if isinstance(op, TPMoE) and not op.group.spans_replicas:
            return PackedMoe(op, router, gate_up, down, shared)
        op.shared = shared
        op.route = PackedRouter(router, op.router.moe, op.router.correction)
        op.experts = PackedExperts(gate_up, down, op.router.moe)
        return PackedOutside(op)

    def index(self, op: Indexer) -> PackedIndex:
        """Pack the projections of an index. Drops the originals."""
        return PackedIndex(op, self.linear(op.q), self.linear(op.k), self.linear(op.weights, format="bf16"))

    def kv_b(self, op: MLA) -> tuple[Packed, Packed]:
        """Pack the weight that expands latents, for keys and for values: see `PackedMLA`. Drops the original."""
        spec, count = op.spec, op.num_heads
        absorb = open_packed(self.arena, "bf16", spec.kv_lora_rank, spec.nope_dim, count=count)
        project = open_packed(self.arena, "bf16", spec.value_dim, spec.kv_lora_rank, count=count)

        def read(head: int, start: int, stop: int) -> Tensor:
            keys = packed_rows(absorb, 0, spec.kv_lora_rank, index=head).t()
            return torch.cat((keys, packed_rows(project, 0, spec.value_dim, index=head)))[start:stop]

        reader = reader_of_layers(count, spec.nope_dim + spec.value_dim, read, is_exact=True)

        def take() -> None:
            with self.packing():
                for head, weight in enumerate(op.kv_b.view(count, -1, spec.kv_lora_rank)):
                    absorb.put(weight[: spec.nope_dim].t(), index=head)
                    project.put(weight[spec.nope_dim :], index=head)
                self.params.release_weights(op.kv_b, absorb.num_bytes + project.num_bytes, reader)
                op.release_kv_b()

        self.params.when_given([op.kv_b], take)
        return absorb, project

    def low_rank(self, op: GatedDeltaNet, low_rank: LowRankGates) -> Packed:
        """Pack the second halves of the projections a and z: see `PackedDelta`. Drops the originals."""
        assert op.key_dim == op.value_dim, "a and z have equally wide heads"
        count, dim, layers = op.num_value_heads, op.key_dim, (low_rank.a, low_rank.z)
        packed = open_packed(self.arena, "bf16", dim, dim, count=2 * count)

        def take() -> None:
            with self.packing():
                for part, layer in enumerate(layers):
                    for head, weight in enumerate(layer.weight.view(count, dim, dim)):
                        packed.put(weight, index=part * count + head)
                    reader = reader_of_layers(
                        count, dim, partial(_read_layer, packed), is_exact=True, first=part * count
                    )
                    self.params.release_weights(layer.weight, packed.num_bytes // 2, reader)
                    layer.release_weights()

        self.params.when_given([layer.weight for layer in layers], take)
        return packed

    def experts(self, experts: Experts) -> tuple[Packed, Packed]:
        """Pack all experts' gate and up, and down. Drops the originals."""
        weights = experts.weights
        count, wide, hidden_size = weights.gate_up.shape
        formats = self._equal_inputs(weights.gate_up, weights.down)
        has_bias = weights.gate_up_bias is not None
        gate_up = open_packed(self.arena, formats[0], wide, hidden_size, has_bias=has_bias, num_parts=2, count=count)
        has_bias = weights.down_bias is not None
        down = open_packed(self.arena, formats[1], hidden_size, wide // 2, has_bias=has_bias, count=count)
        self._keep(weights.gate_up, formats[0])
        self._keep(weights.down, formats[1])

        def take() -> None:
            pairs = (gate_up, weights.gate_up, weights.gate_up_bias), (down, weights.down, weights.down_bias)
            with self.packing():
                for (packed, whole, biases), form in zip(pairs, formats, strict=True):
                    quantized = self._taken(whole, form)
                    each = len(quantized) // count
                    for index, weight in enumerate(whole):
                        parts = quantized[index * each : (index + 1) * each]
                        self._put(packed, weight, None if biases is None else biases[index], form, parts, index=index)
                    num_rows = packed.num_out
                    reader = reader_of_layers(count, num_rows, partial(_read_layer, packed), is_exact=is_bf16(packed))
                    self.params.release_weights(whole, packed.num_bytes, reader)
                    if biases is not None:
                        reader = reader_of_layers(count, num_rows, partial(_read_biases, packed), is_exact=True)
                        self.params.release_weights(biases, 0, reader)
                experts.release_weights()

        self.params.when_given(weights.tensors, take)
        return gate_up, down

    def linear(
        self,
        linear: Linear,
        *,
        num_parts: int = 1,
        keeps: bool = False,
        format: Format | None = None,
        order: Tensor | None = None,
    ) -> Packed:
        """Pack a linear layer. Drops the original unless `keeps` is set, which means it is needed elsewhere too.

        Output i of the packed layer is output `order[i]` of the original; None: the outputs keep their order.
        """
        num_out, num_in = linear.weight.shape
        has_bias, kind = linear.bias is not None, format or self.format_of(linear.weight)
        packed = open_packed(self.arena, kind, num_out, num_in, has_bias=has_bias, num_parts=num_parts)
        self._keep(linear.weight, kind)

        def take() -> None:
            with self.packing():
                quantized = self._taken(linear.weight, kind)
                self._put(packed, linear.weight, linear.bias, kind, quantized, order=order)
                if keeps:
                    self.params.add_bytes(packed.num_bytes)
                else:
                    self.params.release_weights(linear.weight, packed.num_bytes, reader_of(packed, order))
                    linear.release_weights()

        self.params.when_given([linear.weight] if linear.bias is None else [linear.weight, linear.bias], take)
        return packed

    def feed_forward(self, gate_up: Linear, down: Linear) -> tuple[Packed, Packed]:
        """Pack the layers of a gated feed-forward. Drops the originals."""
        wide, deep = self._equal_inputs(gate_up.weight, down.weight)
        return self.linear(gate_up, num_parts=2, format=wide), self.linear(down, format=deep)

    def format_of(self, weight: Tensor, *, default: Format | None = None) -> Format:
        """Return the format of a parameter: the checkpoint's, if all parts of it are quantized alike enough.

        `default` None stands for that of all weights.
        """
        found = self._formats_in(weight)
        form = None if found is None else common_format(found)
        return default or self.format if form is None else form

    def _formats_in(self, weight: Tensor) -> list[GroupFormat] | None:
        """See `ParamSlots.formats_in`."""
        return self.params.formats_in(weight, self.formats)

    def _equal_inputs(self, first: Tensor, second: Tensor) -> tuple[Format, Format]:
        """Return the formats of two parameters, such that the output of the one can be the input of the other."""
        formats = self.format_of(first), self.format_of(second)
        return formats if inputs_of(formats[0]) == inputs_of(formats[1]) else ("bf16", "bf16")

    def _from_checkpoint(self, weight: Tensor, format: Format) -> bool:
        """Return whether a parameter is packed as the checkpoint has it."""
        found = self._formats_in(weight) if isinstance(format, GroupFormat) else None
        return found is not None and common_format(found) is not None

    def _keep(self, weight: Tensor, format: Format) -> None:
        if self._from_checkpoint(weight, format):
            self.params.keep_quantized(weight)

    def _taken(self, weight: Tensor, format: Format) -> list[QuantizedWeight]:
        """Return what `_keep` kept of a parameter, an item for each of its parts; empty if it kept nothing."""
        return self.params.take_quantized(weight) if self._from_checkpoint(weight, format) else []

    def _put(
        self,
        packed: Packed,
        weight: Tensor,
        bias: Tensor | None,
        format: Format,
        quantized: Sequence[QuantizedWeight],
        *,
        order: Tensor | None = None,
        index: int = 0,
    ) -> None:
        """Fill layer `index` of `packed` with the parts `quantized`, or with `weight` if there are none."""
        if order is not None:
            bias = None if bias is None else bias[order]
        if isinstance(format, GroupFormat):
            rows = stacked(quantized, format) if quantized else quantize(weight, format)
            packed.put_values(rows if order is None else rows.rows(order), bias, index=index)
        else:
            packed.put(weight if order is None else weight[order], bias, index=index)

    def ends(
        self, model: Decoder, head: Packed | None, embedding: VocabEmbedding | None
    ) -> tuple[Packed | None, Packed | None]:
        """Pack the head of `model`, unless `head` replaces it, and `embedding`, if it is quantized or the head.

        Returns the head and the embeddings. None stands for what the model does not have, or what is not packed.
        """
        if head is not None or model.head is None:
            return head, None if embedding is None else self.embedding(embedding)
        own, whole = model.head.weight, model.embedding
        default: Format = "int8" if isinstance(self.format, GroupFormat) else self.format
        if whole is None or whole.weight is not own:
            packed = self.linear(model.head, format=self.format_of(own, default=default))
            return packed, None if embedding is None else self.embedding(embedding)
        kind = self.format_of(own, default=default)
        shares = embedding is not None and self._embedding_format(own) == kind
        packed = self.linear(model.head, keeps=not shares, format=kind)
        if embedding is not None and shares:
            self.params.when_given([own], embedding.release_weights)
        return packed, packed if shares else None

    def embedding(self, embedding: VocabEmbedding) -> Packed | None:
        """Pack embeddings that the checkpoint has quantized, and drop the originals; None: it has not."""
        kind = self._embedding_format(embedding.weight)
        if kind == "bf16":
            return None
        packed = open_packed(self.arena, kind, *embedding.weight.shape)
        self._keep(embedding.weight, kind)

        def take() -> None:
            with self.packing():
                self._put(packed, embedding.weight, None, kind, self._taken(embedding.weight, kind))
                self.params.release_weights(embedding.weight, packed.num_bytes, reader_of(packed))
                embedding.release_weights()

        self.params.when_given([embedding.weight], take)
        return packed

    def _embedding_format(self, weight: Tensor) -> Format:
        """Return the format of embeddings: the checkpoint's if it is of integers, else bf16."""
        form = self.format_of(weight, default="bf16")
        return "bf16" if isinstance(form, GroupFormat) and form.is_float else form

    def halves(self, linear: Linear) -> tuple[Packed, Packed]:
        """Pack the first and the second half of a linear layer's inputs; the bias belongs to the second. Drops the
        original.
        """
        num_out, num_in = linear.weight.shape
        has_bias = linear.bias is not None
        packed = (
            open_packed(self.arena, self.format, num_out, num_in // 2),
            open_packed(self.arena, self.format, num_out, num_in // 2, has_bias=has_bias),
        )

        def take() -> None:
            with self.packing():
                for half, bias, weight in zip(packed, (None, linear.bias), linear.weight.chunk(2, 1), strict=True):
                    self._put(half, weight, bias, self.format, ())
                num_bytes = sum(half.num_bytes for half in packed)
                self.params.release_weights(linear.weight, num_bytes, reader_of_columns(packed))
                linear.release_weights()

        self.params.when_given([linear.weight] if linear.bias is None else [linear.weight, linear.bias], take)
        return packed


def _read_layer(packed: Packed, index: int, start: int, stop: int) -> Tensor:
    return packed_rows(packed, start, stop, index=index)


def _read_biases(packed: Packed, index: int, start: int, stop: int) -> Tensor:
    return packed_biases(packed, start, stop, index=index)


def _gates_last(op: Attention) -> Tensor:
    """Return the outputs of a q/k/v projection with gates in the order queries, keys, values, gates."""
    width = 2 * op.num_heads * op.spec.head_dim
    by_head = torch.arange(width).view(op.num_heads, 2, op.spec.head_dim)
    queries, gates = (by_head[:, part].flatten() for part in (0, 1))
    return torch.cat((queries, torch.arange(width, len(op.qkv.weight)), gates))


class AttentionInModel:
    """Implements `StateBackend` and `StepAttention` for models that attend on their own.

    `NativeDecoder` has attention in its program, and `TransformersModel` runs the code of transformers.

    `fold`: that of `NativeDecoder`; None for a model that keeps no pending tokens.
    """

    def __init__(self, fold: Callable[[IntArray, IntArray], None] | None = None) -> None:
        self._fold = fold

    def begin(self, batch: ForwardBatch) -> AttentionInModel:
        """See `AttentionBackend.begin`. Does nothing: the model reads the pages itself."""
        return self

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None."""

    def fold(self, slots: IntArray, counts: IntArray) -> None:
        """See `StateBackend.fold`."""
        assert self._fold is not None, "the model keeps no pending tokens"
        self._fold(slots, counts)

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Must not be called."""
        raise AssertionError("the model attends on its own")
