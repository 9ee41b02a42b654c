"""What the layers of a decoder compute, in order, as data. Imports no torch.

A family reads it from the checkpoint's config (`families/`). `Decoder` builds its torch modules from it, and
`NativeDecoder` records its program over these modules in the same order.

A layer is a sequence of sublayers. Each one adds `op(norm(x))` to the hidden states `x`. A kind of operation is a class
of `Operation`. Each layer of a model has its own `DecoderLayerSpec`, so layers may be of different kinds. Fields that
are an `option` have no part in `ModelSpec.digest` where they have their defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdserve.model.fields import ModelFacts, option
from pdserve.model.rope import RopeSpec


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSpec(ModelFacts):
    """Softmax attention of a token over its own and earlier positions; query heads share KV heads (GQA).

    `rope` None: nothing is rotated. With `qk_norm` each head of Q and K has an RMS norm before the rotation; with
    `whole_qk_norm` too, that norm is over all heads of Q together, and over those of K. `window`: positions that a
    token sees, its own included; None: all. `scale` multiplies the scores; None: `head_dim ** -0.5`. `softcap`: a
    scaled score s becomes `softcap * tanh(s / softcap)`; None: it stays. With `sinks` each query head has a learned
    score of a key without a value. With `output_gate` the q projection gives a query and a gate for each head, and the
    head's output is multiplied by `sigmoid(gate)`. Sizes are of the whole model.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    scale: float | None = option(None)
    whole_qk_norm: bool = option(False)

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def q_width(self) -> int:
        """Outputs of the q projection: queries, and gates with `output_gate`."""
        return self.num_heads * self.head_dim * (2 if self.output_gate else 1)

    @property
    def head_order(self) -> tuple[int, ...] | None:
        """The checkpoint's dimension of each dimension of a head of Q and K; None: they are the same.

        Of interleaved pairs the first dimensions come first, so that the halves of the rotated part are the pairs.
        """
        if self.rope is None or not self.rope.interleaved:
            return None
        assert not self.output_gate, "q has gates between its heads"
        rotated = self.rope.rotary_dim(self.head_dim)
        return (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, self.head_dim))

    @property
    def qkv_width(self) -> int:
        """Outputs of the q, k and v projections together."""
        return self.q_width + 2 * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GatedDeltaSpec(ModelFacts):
    """Gated delta rule (arXiv:2412.06464): linear attention with a recurrent state instead of keys and values.

    A depthwise causal convolution over the last `conv_kernel` tokens and SiLU give Q, K and V. Each value head has a
    state `[key_dim, value_dim]`. Value heads `i * r` to `i * r + r - 1` share key head i, r being
    `num_value_heads / num_key_heads`. Its output has an RMS norm with plain weights, times `silu(z)`.

    With `interleaved` the checkpoint has the projections `delta_qkvz` and `delta_ba` of `LayerNames`, whose rows are
    grouped by key head; without it `delta_qkv`, `delta_z`, `delta_b` and `delta_a`. Sizes are of the whole model.

    With `channel_decay` it is Kimi Delta Attention (KDA, arXiv:2510.26692): each of the `key_dim` rows of a state has a
    decay of its own. Decays are `delta_f_b` of `delta_f_a(x)`, and z is `delta_g_b` of `delta_g_a(x)`, which have
    `key_dim` outputs. The output is multiplied by `sigmoid(z)`. The checkpoint has `q`, `k`, `v` and `delta_b`, and a
    convolution for each of q, k and v.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    interleaved: bool = False
    channel_decay: bool = option(False)

    @property
    def key_width(self) -> int:
        """Outputs of the K projection, and of the Q projection."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Outputs of the V projection."""
        return self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class IndexSpec(ModelFacts):
    """DeepSeek sparse attention (DSA): a token attends to the `top_k` earlier tokens with the highest index scores.

    The score of a token is the sum over `num_heads` heads of `max(0, q k * head_dim ** -0.5)`, times a weight of the
    head. Queries come from the normed `q_a(x)`, keys, which all heads share and which have a layer norm, and weights
    from `x`. The first dimensions of queries and keys are rotated, as many as in the layer's own ones; `interleaved` is
    that of `RopeSpec`. With `shared` the layer has no index, and its tokens attend to those that the last layer before
    it with an index has selected.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    shared: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MLASpec(ModelFacts):
    """Multi-head latent attention (arXiv:2405.04434): one latent a token stands for the keys and values of all heads.

    A latent has two parts, `kv_a(x)` of `kv_lora_rank + rope_dim`. `kv_b` expands the first part, which has an RMS
    norm, to `nope_dim` dimensions of a key and to the `value_dim` values of each head. The second part is `rope_dim`
    rotated dimensions of the keys, the same for all heads. Queries are `q(x)`, or with `q_lora_rank` they are `q_b` of
    the normed `q_a(x)`: `nope_dim + rope_dim` for each head, the last ones rotated. `rope` None: nothing is rotated.

    With `rope.interleaved` the checkpoint has the two dimensions of a pair side by side. They are parted in the
    rotation, or with `caches_pairs` they stay so in the cache. With `bias` the linear layers `q_a`, `kv_a` and `o` have
    biases. `scale` multiplies the scores; `norm_eps` belongs to the norms of `q_a` and `kv_a`. With `index` a token
    attends to the tokens that it selects.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    scale: float
    bias: bool = False
    caches_pairs: bool = False
    norm_eps: float = 1e-6
    index: IndexSpec | None = option(None)

    @property
    def key_dim(self) -> int:
        """Dimensions of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Dimensions of a latent in the cache."""
        return self.kv_lora_rank + self.rope_dim


