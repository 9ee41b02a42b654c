"""Reads the config of a model that runs through transformers, and refuses what cannot run, before weights are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from pdserve.errors import ModelError
from pdserve.memory.layout import KVLayout
from pdserve.model.config import ModelSpec, read_dtype, read_json, read_model_spec
from pdserve.model.fields import read_count, read_mapping, read_texts, read_token_ids
from pdserve.model.hf.probe import CacheProbe, layout_of, probe
from pdserve.model.params import torch_dtype

DEFAULT_MAX_POSITIONS = 32768
"""Tokens of a request where the config names no limit."""
_BATCH_ROPES = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sequence of the batch in transformers."""
_OWN_FIELDS = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "eos_token_id")
"""Config fields that two peers need not share."""


@dataclasses.dataclass(frozen=True)
class TransformersSource:
    """A checkpoint that transformers can run. `config` and `model_class` are transformers' own.

    `spec` is the native one where the native reader knows the model, so that both builds of a family can be a pair.
    """

    path: Path
    config: Any
    model_class: Any
    spec: ModelSpec
    num_layers: int

    def build(self, dtype: str) -> Any:
        """Build the model with random weights, on torch's default device."""
        return self.model_class._from_config(self.config, dtype=torch_dtype(dtype), attn_implementation="eager")

    def probe(self, dtype: str) -> CacheProbe:
        """Find out what the layers cache; see `probe`. Raises ModelError."""
        return probe(lambda: self.build(dtype), self.num_layers, str(self.path))

    def layout(self, found: CacheProbe, page_tokens: int) -> KVLayout:
        """Return the KV layout; see `layout_of`. Raises ModelError."""
        return layout_of(found, page_tokens, str(self.path))


def read_source(path: Path) -> TransformersSource:
    """Read the checkpoint at `path` for transformers.

    Raises:
        ModelError: the config is damaged, or transformers cannot run the model here; the message names the field.
    """
    where = str(path)
    if path.suffix == ".gguf":
        raise ModelError(f"{where}: transformers models need a directory with safetensors, not a .gguf file")
    fields = read_json(path / "config.json")
    if fields.get("quantization_config") or read_mapping(fields, "text_config", where).get("quantization_config"):
        raise ModelError(f"{where}: quantization_config is not supported through transformers")
    architectures = read_texts(fields, "architectures", where)
    model_class = getattr(transformers, architectures[0], None) if architectures else None
    if model_class is None:
        shown = repr(architectures[0]) if architectures else "none"
        remote = "; auto_map names remote code, which is never run" if fields.get("auto_map") else ""
        raise ModelError(
            f"{where}: architecture {shown} is neither native nor in transformers {transformers.__version__}{remote}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers' code may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{where}: transformers cannot read config.json: {reason}") from error
    text = config.get_text_config(decoder=True)
    _refuse(config, text, model_class, where)
    num_layers = _count(text, "num_hidden_layers", where)
    return TransformersSource(path, config, model_class, _spec(path, fields, config, text), num_layers)


def _refuse(config: Any, text: Any, model_class: Any, where: str) -> None:
    """Raise ModelError for models whose tokens would be wrong or that cannot generate."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{where}: is_encoder_decoder is true; only decoders are supported")
    if not getattr(model_class, "can_generate", lambda: False)():
        raise ModelError(f"{where}: architecture {model_class.__name__!r} has no language-model head")
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    for rope in nested or [ropes]:
        kind = rope.get("rope_type")
        if kind in _BATCH_ROPES:
            raise ModelError(
                f"{where}: rope_parameters has rope_type {kind!r}, whose angles depend on the batch in transformers"
            )


def _spec(path: Path, fields: Mapping[str, Any], config: Any, text: Any) -> ModelSpec:
    """Return the native spec where there is one, else one of the facts that the engine needs."""
    where = str(path)
    try:
        spec = read_model_spec(path)
        if any(op.rope is not None and op.rope.interleaved for op in spec.attentions):
            # Native code caches the dimensions of keys in another order, so a pair of both is refused by the digest.
            spec = dataclasses.replace(spec, config_digest=_digest(config.to_dict()))
        return spec
    except ModelError:
        pass
    generation = path / "generation_config.json"
    known = read_json(generation) if generation.is_file() else {}
    eos = (getattr(text, "eos_token_id", None), fields.get("eos_token_id"), known.get("eos_token_id"))
    return ModelSpec(
        model_type=config.model_type,
        architectures=read_texts(fields, "architectures", where),
        vocab_size=_count(text, "vocab_size", where),
        hidden_size=_count(text, "hidden_size", where),
        layers=(),
        rms_norm_eps=0.0,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        max_positions=_count(text, "max_position_embeddings", where, DEFAULT_MAX_POSITIONS),
        eos_token_ids=read_token_ids(eos, where),
        dtype=read_dtype(fields, where) or read_dtype(read_mapping(fields, "text_config", where), where),
        config_digest=_digest(config.to_dict()),
    )


def _count(config: Any, name: str, where: str, default: int | None = None) -> int:
    """Read a positive integer of a transformers config. Raises ModelError."""
    value = getattr(config, name, None)
    if value is None:
        value = default
    return read_count({name: value}, name, where)


def _digest(fields: Mapping[str, Any]) -> str:
    shared = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    text = json.dumps(shared, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
