"""EAGLE-3 (arXiv:2503.01840): a head of one layer that drafts tokens from hidden states inside the target.

    x      = fc([h_a ; h_b ; h_c] of position j - 1)       h: outputs of some layers of the target, by default of three
    hidden = layer(x)                                      q, k and v read [input_layernorm(e) ; hidden_norm(x)],
                                                           e being the embedding of token j
    draft  = token of argmax(lm_head(norm(hidden)))

The drafts after the first take `hidden`, as it is before `norm`, in place of x. The head has a vocabulary of its own:
`lm_head` scores the draft tokens, and `d2t[i]` is added to the draft token i to get a token of the target.

The checkpoints are those of `LlamaForCausalLMEagle3`. The layer runs as a `Decoder` or `NativeDecoder` of one layer
that takes hidden states. Its embedding is the target's where the checkpoint has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.errors import ConfigError, ModelError, UnsupportedModelError
from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import ModelSpec, read_dtype, read_json
from pdserve.model.decoder import Decoder
from pdserve.model.drafting.interface import Drafted, draft_group
from pdserve.model.drafting.mtp import Bind, likeliest
from pdserve.model.families.family import read_attention, read_mlp, read_num_layers
from pdserve.model.fields import MAX_WIDTH, read_count, read_counts, read_mapping, read_number, read_texts
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import Model
from pdserve.model.layer_spec import DecoderLayerSpec, SublayerSpec, WeightNames
from pdserve.model.layers.dense import Linear, VocabEmbedding, vocab_rows
from pdserve.model.layers.kernels import Kernels
from pdserve.model.params import Param
from pdserve.model.rope import read_rope

PATH_FIELD = "speculative_draft_model_path"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""SGLang's name of the architecture, and vLLM's."""
TARGETS = ("llama", "qwen3")
"""`model_type` of the models that a head can draft for."""
EMBEDDING = "embed_tokens"
_NAMES = WeightNames(
    embedding=EMBEDDING,
    norm="norm",
    head="lm_head",
    layers="midlayer.",
    ignored=("t2d", "rotary_emb."),
    renamed=(("model.", ""), ("layers.0.", "midlayer.")),
)
_OTHER_HEADS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields that, when true, mean a head of another form."""
_LEAST_LAYERS = 5
"""Layers of a target whose tapped layers need not be named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Spec:
    """Configuration of a head. `layer`: its layer, whose vocabulary is that of the drafts. `target`: the target's.

    `taps`: layers of the target whose outputs `fc` reads, side by side. `fc_bias`: whether `fc` has a bias.
    """

    layer: ModelSpec
    target: ModelSpec
    taps: tuple[int, ...]
    fc_bias: bool = False

    @property
    def num_inputs(self) -> int:
        """Inputs of `fc`."""
        return len(self.taps) * self.target.hidden_size


