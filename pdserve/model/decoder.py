"""The grouped-query decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE, distinguished by options of `ModelSpec`.

Built by the loader, which fills `params`; run by the executor. A rank of a split model (`Parallel`) has its
stage's layers, its share of their heads and feed-forward columns, and its share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.base.parallel import RankCoord, kv_heads_of, layers_of, part_of
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout
from pdserve.model.attention.interface import Heads, StepAttention
from pdserve.model.config import ModelSpec
from pdserve.model.dp_attention import DPAttentionGroup
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import Mixture
from pdserve.model.layers.dense import (
    DenseMLP,
    FeedForward,
    Linear,
    Outputs,
    RMSNorm,
    VocabEmbedding,
    column_linear,
    row_linear,
    vocab_rows,
)
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.layers.kernels import FastKernels, Kernels
from pdserve.model.layers.moe import TPMoE
from pdserve.model.layers.rotary import Rotary
from pdserve.model.parallel import Parallel, SingleRank
from pdserve.model.params import ParamSlots
from pdserve.model.placement import ExpertMap


def kv_layout(spec: ModelSpec, page_tokens: int, dtype: str) -> KVLayout:
    """Return the KV layout of this family: one FULL group of all layers."""
    group = KVGroup(
        name="full",
        kind=GroupKind.FULL,
        num_layers=spec.num_layers,
        page_tokens=page_tokens,
        num_kv_heads=spec.num_kv_heads,
        num_kv_heads_total=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )
    return KVLayout((group,))


class Decoder:
    """Implements `Model` with torch. Weights are allocated here, uninitialised, and filled through `params`.

    `kernels` None selects `FastKernels`. `parallel` None means the rank has the whole model. With `placement` each
    rank has whole experts; with None it has a part of every expert.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        parallel: Parallel | None = None,
        placement: ExpertMap | None = None,
    ) -> None:
        self._kernels = kernels = kernels or FastKernels()
        self.spec = spec
        self.dtype = dtype
        self.params = ParamSlots(dtype, device)
        self.parallel = parallel or SingleRank()
        self._place = place = self.parallel.place
        self.rotary = Rotary(spec.rope, spec.head_dim, dtype, device)
        embedding = self._embedding_rows()
        mine = layers_of(spec.num_layers, place.shape.pp_size, place.pp_rank)
        self.layers = [
            DecoderLayer(spec, index, local, self.params, kernels, self.parallel, placement)
            for local, index in enumerate(mine)
        ]
        self.moe_layers = {
            index: layer.mlp for index, layer in zip(mine, self.layers, strict=True) if isinstance(layer.mlp, Mixture)
        }
        """This rank's feed-forward layers with experts, by index in the model."""
        self.params.ignore_under(f"model.layers.{index}." for index in range(spec.num_layers) if index not in mine)
        self.embedding: VocabEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if embedding is not None and place.is_first_stage:
            self.embedding = VocabEmbedding(embedding, spec.vocab_size, self.parallel)
        if place.is_last_stage:
            self.norm = RMSNorm(self.params.new("model.norm.weight", spec.hidden_size), spec.rms_norm_eps, kernels)
        else:
            self.params.ignore("model.norm.weight")
        head = self._head_rows(embedding)
        if head is not None:
            self.head = Linear(kernels, head)

    @property
    def num_layers(self) -> int:
        """Number of layers on this rank."""
        return len(self.layers)

    @property
    def best(self) -> None:
        """See `Model.best`. Always None."""

    def idle(self) -> None:
        """See `Model.idle`."""
        nothing = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.params.device)
        for layer in self.layers:
            layer.mlp(nothing)

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """See `Model.forward`."""
        if self.embedding is not None:
            assert hidden is None, "the first stage takes tokens, not hidden states"
            x = self.embedding(batch.input_ids)
        else:
            assert hidden is not None, "this stage takes hidden states"
            x = hidden
        rotary = self.rotary
        cos, sin = self._kernels.angles(batch.positions, rotary.inverse, rotary.factor, rotary.dtype)
        rest: Tensor | None = None
        for index, layer in enumerate(self.layers):
            rest = layer(x, rest, cos, sin, attention)
            if on_layer is not None:
                on_layer(index)
        if rest is not None:
            x += rest
        if self.norm is None or self.head is None:
            return x
        if on_hidden is not None:
            on_hidden(x)
        return self.head(self.norm(x.index_select(0, batch.sample_index)))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        return self.head(self.norm(hidden)).float()

    def _embedding_rows(self) -> Tensor | None:
        """Allocate embedding rows on the first stage, and on the last when the head is tied; None elsewhere."""
        name, place = "model.embed_tokens.weight", self._place
        if place.is_first_stage or (place.is_last_stage and self.spec.tied_embeddings):
            return vocab_rows(self.params, name, self.spec.vocab_size, self.spec.hidden_size, place)
        self.params.ignore(name)
        return None

    def _head_rows(self, embedding: Tensor | None) -> Tensor | None:
        """Return rows of the head on the last stage; None elsewhere."""
        name, place = "lm_head.weight", self._place
        if self.spec.tied_embeddings or not place.is_last_stage:
            self.params.ignore(name)
            return embedding if place.is_last_stage else None
        return vocab_rows(self.params, name, self.spec.vocab_size, self.spec.hidden_size, place)