Activation = Literal["silu", "gelu_tanh"]
"""Activation of the gate of a feed-forward."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MLPSpec(ModelFacts):
    """Gated feed-forward: `down(act(gate(x)) * up(x))`, with `intermediate_size` columns between.

    `act`: SiLU, or GELU in its approximation by tanh.
    """

    intermediate_size: int
    bias: bool
    act: Activation = option("silu")


ExpertActivation = Literal["silu", "gpt_oss"]
"""How an expert combines gate and up; see `MoeSpec`."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MoeSpec(ModelFacts):
    """Mixture of `num_experts` gated feed-forwards of `intermediate_size` columns each.

    Each token is routed to `top_k` experts, weighted by router probability: `scoring` of the router's outputs, which
    have a bias with `router_bias`. With `norm_top_k` the weights of a token add up to 1; they are then multiplied by
    `routed_scale`. With `correction_bias` the router has one more bias, which is added to the probabilities for the
    choice of experts only. The experts are `num_groups` groups of equal size, and a token's experts are those of its
    `top_groups` best groups: with sigmoid scores by the sum of a group's two best, with softmax by its best.

    `act` is the activation of an expert. "silu": `silu(gate) * up`. "gpt_oss": `(up + 1) * gate * sigmoid(1.702 *
    gate)`, where with `act_limit` gate is at most that, and up between it and its negative; None: no limit. With
    `expert_bias` the linear layers of experts have biases. With `interleaved` the checkpoint has all experts of a layer
    in one tensor `[num_experts, in, out]` for gate and up, whose outputs are gate and up in turn, and one for down.

    Every token also goes through a shared expert of `shared_intermediate_size` columns; 0: there is none. With
    `shared_gate` its output is multiplied by the sigmoid of a linear layer with one output.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_top_k: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    act: ExpertActivation = option("silu")
    act_limit: float | None = option(None)
    scoring: Literal["softmax", "sigmoid"] = option("softmax")
    correction_bias: bool = option(False)
    num_groups: int = option(1)
    top_groups: int = option(1)
    routed_scale: float = option(1.0)
    router_bias: bool = option(False)
    expert_bias: bool = option(False)
    interleaved: bool = option(False)


Operation = AttentionSpec | MLASpec | GatedDeltaSpec | MLPSpec | MoeSpec
"""What a sublayer computes."""


@dataclasses.dataclass(frozen=True, repr=False)
class SublayerSpec(ModelFacts):
    """`x += residual_scale * post_norm(op(norm(x)))`.

    `norm` and `post_norm` are the checkpoint names of the RMS norms, relative to the layer; None: there is none.

    With `embedding_norm`, the name of one more RMS norm, the operation is an attention that reads
    `[embedding_norm(e) ; norm(x)]`, twice as wide, `e` being the embeddings of the tokens. The layer of an EAGLE-3 head
    has one. It is not in `repr`, from which `ModelSpec.digest` is made: peers of other versions have equal digests.
    """

    norm: str | None
    op: Operation
    embedding_norm: str | None = dataclasses.field(default=None, repr=False)
    post_norm: str | None = option(None)
    residual_scale: float = option(1.0)


@dataclasses.dataclass(frozen=True, repr=False)
class DecoderLayerSpec(ModelFacts):
    """The sublayers of one layer, in order."""

    sublayers: tuple[SublayerSpec, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the sublayers, in order."""
        return tuple(sublayer.op for sublayer in self.sublayers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Checkpoint names of the tensors of one layer, without `.weight` and `.bias`. The defaults are Llama's and Qwen's.

    `{expert}` stands for the index of an expert. Complete names are `sinks`, `correction`, `delta_a_log` and
    `delta_dt_bias`, and the four that begin with `experts_`, which some checkpoints have in place of one tensor for
    each expert. `qkv` and `gate_up` are layers that a checkpoint may have in place of `q`, `k` and `v`, and of `gate`
    and `up`. Norms of sublayers are named in `SublayerSpec`.
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    qkv: str = "self_attn.qkv_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = "mlp.gate_up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    experts_gate_up: str = "mlp.experts.gate_up_proj"
    experts_down: str = "mlp.experts.down_proj"
    experts_gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    experts_down_bias: str = "mlp.experts.down_proj_bias"
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_router: str = "mlp.shared_expert_gate"
    delta_qkvz: str = "linear_attn.in_proj_qkvz"
    delta_ba: str = "linear_attn.in_proj_ba"
    delta_qkv: str = "linear_attn.in_proj_qkv"
    delta_z: str = "linear_attn.in_proj_z"
    delta_b: str = "linear_attn.in_proj_b"
    delta_a: str = "linear_attn.in_proj_a"
    delta_conv: str = "linear_attn.conv1d"
    delta_a_log: str = "linear_attn.A_log"
    delta_dt_bias: str = "linear_attn.dt_bias"
    delta_conv_q: str = "self_attn.q_conv1d"
    delta_conv_k: str = "self_attn.k_conv1d"
    delta_conv_v: str = "self_attn.v_conv1d"
    delta_f_a: str = "self_attn.f_a_proj"
    delta_f_b: str = "self_attn.f_b_proj"
    delta_g_a: str = "self_attn.g_a_proj"
    delta_g_b: str = "self_attn.g_b_proj"
    delta_norm: str = "linear_attn.norm"
    delta_out: str = "linear_attn.out_proj"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    index_q: str = "self_attn.indexer.wq_b"
    index_k: str = "self_attn.indexer.wk"
    index_k_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"

    def under(self, prefix: str) -> LayerNames:
        """Return the names with `prefix` before each."""
        return LayerNames(**{name: prefix + value for name, value in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPNames:
    """Checkpoint names of the module for multi-token prediction (MTP), without `.weight`. The defaults are Qwen's.

    `prefix` begins all of them. `layers`, as in `WeightNames`, is the prefix of its layers. `ignored`: prefixes of
    tensors that are not read. Where the module is the layer behind the model's last one, `{layer}` stands for its
    number in all of them; see `at`.
    """

    prefix: str = "mtp."
    project: str = "mtp.fc"
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    norm: str = "mtp.norm"
    layers: str = "mtp.layers.{layer}."
    ignored: tuple[str, ...] = ()

    def at(self, layer: int) -> MTPNames:
        """Return the names of a module that is layer `layer` of the checkpoint."""
        texts = {name: value.format(layer=layer) for name, value in vars(self).items() if isinstance(value, str)}
        return MTPNames(**texts, ignored=tuple(prefix.format(layer=layer) for prefix in self.ignored))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Checkpoint names of a family's tensors, without `.weight` and `.bias`. The defaults are Llama's.

    `layers` is the prefix of a layer's names; `{layer}` stands for its index. `layer` are the names after it.
    `ignored`: prefixes of tensors that the model does not use, such as a vision tower's. `renamed`: pairs of prefixes;
    a checkpoint may have either, and the names here have the second. `{layer}` in both stands for each layer. `mtp`:
    names of the MTP module that a checkpoint may have; None: no checkpoint of the family has one that pdserve reads.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers.{layer}."
    layer: LayerNames = LayerNames()
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    mtp: MTPNames | None = None

    def renamed_in(self, num_layers: int) -> tuple[tuple[str, str], ...]:
        """Return the pairs `renamed` of a model of `num_layers` layers."""
        return tuple(
            (old.format(layer=index), new.format(layer=index))
            for old, new in self.renamed
            for index in range(num_layers if "{layer}" in old else 1)
        )
