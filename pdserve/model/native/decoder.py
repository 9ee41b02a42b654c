"""A decoder computed by a program of the CPU kernels: one call per step, without Python between operations.

The executor factory makes it from a `Decoder`, preferably before the weights are loaded. Each layer's weights are then
packed as they arrive, and the originals are released. `bind` builds the program over the KV pool. An operation that
needs other ranks is a *sync point* (`SyncPoint`): the program runs up to it, Python runs its part on the program's
buffers, and the program continues.

    x = embedding                             float32, [tokens, hidden]
    the sublayers of each layer, in the order of its `DecoderLayerSpec`:
        attention   qkv = norm(x) W   place: heads into q and pages   mixed = attention   x += mixed W   [all_reduce]
        delta       inputs = norm(x) W   mixed = convolution, delta rule, gated norm   x += mixed W      [all_reduce]
        MLP         h = silu(norm(x) Wg) * norm(x) Wu   x += h W                                         [reduce_sum]
        MoE         routes = top k of norm(x) W   x += sum of experts                                    [reduce_sum]
    samples = x at sample_index   logits = norm(samples) W

A new kind of operation needs a packed form in `packer` and a method here that records it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.base.parallel import layers_of
from pdserve.memory.layout import PageSpace
from pdserve.model.attention.interface import StepAttention
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.state_slots import fold_rows, pending_tokens
from pdserve.model.config import ModelSpec
from pdserve.model.decoder import Attention, Decoder, Sublayer
from pdserve.model.forward_batch import ForwardBatch, IntArray
from pdserve.model.interface import LayerTaps, MoELayer
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, MoeSpec, Operation
from pdserve.model.layers.dense import FeedForward, Linear, RMSNorm
from pdserve.model.layers.gated_delta import CONV_PLANES, PendingTokens
from pdserve.model.native.delta import DELTA_UNIT, DeltaShape, DeltaStates
from pdserve.model.native.packer import (
    PackedAttention,
    PackedDelta,
    PackedLinear,
    PackedMLP,
    PackedMoe,
    PackedOperation,
    PackedOutside,
    Packer,
)
from pdserve.model.native.program import MAX_GROUP, MAX_HEAD_DIM, Buffer, HeadShape, Program, Threads
from pdserve.model.native.sampling import NativeChooser
from pdserve.model.native.weights import Arena, Format, Packed
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots

FEW_SAMPLES = 16
"""Up to this many samples the program computes the argmax in every step, requested or not: the logits are still in the
caches of the threads that wrote them.
"""


@dataclasses.dataclass(frozen=True)
class SyncPoint:
    """A pause of the program: after the operations before `at`, `action` runs in Python with the number of tokens."""

    at: int
    action: Callable[[int], None]


def cannot_run(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot run this model; None when they can."""
    if device.type != "cpu":
        return f"the kernels are for the CPU, and the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    return next(filter(None, map(_cannot_compute, spec.operations)), None)


def _cannot_compute(op: Operation) -> str | None:
    """Return why the kernels cannot compute this operation; None when they can."""
    if isinstance(op, AttentionSpec):
        if op.head_dim % 2 or op.head_dim > MAX_HEAD_DIM:
            return f"heads of {op.head_dim} are odd or larger than {MAX_HEAD_DIM}"
        if op.num_heads > MAX_GROUP * op.num_kv_heads:
            return f"{op.num_heads // op.num_kv_heads} query heads share a KV head, more than {MAX_GROUP}"
        if op.sinks:
            return "its attention has sinks, whose weights the kernels do not get"
    if isinstance(op, GatedDeltaSpec) and (op.key_dim % DELTA_UNIT or op.value_dim % DELTA_UNIT):
        return f"key heads of {op.key_dim} and value heads of {op.value_dim} are not multiples of {DELTA_UNIT}"
    if isinstance(op, MoeSpec) and op.shared_intermediate_size and not op.shared_gate:
        return "it has a shared expert without a gate"
    return None


