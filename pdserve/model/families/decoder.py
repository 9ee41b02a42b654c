"""The grouped-query decoder: Llama, Qwen2, Qwen3 dense, told apart by options of `ModelSpec`.

Built by the loader, which fills `params`; run by the executor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.memory.layout import GroupKind, KVGroup, KVLayout
from pdserve.model.attention.interface import StepAttention
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.kernels import FastKernels, Kernels
from pdserve.model.layers.linear import Linear
from pdserve.model.layers.norm import RMSNorm
from pdserve.model.layers.rotary import Rotary, rotate
from pdserve.model.params import ParamSlots


def kv_layout(spec: ModelSpec, page_tokens: int, dtype: str) -> KVLayout:
    """What this family caches: one FULL group of all layers."""
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
    """The whole model. Weights are allocated here, uninitialised, and filled through `params`.

    `kernels` are the library's fastest when absent.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        kernels = kernels or FastKernels()
        self.spec = spec
        self.params = ParamSlots(dtype, device)
        self._rotary = Rotary(spec.rope, spec.head_dim, dtype, device)
        self._embedding = self.params.new("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [DecoderLayer(spec, index, self.params, kernels) for index in range(spec.num_layers)]
        self._norm = RMSNorm(self.params.new("model.norm.weight", spec.hidden_size), spec.rms_norm_eps)
        if spec.tied_embeddings:
            self.params.ignore("lm_head.weight")
            head = self._embedding
        else:
            head = self.params.new("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self._head = Linear(kernels, head)

    def forward(
        self, batch: ForwardBatch, attention: StepAttention, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Run all layers; logits of the tokens at `batch.sample_index`: float32 `[S, vocab_size]`.

        `on_layer(i)` is called once layer i's KV is written, or its writing enqueued on a device that has a queue.
        """
        x = F.embedding(batch.input_ids, self._embedding)
        cos, sin = self._rotary.tables(batch.positions)
        for index, layer in enumerate(self._layers):
            x = layer(x, cos, sin, attention)
            if on_layer is not None:
                on_layer(index)
        x = self._norm(x.index_select(0, batch.sample_index))
        return self._head(x).float()


class DecoderLayer:
    """Attention and feed-forward, each normalised before and added to what came in."""

    def __init__(self, spec: ModelSpec, index: int, params: ParamSlots, kernels: Kernels) -> None:
        prefix = f"model.layers.{index}."
        self._kernels = kernels
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        parts = ((attn + "q_proj", q_size), (attn + "k_proj", kv_size), (attn + "v_proj", kv_size))
        self._index, self._heads, self._kv_heads = index, spec.num_heads, spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._qkv = _linear(kernels, params, parts, spec.hidden_size, spec.qkv_bias)
        self._out = _linear(kernels, params, ((attn + "o_proj", spec.hidden_size),), q_size, spec.o_bias)
        gate_up = ((mlp + "gate_proj", spec.intermediate_size), (mlp + "up_proj", spec.intermediate_size))
        self._gate_up = _linear(kernels, params, gate_up, spec.hidden_size, spec.mlp_bias)
        down = ((mlp + "down_proj", spec.hidden_size),)
        self._down = _linear(kernels, params, down, spec.intermediate_size, spec.mlp_bias)
        eps = spec.rms_norm_eps
        self._input_norm = RMSNorm(params.new(prefix + "input_layernorm.weight", spec.hidden_size), eps)
        self._post_norm = RMSNorm(params.new(prefix + "post_attention_layernorm.weight", spec.hidden_size), eps)
        self._q_norm = self._k_norm = None
        if spec.qk_norm:
            self._q_norm = RMSNorm(params.new(attn + "q_norm.weight", spec.head_dim), eps)
            self._k_norm = RMSNorm(params.new(attn + "k_norm.weight", spec.head_dim), eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """`[N, hidden]` to `[N, hidden]`; `x` is overwritten."""
        x += self._attention(self._input_norm(x), cos, sin, attention)
        gate, up = self._gate_up(self._post_norm(x)).chunk(2, -1)
        x += self._down(self._kernels.swiglu(gate, up))
        return x

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """The attention half, `[N, hidden]`."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        q_and_k, v = heads[:, : self._heads + self._kv_heads], heads[:, self._heads + self._kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            q_and_k = torch.cat((self._q_norm(q_and_k[:, : self._heads]), self._k_norm(q_and_k[:, self._heads :])), 1)
        q_and_k = rotate(q_and_k, cos, sin)
        mixed = attention.attend(self._index, q_and_k[:, : self._heads], q_and_k[:, self._heads :], v)
        return self._out(mixed)


def _linear(
    kernels: Kernels, params: ParamSlots, parts: tuple[tuple[str, int], ...], num_in: int, bias: bool
) -> Linear:
    """One layer that stacks the checkpoint's `parts` (`(name, rows)`)."""
    weight = params.stacked(tuple((f"{name}.weight", rows) for name, rows in parts), num_in)
    biases = params.stacked(tuple((f"{name}.bias", rows) for name, rows in parts)) if bias else None
    return Linear(kernels, weight, biases)
