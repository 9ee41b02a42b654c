"""A decoder computed by a program of the CPU kernels: one call per step, without Python between operations.

The executor factory makes it from a `Decoder`, preferably before the weights are loaded. Each layer's weights are then
packed as they arrive, and the originals are released. `bind` builds the program over the KV pool. An operation that
needs other ranks is a *sync point* (`SyncPoint`): the program runs up to it, Python runs its part on the program's
buffers, and the program continues.

    x = embedding                             float32, [tokens, hidden]
    the sublayers of each layer, in the order of its `DecoderLayerSpec`:
        attention   qkv = norm(x) W   place: heads into q and pages   mixed = attention   x += mixed W   [all_reduce]
        MLA         q, latent = norm(x) W   absorb, place: latents into pages   mixed = attention W   x += mixed W
        delta       inputs = norm(x) W   mixed = convolution, delta rule, gated norm   x += mixed W      [all_reduce]
        MLP         h = act(norm(x) Wg) * norm(x) Wu   x += h W                                          [reduce_sum]
        MoE         routes = top k of norm(x) W   x += sum of experts                                    [reduce_sum]
    samples = x at sample_index   logits = norm(samples) W

An output that has a norm of its own, or a sum over ranks, first goes to the buffer `part`, and is added then.

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
from pdserve.model.grouped_weights import GroupFormat
from pdserve.model.interface import LayerTaps, MoELayer
from pdserve.model.layers.dense import FeedForward, Linear, WholeQKNorm
from pdserve.model.layers.gated_delta import PendingTokens
from pdserve.model.lora import Adapters, LoraTarget
from pdserve.model.mla import MLA
from pdserve.model.named_weights import MemoryRange
from pdserve.model.native.latents import LatentProgram, norm_of, record_latents
from pdserve.model.native.lora import LoraSites
from pdserve.model.native.modules import PackedLinear
from pdserve.model.native.packer import (
    PackedAttention,
    PackedDelta,
    PackedMLA,
    PackedMLP,
    PackedOperation,
    PackedOutside,
    Packer,
)
from pdserve.model.native.record import LayerPlaces, RoutingBuffers, record_delta, record_moe
from pdserve.model.native.resources import Buffer, Threads
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


class NativeDecoder:
    """Implements `Model` by CPU kernels. Takes ownership of `model`: no other caller may use it afterwards.

    `bind` must be called after all weights are loaded and before `forward`. `packing` is a context around the packing
    of each layer. `head` replaces the model's own, see `beside`. `formats`: those of quantized weights that are packed
    as they are, by their names in the checkpoint.

    With `packs_embedding` the program reads embeddings in their packed form where the checkpoint has them as integers,
    and where they are the head in bf16. The originals are released, so nothing else may read them.
    """

    def __init__(
        self,
        model: Decoder,
        threads: Threads,
        level: str,
        format: Format,
        packing: Callable[[], AbstractContextManager[object]] = nullcontext,
        head: Packed | None = None,
        formats: Mapping[str, GroupFormat] | None = None,
        *,
        packs_embedding: bool = False,
    ) -> None:
        self._model, self._threads, self._level = model, threads, level
        known = {own: form for name, form in (formats or {}).items() for own in model.params.names_of(name)}
        self._packer = packer = Packer(Arena(), format, model.params, packing, known)
        self.argmax: Tensor | None = None
        """See `Model.argmax`. Not None for at most FEW_SAMPLES samples when the program has all their logits."""
        self._sync_points: list[SyncPoint] = []
        self._kv_write_ends: list[int] = []
        """By layer of this rank: number of operations up to the end of its write of KV or state."""
        self._layer_ends: list[int] = []
        """By layer of this rank: number of operations up to its end."""
        self._delta_ops: list[int] = []
        """The operations `Program.delta`."""
        self._adapted: Mapping[int, int] = {}
        self._tapped: tuple[int, ...] = ()
        self._taps: dict[int, Buffer] = {}
        self._pending: dict[GroupPool, list[PendingTokens | None]] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._layers = [[packer.operation(op) for op in layer.operations] for layer in model.layers]
        embedding = model.embedding if packs_embedding and self._embeds_itself else None
        self._head, self._embedding = packer.ends(model, head, embedding)

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

    def weight_memory(self) -> list[MemoryRange]:
        """See `Model.weight_memory`."""
        return [*self._model.params.memory(), *self._packer.arena.memory()]

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

    @property
    def threads(self) -> Threads:
        """The threads that run the program."""
        return self._threads

    def chooser(self) -> NativeChooser:
        """Make a token chooser that uses the same threads."""
        return NativeChooser(self._threads, self._level)

    def beside(self, model: Decoder, formats: Mapping[str, GroupFormat]) -> NativeDecoder:
        """Return a decoder of `model`, which takes hidden states, with the threads and number format of this one.

        It has the head of this one where `model` has none. It takes ownership of `model`, preferably before its weights
        are loaded.
        """
        packer, head = self._packer, self._head if model.head is None else None
        return NativeDecoder(model, self._threads, self._level, packer.format, packer.packing, head, formats)

    def pack(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Take over a linear layer whose weights are in `params`; returns it as a function of the kernels."""
        return PackedLinear(self._packer.linear(linear))

    def take_adapters(self, targets: Mapping[str, LoraTarget], first: int) -> LoraSites:
        """Give the layers LoRA adapters; see `LoraSites`. Called before `bind`. `first`: number of the first layer."""
        sites = LoraSites(self._model, self._layers, targets, first)
        self._adapted = sites.numbers
        return sites

    def tap_samples(self, layers: Sequence[int]) -> None:
        """Keep the outputs of `layers` at the samples of each step for `tapped`. Called before `bind`."""
        self._tapped = tuple(layers)

    def bind(self, pools: Sequence[GroupPool], max_drafts: int = 0, *, first: int | None = None) -> None:
        """Build the program over this rank's KV pools, one for each group of the layout. Called once.

        `max_drafts`: most draft tokens of a row. `first`: the number in the layout of this rank's first layer; None:
        that of its stage. Raises ConfigError where layers with a state keep fewer drafts.
        """
        states = [pool for pool in pools if pool.group.space is PageSpace.SLOTS]
        model, spec = self._model, self._model.spec
        by_channel = spec.has_channel_decay
        self._pending = {pool: pending_tokens(pool, max_drafts, channel_decay=by_channel) for pool in states}
        self._program = program = LatentProgram(self._threads, self._level)
        program.adapted = self._adapted
        self._x = program.buffer(spec.hidden_size)
        self._part = program.buffer(spec.hidden_size)
        self._normed = program.buffer(spec.hidden_size, torch.bfloat16)
        self._samples = program.buffer(spec.hidden_size, of_samples=True)
        self._embeds = program.buffer(spec.hidden_size) if spec.reads_embeddings else None
        if spec.moe is not None:
            self._routing = RoutingBuffers.of(program, spec.moe)
        coord = self.parallel.coord
        if first is None:
            first = layers_of(spec.num_layers, coord.shape.pp_size, coord.pp_rank).start
        self._places = places = LayerPlaces(program, model.rotaries, pools, first)
        for local, layer in enumerate(model.layers):
            for op in layer.operations:
                if isinstance(op, Attention | MLA):
                    places.heads_of(local, op)
                    places.index_of(local, op)
        embedding = model.embedding
        if self._embedding is not None:
            assert embedding is not None
            program.embed_packed(self._x, self._embedding, scale=embedding.scale)
        elif self._embeds_itself and embedding is not None:
            program.embed(self._x, embedding.weight, scale=embedding.scale)
        self._embedded = program.num_ops
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
            weight, eps = norm_of(model.norm)
            program.linear(self._samples, self._head, self._logits, norm=weight, eps=eps)
            if spec.logit_scale != 1.0 or spec.logit_softcap is not None:
                program.cap(self._logits, scale=spec.logit_scale, softcap=spec.logit_softcap or 0.0)
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
        if batch.embeds is not None and self._model.embedding is not None:
            embeds = batch.embeds
            embedded = SyncPoint(self._embedded, lambda n: embeds.put(program.view(self._x, n)))
            sync_points = [embedded, *sync_points]
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
        adapters: Adapters | None = None,
    ) -> list[int]:
        """Run a whole greedy decode step in one call.

        Args:
            facts: int64 `[2, rows]`: each row's table row, and the position of the token that it computes.
            tokens: int32 `[table rows, context]`, known tokens; new tokens are written there as well.
            pages: int32 `[table rows, pages of a row]`, the page table.
            window: the page table of WINDOW groups; None without such groups.
            slots: int32 `[table rows]`, the state slots; None for a model without states.
            folded, adapters: see `HostRows.num_folded` and `HostRows.adapters`.
        """
        last, chosen = self._head_to + 1, self._chosen
        return self._program.decode(facts, tokens, pages, last, chosen, window, slots, folded, adapters)

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

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `Model.final_norm`. `hidden` and the result are float32."""
        weight, eps = norm_of(self._model.norm)
        assert weight is not None, "only the last stage has the final norm"
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight.float(), eps)

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
        if isinstance(weights, PackedAttention):
            self._record_attention(local, sublayer, weights)
            return
        if isinstance(weights, PackedMLA):
            place, index = self._places.heads_of(local, weights.op), self._places.index_of(local, weights.op)
            mixed = record_latents(self._program, self._buffer, self._x, norm_of(sublayer.norm), weights, place, index)
            self._kv_write_ends.append(mixed.written)
            self._record_output(sublayer, mixed.buffer, weights.out)
            return
        if isinstance(weights, PackedDelta):
            self._record_delta(local, sublayer, weights)
            return
        weight, eps = norm_of(sublayer.norm)
        if isinstance(weights, PackedOutside):
            if weight is not None:
                self._program.norm(self._x, weight, eps, self._normed)
            self._add_sync_point(partial(self._add_outside, sublayer, weights.op))
            return
        group, scale = self.parallel.dp_attention_group, sublayer.residual_scale
        add = group.size == 1 and sublayer.post_norm is None and (isinstance(weights, PackedMLP) or scale == 1.0)
        out = self._x if add else self._part
        if isinstance(weights, PackedMLP):
            self._program.gated(self._x, weights.gate_up, norm=weight, eps=eps, act=weights.act)
            self._program.linear(None, weights.down, out, add=add, scale=scale if add else 1.0)
        else:
            record_moe(self._program, self._buffer, self._x, (weight, eps), weights, self._routing, out, add=add)
        if not add:
            self._add_part(sublayer, None if group.size == 1 else group.reduce_sum)

    def _record_attention(self, local: int, sublayer: Sublayer, weights: PackedAttention) -> None:
        """Record the projections of one layer's heads, and attention between them."""
        program, op, offset = self._program, weights.op, self._model.spec.norm_offset
        weight, eps = norm_of(sublayer.norm)
        (heads, index), width = self._places.heads_of(local, op), op.num_heads * op.spec.head_dim
        qkv, mixed = self._buffer("qkv", weights.qkv.num_out), self._buffer("mixed", width)
        of_embeddings, embedding_norm = weights.of_embeddings, sublayer.embedding_norm
        if of_embeddings is not None and embedding_norm is not None:
            of_embedding, its_eps = norm_of(embedding_norm)
            program.linear(self._embeds, of_embeddings, qkv, norm=of_embedding, eps=its_eps)
        program.linear(self._x, weights.qkv, qkv, norm=weight, eps=eps, add=of_embeddings is not None)
        q_norm, k_norm = (norm_of(each)[0] for each in (op.q_norm, op.k_norm))
        whole = op.whole_norms
        if whole is not None and self.parallel.coord.shape.tp_size == 1:
            q_norm, k_norm = (offset + each.float() if offset else each for each in whole.weights)
        elif whole is not None:
            self._add_sync_point(partial(self._norm_heads, whole, qkv))
        eps = self._model.spec.rms_norm_eps
        program.place(qkv, index, q_norm, k_norm, eps, whole=whole is not None, heads=heads)
        self._kv_write_ends.append(program.num_ops)
        window, softcap = op.spec.window or 0, op.spec.softcap or 0.0
        program.attend(index, mixed, window=window, softcap=softcap, sinks=op.sinks, heads=heads)
        if op.spec.output_gate:
            program.sigmoid(mixed, qkv, mixed, first=weights.qkv.num_out - width)
        self._record_output(sublayer, mixed, weights.out)

    def _record_delta(self, local: int, sublayer: Sublayer, weights: PackedDelta) -> None:
        """Record the projections of a GatedDeltaNet layer, and its recurrence between them."""
        pool, index = self._places.of(local)
        pending, norm = self._pending[pool][index], norm_of(sublayer.norm)
        mixed = record_delta(self._program, self._buffer, self._x, norm, weights, pool, index, pending)
        self._delta_ops.append(self._program.num_ops - 1)
        self._kv_write_ends.append(self._program.num_ops)
        self._record_output(sublayer, mixed, weights.out)

    def _record_output(self, sublayer: Sublayer, mixed: Buffer, out: Packed) -> None:
        """Record the output projection of a layer's heads."""
        is_whole = self.parallel.coord.shape.tp_size == 1
        if is_whole and sublayer.post_norm is None:
            self._program.linear(mixed, out, self._x, add=True, scale=sublayer.residual_scale)
        else:
            self._program.linear(mixed, out, self._part)
            self._add_part(sublayer, None if is_whole else self.parallel.all_reduce)

    def _add_part(self, sublayer: Sublayer, reduce: Callable[[Tensor], Tensor] | None) -> None:
        """Record: add `part`, which `reduce` sums over ranks before, to the hidden states; see `SublayerSpec`."""
        weight, eps = norm_of(sublayer.post_norm)
        adds = reduce is None or weight is not None or sublayer.residual_scale != 1.0
        if reduce is not None:
            self._add_sync_point(partial(self._reduce_part, reduce, None if adds else self._x))
        if adds:
            self._program.add(self._part, self._x, norm=weight, eps=eps, scale=sublayer.residual_scale)

    def _buffer(self, role: str, width: int) -> Buffer:
        """Return the buffer of a role; layers of equal width share it."""
        if (role, width) not in self._buffers:
            self._buffers[role, width] = self._program.buffer(width)
        return self._buffers[role, width]

    def _add_sync_point(self, action: Callable[[int], None]) -> None:
        """Run `action` at this point of the program."""
        self._sync_points.append(SyncPoint(self._program.num_ops, action))

    def _reduce_part(self, reduce: Callable[[Tensor], Tensor], to: Buffer | None, num_tokens: int) -> None:
        """Sum `part` over ranks, and add the sum to `to`; None: leave it in `part`."""
        part = self._program.view(self._part, num_tokens)
        if to is None:
            part.copy_(reduce(part))
        else:
            self._program.view(to, num_tokens).add_(reduce(part))

    def _norm_heads(self, norms: WholeQKNorm, qkv: Buffer, num_tokens: int) -> None:
        """Normalise the queries and keys of all ranks together."""
        heads = self._program.view(qkv, num_tokens)
        heads.copy_(norms(heads))

    def _tap(self, taps: LayerTaps, layer: int, num_tokens: int) -> None:
        """Hand the output of a layer to `taps`."""
        taps.put(layer, self._program.view(self._x, num_tokens))

    def _add_outside(self, sublayer: Sublayer, op: FeedForward, num_tokens: int) -> None:
        """Add a feed-forward output for which tokens travel between ranks."""
        x = self._program.view(self._x, num_tokens)
        normed = x.bfloat16() if sublayer.norm is None else self._program.view(self._normed, num_tokens)
        x.add_(sublayer.finished(op(normed)))


def _report_layer(on_layer: Callable[[int], None], layer: int, num_tokens: int) -> None:
    """Call `on_layer`; a `SyncPoint.action` after a layer's KV write."""
    on_layer(layer)