class DecoderLayer:
    """A transformer layer: attention and feed-forward, each with a norm before it and a residual sum after it.

    `index` is the layer's index in the model, `local` its index on this rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        local: int,
        params: ParamSlots,
        kernels: Kernels,
        parallel: Parallel,
        placement: ExpertMap | None,
    ) -> None:
        self._parallel, self._local, self._head_dim = parallel, local, spec.head_dim
        prefix = f"model.layers.{index}."
        attn = prefix + "self_attn."
        q, kv = shares(spec, parallel.place)
        self.num_heads, self.num_kv_heads = len(q), len(kv)
        queries = _by_head(attn + "q_proj", spec.num_heads, q, spec.head_dim)
        qkv = (queries, *(_by_head(attn + name, spec.num_kv_heads, kv, spec.head_dim) for name in ("k_proj", "v_proj")))
        self.qkv = column_linear(kernels, params, qkv, spec.hidden_size, spec.qkv_bias)
        first = parallel.place.tp_rank == 0
        self.out = row_linear(
            kernels, params, attn + "o_proj", spec.hidden_size, queries, bias=spec.o_bias, adds_bias=first
        )
        self.mlp = _feed_forward(spec, index, prefix + "mlp.", params, kernels, parallel.wide, placement)
        eps = spec.rms_norm_eps
        self.input_norm = RMSNorm(params.new(prefix + "input_layernorm.weight", spec.hidden_size), eps, kernels)
        self.post_norm = RMSNorm(params.new(prefix + "post_attention_layernorm.weight", spec.hidden_size), eps, kernels)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(params.new(attn + "q_norm.weight", spec.head_dim), eps, kernels)
            self.k_norm = RMSNorm(params.new(attn + "k_norm.weight", spec.head_dim), eps, kernels)

    def __call__(self, x: Tensor, rest: Tensor | None, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """Run one layer over `x + rest`, `[N, hidden]` each; `rest` None means zero.

        Returns the feed-forward output without adding it to `x`; `x` holds all earlier terms. The next norm adds the
        two, which fuses the sum with the norm.
        """
        normed = self.input_norm(x) if rest is None else self.input_norm.of_sum(x, rest)
        mixed = self._parallel.all_reduce(self._attention(normed, cos, sin, attention))
        return self.mlp(self.post_norm.of_sum(x, mixed))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """Run the attention half for this rank's heads: `[N, hidden]`."""
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        found = Heads(heads, self.num_heads, self.num_kv_heads, self.q_norm, self.k_norm, cos, sin)
        return self.out(attention.attend(self._local, found))


def shares(spec: ModelSpec, place: RankCoord) -> tuple[range, range]:
    """Return query heads and KV heads of a tensor rank; its query heads belong to its KV heads."""
    tp_size, rank = place.shape.tp_size, place.tp_rank
    return part_of(spec.num_heads, tp_size, rank), kv_heads_of(spec.num_kv_heads, tp_size, rank)


def _feed_forward(
    spec: ModelSpec,
    index: int,
    prefix: str,
    params: ParamSlots,
    kernels: Kernels,
    wide: DPAttentionGroup,
    placement: ExpertMap | None,
) -> FeedForward:
    """Build the feed-forward of layer `index`."""
    hidden_size, moe = spec.hidden_size, spec.moe
    if moe is None or index not in moe.layers:
        return DenseMLP(kernels, params, prefix, hidden_size, spec.intermediate_size, spec.mlp_bias, wide)
    if placement is None:
        return TPMoE(kernels, params, prefix, hidden_size, moe, wide)
    return ExpertParallelMoe(kernels, params, prefix, hidden_size, moe, wide, placement.rows[index])


def _by_head(name: str, num_heads: int, held: range, head_dim: int) -> Outputs:
    """Return the outputs of a projection to heads. The rank holds heads `held`."""
    return Outputs(name, num_heads * head_dim, range(held.start * head_dim, held.stop * head_dim))