def read_eagle3(directory: Path, target: ModelSpec) -> Eagle3Spec:
    """Read the head in `directory`, which is to draft for `target`.

    Raises:
        ConfigError: the head is of another vocabulary or hidden size than the target, which EAGLE-3 does not allow, or
            the target is of a family without heads. The field is `speculative_draft_model_path`.
        ModelError: `config.json` is missing or damaged, or the head is of a form that pdserve does not know.
    """
    where, config = str(directory), read_json(directory / "config.json")
    names = read_texts(config, "architectures", where)
    if not names or names[0] not in ARCHITECTURES:
        seen = names[0] if names else None
        raise UnsupportedModelError(
            f"{where}: architecture {seen!r} is not that of an EAGLE-3 head; supported: {', '.join(ARCHITECTURES)}"
        )
    if target.model_type not in TARGETS:
        raise _refusal(f"EAGLE3 drafts for models of type {' and '.join(TARGETS)}, and this is {target.model_type}")
    eagle = read_mapping(config, "eagle_config", where)
    _refuse_other_heads(config, eagle, where)
    vocab_size, hidden_size = (read_count(config, name, where) for name in ("vocab_size", "hidden_size"))
    _refuse_other_target(config, target, vocab_size, hidden_size, where)
    max_positions = read_count(config, "max_position_embeddings", where, default=target.max_positions)
    bias = bool(config.get("attention_bias", False))
    attention = read_attention(config, read_rope(config, max_positions, where), where, qkv_bias=bias, o_bias=bias)
    layer = DecoderLayerSpec(
        (
            SublayerSpec("hidden_norm", attention, embedding_norm="input_layernorm"),
            SublayerSpec("post_attention_layernorm", read_mlp(config, where, bias=bool(config.get("mlp_bias", False)))),
        )
    )
    spec = ModelSpec(
        model_type="llama",
        architectures=names,
        vocab_size=read_count(config, "draft_vocab_size", where, default=vocab_size, most=vocab_size),
        hidden_size=hidden_size,
        layers=(layer,),
        rms_norm_eps=read_number(config, "rms_norm_eps", where, default=1e-6),
        tied_embeddings=False,
        max_positions=max_positions,
        eos_token_ids=(),
        dtype=read_dtype(config, where),
        names=_NAMES,
    )
    taps = _read_taps(config, eagle, target, where)
    return Eagle3Spec(layer=spec, target=target, taps=taps, fc_bias=bool(config.get("bias", False)))


