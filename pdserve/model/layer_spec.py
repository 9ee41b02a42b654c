"""What the layers of a decoder compute, in order, as data. Imports no torch.

A family reads it from the checkpoint's config (`families/`). `Decoder` builds its torch modules from it, and
`NativeDecoder` records its program over these modules in the same order.

A layer is a sequence of sublayers. Each one adds `op(norm(x))` to the hidden states `x`. A kind of operation is a class
of `Operation`. Each layer of a model has its own `DecoderLayerSpec`, so layers may be of different kinds.
"""

from __future__ import annotations

import dataclasses

from pdserve.model.rope import RopeSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Softmax attention of a token over its own and all earlier positions; query heads share KV heads (GQA).

    With `qk_norm` each head of Q and K has an RMS norm before the rotation. Sizes are of the whole model.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool

    @property
    def qkv_width(self) -> int:
        """Outputs of the q, k and v projections together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """SiLU-gated feed-forward: `down(silu(gate(x)) * up(x))`, with `intermediate_size` columns between."""

    intermediate_size: int
    bias: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Mixture of `num_experts` SiLU-gated feed-forwards of `intermediate_size` columns each, without biases.

    Each token is routed to `top_k` experts, weighted by router probability. With `norm_top_k` the weights of a token
    add up to 1.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_top_k: bool


Operation = AttentionSpec | MLPSpec | MoeSpec
"""What a sublayer computes. Planned kinds: sliding-window attention, MLA, linear attention with a state."""


@dataclasses.dataclass(frozen=True)
class SublayerSpec:
    """`x += op(norm(x))`. `norm` is the checkpoint name of the RMS norm, relative to the layer."""

    norm: str
    op: Operation


@dataclasses.dataclass(frozen=True)
class DecoderLayerSpec:
    """The sublayers of one layer, in order."""

    sublayers: tuple[SublayerSpec, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the sublayers, in order."""
        return tuple(sublayer.op for sublayer in self.sublayers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Checkpoint names of the tensors of one layer, without `.weight` and `.bias`. The defaults are Llama's.

    `{expert}` stands for the index of an expert. Norms of sublayers are named in `SublayerSpec`.
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"

    def under(self, prefix: str) -> LayerNames:
        """Return the names with `prefix` before each."""
        return LayerNames(**{name: prefix + value for name, value in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Checkpoint names of a family's tensors, without `.weight` and `.bias`. The defaults are Llama's.

    `layers` is the prefix of a layer's names; `{layer}` stands for its index. `layer` are the names after it.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers.{layer}."
    layer: LayerNames = LayerNames()