class NativeDecoder:
    """Implements `Model` by CPU kernels. Takes ownership of `model`: no other caller may use it afterwards.

    `bind` must be called after all weights are loaded and before `forward`. `packing` is a context around the packing
    of each layer. `head` replaces the model's own, see `beside`.
    """

    def __init__(
        self,
        model: Decoder,
        threads: Threads,
        level: str,
        format: Format,
        packing: Callable[[], AbstractContextManager[object]] = nullcontext,
        head: Packed | None = None,
    ) -> None:
        self._model, self._threads, self._level = model, threads, level
        self._packer = packer = Packer(Arena(), format, model.params, packing)
        self.argmax: Tensor | None = None
        """See `Model.argmax`. Not None for at most FEW_SAMPLES samples when the program has all their logits."""
        self._sync_points: list[SyncPoint] = []
        self._kv_write_ends: list[int] = []
        """By layer of this rank: number of operations up to the end of its write of KV or state."""
        self._layer_ends: list[int] = []
        """By layer of this rank: number of operations up to its end."""
        self._delta_ops: list[int] = []
        """The operations `Program.delta`."""
        self._tapped: tuple[int, ...] = ()
        self._taps: dict[int, Buffer] = {}
        self._pending: dict[GroupPool, list[PendingTokens | None]] = {}
        self._heads: dict[tuple[GroupPool, HeadShape, int], int] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._layers = [[packer.operation(op) for op in layer.operations] for layer in model.layers]
        self._head = head
        if head is None and model.head is not None:
            keeps = model.embedding is not None and model.embedding.weight is model.head.weight
            self._head = packer.linear(model.head, keeps=keeps)

    @property
    def spec(self) -> ModelSpec:
        """See `Model.spec`."""
        return self._model.spec

    @property
    def dtype(self) -> torch.dtype:
        """See `Model.dtype`. float32, as inside a stage, so that results do not depend on where a stage ends."""
        return torch.float32

    @property
    def params(self) -> ParamSlots:
        """See `Model.params`."""
        return self._model.params

    @property
    def parallel(self) -> Parallel:
        """See `Model.parallel`."""
        return self._model.parallel

    @property
    def moe_layers(self) -> Mapping[int, MoELayer]:
        """See `Model.moe_layers`."""
        return self._model.moe_layers

    @property
    def num_layers(self) -> int:
        """See `Model.num_layers`."""
        return len(self._layers)

    def chooser(self) -> NativeChooser:
        """Make a token chooser that uses the same threads."""
        return NativeChooser(self._threads, self._level)

    def beside(self, model: Decoder) -> NativeDecoder:
        """Return a decoder of `model`, which takes hidden states, with the threads and number format of this one.

        It has the head of this one where `model` has none. It takes ownership of `model`, preferably before its weights
        are loaded.
        """
        packer, head = self._packer, self._head if model.head is None else None
        return NativeDecoder(model, self._threads, self._level, packer.format, packer.packing, head)

    def pack(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Take over a linear layer whose weights are in `params`; returns it as a function of the kernels."""
        return PackedLinear(self._packer.linear(linear))

    def tap_samples(self, layers: Sequence[int]) -> None:
        """Keep the outputs of `layers` at the samples of each step for `tapped`. Called before `bind`."""
        self._tapped = tuple(layers)

    def bind(self, pools: Sequence[GroupPool], max_drafts: int = 0, *, first: int | None = None) -> None:
        """Build the program over this rank's KV pools, one for each group of the layout. Called once.

        `max_drafts`: most draft tokens of a row. `first`: the number in the layout of this rank's first layer; None:
        that of its stage. Raises ConfigError where layers with a state keep fewer drafts.
        """
        states = [pool for pool in pools if pool.group.space is PageSpace.SLOTS]
        self._pending = {pool: pending_tokens(pool, max_drafts) for pool in states}
        model, spec = self._model, self._model.spec
        self._program = program = Program(self._threads, self._level)
        self._x = program.buffer(spec.hidden_size)
        self._part = program.buffer(spec.hidden_size)
        self._normed = program.buffer(spec.hidden_size, torch.bfloat16)
        self._samples = program.buffer(spec.hidden_size, of_samples=True)
        self._embeds = program.buffer(spec.hidden_size) if spec.reads_embeddings else None
        if spec.moe is not None:
            self._scores, self._shares = program.buffer(spec.moe.num_experts), program.buffer(spec.moe.top_k)
            self._routes = program.buffer(spec.moe.top_k, torch.int64)
        coord = self.parallel.coord
        if first is None:
            first = layers_of(spec.num_layers, coord.shape.pp_size, coord.pp_rank).start
        self._places = {
            number - first: (pool, index) for pool in pools for index, number in enumerate(pool.group.layers)
        }
        for local, layer in enumerate(model.layers):
            for op in layer.operations:
                if isinstance(op, Attention):
                    self._add_heads(local, op)
        if self._embeds_itself and model.embedding is not None:
            program.embed(self._x, model.embedding.weight)
        for local, (layer, packed) in enumerate(zip(model.layers, self._layers, strict=True)):
            for sublayer, weights in zip(layer.sublayers, packed, strict=True):
                self._record(local, sublayer, weights)
            self._layer_ends.append(program.num_ops)
            if local in self._tapped:
                self._taps[local] = program.buffer(spec.hidden_size, of_samples=True)
                program.select(self._x, self._taps[local])
        self._body = program.num_ops
        if model.norm is not None and self._head is not None:
            program.select(self._x, self._samples)
            self._head_from = program.num_ops
            self._logits = program.buffer(self._head.num_out, of_samples=True)
            program.linear(self._samples, self._head, self._logits, norm=_weight(model.norm), eps=model.norm.eps)
            self._chosen = program.buffer(1, torch.int64, of_samples=True)
            self._head_to = program.num_ops
            program.argmax(self._logits, self._chosen)

    def idle(self) -> None:
        """See `Model.idle`."""
        self._model.idle()

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `Model.forward`. `attention` is not used: the program computes it."""
        program, num_tokens = self._program, batch.num_tokens
        program.begin(batch)
        if not self._embeds_itself:
            program.view(self._x, num_tokens).copy_(self._begins_with(batch, hidden))
        if self._embeds is not None:
            assert self._model.read_embedding is not None, "set the embedding that the layers read"
            program.view(self._embeds, num_tokens).copy_(self._model.read_embedding(batch.input_ids))
        sync_points = self._sync_points
        if on_layer is not None or taps is not None:
            added = [] if on_layer is None else self._layer_sync_points(on_layer)
            added += [] if taps is None else self._tap_sync_points(taps)
            sync_points = sorted(sync_points + added, key=lambda point: point.at)
        done = 0
        for point in sync_points:
            program.run(done, point.at)
            point.action(num_tokens)
            done = point.at
        if self._head is None or on_hidden is not None:
            program.run(done, self._body)
            done = self._body
        if self._head is None:
            return program.view(self._x, num_tokens).clone()
        if on_hidden is not None:
            on_hidden(program.view(self._x, num_tokens))
            program.begin(batch)
        num_samples = batch.sample_index.shape[0]
        has_argmax = num_samples <= FEW_SAMPLES and self.parallel.coord.shape.tp_size == 1
        program.run(done, self._head_to + has_argmax)
        self.argmax = program.copied(self._chosen, num_samples) if has_argmax else None
        return program.view(self._logits, num_samples)

    @property
    def max_native_rows(self) -> int:
        """Maximum rows of `decode`; 0 when a step needs Python or other ranks."""
        is_whole = self._embeds_itself and self._head is not None and self.parallel.coord.shape.num_ranks == 1
        return FEW_SAMPLES if is_whole and not self._sync_points else 0

    def decode(
        self,
        facts: IntArray,
        tokens: npt.NDArray[np.int32],
        pages: npt.NDArray[np.int32],
        window: npt.NDArray[np.int32] | None = None,
        slots: npt.NDArray[np.int32] | None = None,
        folded: IntArray | None = None,
    ) -> list[int]:
        """Run a whole greedy decode step in one call.

        Args:
            facts: int64 `[2, rows]`: each row's table row, and the position of the token that it computes.
            tokens: int32 `[table rows, context]`, known tokens; new tokens are written there as well.
            pages: int32 `[table rows, pages of a row]`, the page table.
            window: the page table of WINDOW groups; None without such groups.
            slots: int32 `[table rows]`, the state slots; None for a model without states.
            folded: int64 `[rows]`: see `HostRows.num_folded`; None: nothing is folded.
        """
        last = self._head_to + 1
        return self._program.decode(facts, tokens, pages, last, self._chosen, window=window, slots=slots, folded=folded)

    def tapped(self, num_rows: int) -> Tensor:
        """Return the outputs of the layers of `tap_samples` in the last `decode`, of `num_rows` rows.

        Side by side, float32 `[num_rows, layers * hidden_size]`, a copy.
        """
        return torch.cat([self._program.view(self._taps[layer], num_rows) for layer in self._tapped], 1)

    def fold(self, slots: IntArray, counts: IntArray) -> None:
        """See `StateBackend.fold`."""
        self._program.begin_fold(fold_rows(slots, counts))
        for op in self._delta_ops:
            self._program.run(op, op + 1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`. `hidden` is float32."""
        assert self._head is not None, "only the last stage has a head"
        self._program.begin_samples(len(hidden))
        self._program.view(self._samples, len(hidden)).copy_(hidden)
        self._program.run(self._head_from, self._head_to)
        return self._program.view(self._logits, len(hidden))

    @property
    def _embeds_itself(self) -> bool:
        """Whether the program looks tokens up; otherwise other ranks hold rows, or an earlier stage did it."""
        return self._model.embedding is not None and self.parallel.coord.shape.tp_size == 1

    def _begins_with(self, batch: ForwardBatch, hidden: Tensor | None) -> Tensor:
        """Return the hidden states that this stage starts from."""
        if self._model.embedding is not None:
            assert hidden is None, "the first stage takes tokens, not hidden states"
            return self._model.embedding(batch.input_ids)
        assert hidden is not None, "this stage takes hidden states"
        return hidden

    def _layer_sync_points(self, on_layer: Callable[[int], None]) -> list[SyncPoint]:
        """Return a sync point after each layer's KV write, which calls `on_layer`."""
        return [SyncPoint(at, partial(_report_layer, on_layer, layer)) for layer, at in enumerate(self._kv_write_ends)]

    def _tap_sync_points(self, taps: LayerTaps) -> list[SyncPoint]:
        """Return a sync point at the end of each tapped layer, behind those of the layer itself."""
        return [SyncPoint(self._layer_ends[layer], partial(self._tap, taps, layer)) for layer in taps.layers]

    def _record(self, local: int, sublayer: Sublayer, weights: PackedOperation) -> None:
        """Record one sublayer of this rank's layer `local`."""
        norm = sublayer.norm
        if isinstance(weights, PackedAttention):
            self._record_attention(local, sublayer, weights)
            return
        if isinstance(weights, PackedDelta):
            self._record_delta(local, norm, weights)
            return
        if isinstance(weights, PackedOutside):
            self._program.norm(self._x, _weight(norm), norm.eps, self._normed)
            self._add_sync_point(partial(self._add_outside, weights.op))
            return
        alone = self.parallel.dp_attention_group.size == 1
        out = self._x if alone else self._part
        if isinstance(weights, PackedMLP):
            self._program.gated(self._x, weights.gate_up, norm=_weight(norm), eps=norm.eps)
            self._program.linear(None, weights.down, out, add=alone)
        else:
            self._record_moe(norm, weights, out, add=alone)
        if not alone:
            self._add_sync_point(self._add_feed_forward)

    def _record_attention(self, local: int, sublayer: Sublayer, weights: PackedAttention) -> None:
        """Record the projections of one layer's heads, and attention between them."""
        program, op, norm = self._program, weights.op, sublayer.norm
        _, index = self._places[local]
        heads, width = self._add_heads(local, op), op.num_heads * op.spec.head_dim
        qkv, mixed = self._buffer("qkv", weights.qkv.num_out), self._buffer("mixed", width)
        of_embeddings, embedding_norm = weights.of_embeddings, sublayer.embedding_norm
        if of_embeddings is not None and embedding_norm is not None:
            program.linear(self._embeds, of_embeddings, qkv, norm=_weight(embedding_norm), eps=embedding_norm.eps)
        add = of_embeddings is not None
        program.linear(self._x, weights.qkv, qkv, norm=_weight(norm), eps=norm.eps, add=add)
        q_norm, k_norm = (None if each is None else _weight(each) for each in (op.q_norm, op.k_norm))
        program.place(qkv, index, q_norm, k_norm, norm.eps, heads=heads)
        self._kv_write_ends.append(program.num_ops)
        program.attend(index, mixed, window=op.spec.window or 0, softcap=op.spec.softcap or 0.0, heads=heads)
        if op.spec.output_gate:
            program.sigmoid(mixed, qkv, mixed, first=weights.qkv.num_out - width)
        self._record_output(mixed, weights.out)

    def _record_delta(self, local: int, norm: RMSNorm, weights: PackedDelta) -> None:
        """Record the projections of a GatedDeltaNet layer, and its recurrence between them."""
        program, op = self._program, weights.op
        pool, index = self._places[local]
        planes = {plane.name: pool.plane(index, number) for number, plane in enumerate(pool.group.planes)}
        conv_q, conv_k, conv_v = (planes[name] for name in CONV_PLANES)
        shape = DeltaShape(op.num_key_heads, op.num_value_heads, op.key_dim, op.value_dim, op.conv_weight.shape[1])
        inputs, mixed = self._buffer("delta", shape.width), self._buffer("mixed", shape.value_width)
        program.linear(self._x, weights.project, inputs, norm=_weight(norm), eps=norm.eps)
        self._delta_ops.append(program.num_ops)
        program.delta(
            inputs, shape, DeltaStates((conv_q, conv_k, conv_v), planes["state"], self._pending[pool][index]),
            op.conv_weight, -op.a_log.float().exp(), op.dt_bias, op.norm_weight, op.eps, mixed,
        )  # fmt: skip
        self._kv_write_ends.append(program.num_ops)
        self._record_output(mixed, weights.out)

    def _record_output(self, mixed: Buffer, out: Packed) -> None:
        """Record the output projection of a layer's heads."""
        if self.parallel.coord.shape.tp_size == 1:
            self._program.linear(mixed, out, self._x, add=True)
        else:
            self._program.linear(mixed, out, self._part)
            self._add_sync_point(self._add_attention)

    def _add_heads(self, local: int, op: Attention) -> int:
        """Return the program's number of this layer's heads; layers with equal heads over one pool share it."""
        pool, _ = self._places[local]
        group = pool.group
        of_window = group.space is PageSpace.WINDOW
        shape = HeadShape(
            group.num_layers, op.num_heads, group.num_kv_heads, group.page_tokens, group.head_dim, of_window
        )
        key = (pool, shape, op.rotary)
        if key not in self._heads:
            number = self._program.add_heads(shape, pool.pages)
            rotary = self._model.rotaries[op.rotary]
            self._program.angles(rotary.inverse, rotary.factor, heads=number)
            self._heads[key] = number
        return self._heads[key]

    def _buffer(self, role: str, width: int) -> Buffer:
        """Return the buffer of a role; layers of equal width share it."""
        if (role, width) not in self._buffers:
            self._buffers[role, width] = self._program.buffer(width)
        return self._buffers[role, width]

    def _record_moe(self, norm: RMSNorm, weights: PackedMoe, out: Buffer, *, add: bool) -> None:
        """Record the router and the experts of one layer. `out` may be `x`, so what reads `x` comes first."""
        program, op, shared, weight = self._program, weights.op, weights.shared, _weight(norm)
        program.linear(self._x, weights.router, self._scores, norm=weight, eps=norm.eps)
        program.route(self._scores, self._routes, self._shares, normalise=op.router.moe.norm_top_k)
        if shared is not None:
            mixed, gate = self._buffer("shared", out.width), self._buffer("shared_gate", 1)
            program.gated(self._x, shared.gate_up, norm=weight, eps=norm.eps)
            program.linear(None, shared.down, mixed)
            program.linear(self._x, shared.router, gate, norm=weight, eps=norm.eps)
        program.experts(
            self._x, weights.gate_up, weights.down, self._routes, self._shares, out,
            norm=weight, eps=norm.eps, counts=op.counts, add=add,
        )  # fmt: skip
        if shared is not None:
            program.sigmoid(mixed, gate, out, add=True)

    def _add_sync_point(self, action: Callable[[int], None]) -> None:
        """Run `action` at this point of the program."""
        self._sync_points.append(SyncPoint(self._program.num_ops, action))

    def _add_attention(self, num_tokens: int) -> None:
        """Add the attention output, summed over the tensor ranks, to the hidden states."""
        part = self._program.view(self._part, num_tokens)
        self._program.view(self._x, num_tokens).add_(self.parallel.all_reduce(part))

    def _add_feed_forward(self, num_tokens: int) -> None:
        """Add the feed-forward output, summed over the ranks of `Parallel.dp_attention_group`, to the hidden states."""
        part = self._program.view(self._part, num_tokens)
        self._program.view(self._x, num_tokens).add_(self.parallel.dp_attention_group.reduce_sum(part))

    def _tap(self, taps: LayerTaps, layer: int, num_tokens: int) -> None:
        """Hand the output of a layer to `taps`."""
        taps.put(layer, self._program.view(self._x, num_tokens))

    def _add_outside(self, op: FeedForward, num_tokens: int) -> None:
        """Add a feed-forward output for which tokens travel between ranks."""
        normed = self._program.view(self._normed, num_tokens)
        self._program.view(self._x, num_tokens).add_(op(normed))


def _weight(norm: RMSNorm) -> Tensor:
    """Return what a norm multiplies by."""
    return norm.offset + norm.weight.float() if norm.offset else norm.weight


def _report_layer(on_layer: Callable[[int], None], layer: int, num_tokens: int) -> None:
    """Call `on_layer`; a `SyncPoint.action` after a layer's KV write."""
    on_layer(layer)