def _refuse_other_heads(config: dict[str, Any], eagle: dict[str, Any], where: str) -> None:
    """Raise UnsupportedModelError for a head of another form."""
    for name in _OTHER_HEADS:
        if config.get(name) or eagle.get(name):
            raise UnsupportedModelError(f"{where}: an EAGLE-3 head with {name} is not supported")
    if not eagle.get("use_aux_hidden_state", True):
        raise UnsupportedModelError(f"{where}: an EAGLE-3 head without use_aux_hidden_state is not supported")
    if read_num_layers(config, where) != 1:
        raise UnsupportedModelError(
            f"{where}: num_hidden_layers is {config['num_hidden_layers']}; an EAGLE-3 head has one layer"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")


def _refuse_other_target(
    config: dict[str, Any], target: ModelSpec, vocab_size: int, hidden_size: int, where: str
) -> None:
    """Raise ConfigError for a head that was made for another target."""
    target_hidden_size = read_count(config, "target_hidden_size", where, default=hidden_size, most=MAX_WIDTH)
    for name, own, wanted in (
        ("vocab_size", vocab_size, target.vocab_size),
        ("hidden_size", hidden_size, target.hidden_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
    ):
        if own != wanted:
            raise _refusal(f"{where} is a head for another model: its {name} is {own}, the model's is {wanted}")


def _read_taps(config: dict[str, Any], eagle: dict[str, Any], target: ModelSpec, where: str) -> tuple[int, ...]:
    """Return the layers of the target whose outputs the head reads.

    `eagle_aux_hidden_state_layer_ids` of `eagle_config` names them, as SGLang reads it; a field of that name outside
    of `eagle_config` names the layers behind them, as vLLM reads it.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    num_layers = target.num_layers
    inside, outside = read_counts(eagle, name, where), read_counts(config, name, where)
    if inside or outside:
        taps = inside or tuple(layer - 1 for layer in outside)
    elif num_layers < _LEAST_LAYERS:
        raise _refusal(f"{where}: the model has {num_layers} layers, so eagle_config must have {name}")
    else:
        taps = tuple(layer - 1 for layer in (2, num_layers // 2, num_layers - 3))
    if not all(0 <= layer < num_layers for layer in taps):
        raise ModelError(f"{where}: {name} is {list(inside or outside)}, and the model has {num_layers} layers")
    return taps


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"--speculative-draft-model-path: {reason}", field=PATH_FIELD)


@dataclasses.dataclass(frozen=True)
class Eagle3Weights:
    """The parts of a head around its layer, whose module is `layer`; all of them are in `layer.params`.

    `fc` is `[N, spec.num_inputs]` to `[N, hidden]`. `d2t` int64 `[draft vocab]`. Every tensor rank has all of both, and
    its share of the rows of `layer.head`.
    """

    layer: Decoder
    fc: Linear
    d2t: Tensor

    @classmethod
    def allocate(
        cls,
        spec: Eagle3Spec,
        layer: Decoder,
        kernels: Kernels,
        *,
        target_embedding: VocabEmbedding,
        has_embedding: bool,
    ) -> Eagle3Weights:
        """Allocate the weights, and give `layer` its embedding and head.

        `has_embedding`: whether the checkpoint has an embedding; without it `target_embedding` is used.
        """
        params, own, coord = layer.params, spec.layer, layer.parallel.coord
        fc = params.new("fc.weight", own.hidden_size, spec.num_inputs)
        bias = params.new("fc.bias", own.hidden_size) if spec.fc_bias else None
        d2t = params.stacked(Param("d2t", (own.vocab_size,)), dtype=torch.int64)
        layer.head = Linear(kernels, vocab_rows(params, "lm_head.weight", own.vocab_size, own.hidden_size, coord))
        layer.read_embedding = target_embedding
        if has_embedding:
            vocab_size = spec.target.vocab_size
            rows = vocab_rows(params, f"{EMBEDDING}.weight", vocab_size, own.hidden_size, coord)
            layer.read_embedding = VocabEmbedding(rows, vocab_size, layer.parallel)
        return cls(layer, Linear(kernels, fc, bias), d2t)

    def check(self, vocab_size: int, where: str) -> None:
        """Raise ModelError when a draft token stands for no token of a target with `vocab_size` tokens."""
        tokens = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
            raise ModelError(f"{where}: d2t names token {int(tokens.max())}, and the model has {vocab_size} tokens")


class Eagle3Head:
    """Implements `DraftModel`.

    `layer` computes what follows `fc`, with the head's `lm_head`; `bind` binds it to its pool. `fc` stands for that of
    the weights and may run elsewhere. `d2t`: see `Eagle3Weights`.
    """

    def __init__(
        self, spec: Eagle3Spec, layer: Model, bind: Bind, *, fc: Callable[[Tensor], Tensor], d2t: Tensor
    ) -> None:
        self._spec, self._layer, self._bind, self._fc, self._d2t = spec, layer, bind, fc, d2t
        self._attention: AttentionBackend | None = None

    @property
    def hidden_size(self) -> int:
        """See `DraftModel.hidden_size`."""
        return self._spec.layer.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """See `DraftModel.taps`."""
        return self._spec.taps

    def kv_group(self, page_tokens: int, dtype: str) -> KVGroup:
        """See `DraftModel.kv_group`."""
        (op,) = self._layer.spec.attentions
        return draft_group(
            self._spec.target, num_layers=1, page_tokens=page_tokens, num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim, dtype=dtype,
        )  # fmt: skip

    def bind(self, pool: KVPool) -> None:
        """See `DraftModel.bind`."""
        self._attention = self._bind(pool)

    def take(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.take`. `hidden` `[N, len(taps) * hidden_size]`: the outputs of the target's layers `taps`."""
        return self._fc(hidden)

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Drafted | None:
        """See `DraftModel.forward`."""
        assert self._attention is not None, "bind comes first"
        found: list[Tensor] = []

        def keep(output: Tensor) -> None:
            found.append(output.index_select(0, batch.sample_index))

        num_samples = batch.sample_index.shape[0]
        attention = self._attention.begin(batch)
        logits = self._layer.forward(batch, attention, None, hidden.clone(), keep if num_samples else None)
        if not num_samples:
            return None
        drafts = likeliest(logits, self._layer.argmax, self._spec.layer.vocab_size, self._layer.parallel)
        return Drafted(drafts + self._d2t.index_select(0, drafts), found[0])
