"""Configuration of what `--speculative-draft-model-path` names, and the refusal of what does not fit the target.

Imports no torch, so that the launchers check it before they start processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError, ModelError, UnsupportedModelError
from pdserve.model.config import ModelSpec, read_dtype, read_json
from pdserve.model.families.family import read_attention, read_mlp, read_num_layers
from pdserve.model.fields import MAX_WIDTH, read_count, read_counts, read_mapping, read_number, read_texts
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, MLASpec, SublayerSpec, WeightNames
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
    where = str(directory)
    if not directory.is_dir():
        raise path_refusal(f"{where} is a file, and an EAGLE-3 head is a directory with HF safetensors")
    config = read_json(directory / "config.json")
    names = read_texts(config, "architectures", where)
    if not names or names[0] not in ARCHITECTURES:
        seen = names[0] if names else None
        raise UnsupportedModelError(
            f"{where}: architecture {seen!r} is not that of an EAGLE-3 head; supported: {', '.join(ARCHITECTURES)}"
        )
    if target.model_type not in TARGETS:
        raise path_refusal(f"EAGLE3 drafts for models of type {' and '.join(TARGETS)}, and this is {target.model_type}")
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


def _refuse_other_heads(config: Mapping[str, Any], eagle: Mapping[str, Any], where: str) -> None:
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
    config: Mapping[str, Any], target: ModelSpec, vocab_size: int, hidden_size: int, where: str
) -> None:
    """Raise ConfigError for a head that was made for another target."""
    target_hidden_size = read_count(config, "target_hidden_size", where, default=hidden_size, most=MAX_WIDTH)
    for name, own, wanted in (
        ("vocab_size", vocab_size, target.vocab_size),
        ("hidden_size", hidden_size, target.hidden_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
    ):
        if own != wanted:
            raise path_refusal(f"{where} is a head for another model: its {name} is {own}, the model's is {wanted}")


def _read_taps(config: Mapping[str, Any], eagle: Mapping[str, Any], target: ModelSpec, where: str) -> tuple[int, ...]:
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
        raise path_refusal(f"{where}: the model has {num_layers} layers, so eagle_config must have {name}")
    else:
        taps = tuple(layer - 1 for layer in (2, num_layers // 2, num_layers - 3))
    if not all(0 <= layer < num_layers for layer in taps):
        raise ModelError(f"{where}: {name} is {list(inside or outside)}, and the model has {num_layers} layers")
    return taps


def path_refusal(reason: str) -> ConfigError:
    """Return the error for a head or draft model that does not fit."""
    return ConfigError(f"--speculative-draft-model-path: {reason}", field=PATH_FIELD)


def cannot_draft(spec: ModelSpec, target: ModelSpec) -> str | None:
    """Return why a model cannot draft for `target`; None when it can. The sentence begins with the field at fault."""
    if spec.vocab_size != target.vocab_size:
        return f"vocab_size is {spec.vocab_size}, and the model's is {target.vocab_size}"
    if spec.num_layers > target.num_layers:
        return f"num_hidden_layers is {spec.num_layers}, more than the model's {target.num_layers}"
    kinds = set()
    for layer in spec.layers:
        op = next((op for op in layer.operations if isinstance(op, AttentionSpec)), None)
        if any(isinstance(op, MLASpec) for op in layer.operations):
            return "its layers attend over latents"
        if op is None or op.window is not None:
            return "layer_types has others than full_attention"
        kinds.add((op.num_kv_heads, op.head_dim))
    return None if len(kinds) == 1 else "num_key_value_heads or head_dim differs between its layers"
