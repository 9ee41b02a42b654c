"""Reads a checkpoint as an embedding model: the same layers as the causal language model, and how texts are pooled.

Checkpoints of embedding models may lack the head, have names without the base model's prefix, and name the base model
as their architecture (`Qwen3Model`). `modules.json` and the folder of its pooling module are in the format of
sentence-transformers. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdserve.config.embedding_group import PoolingMode
from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.config import ModelSpec, read_json, read_model_spec, spec_from_config
from pdserve.model.families import FAMILIES
from pdserve.model.fields import read_texts
from pdserve.protocol.hidden_states import Pooling

Mode = Literal["last", "mean"]
_BASE, _HEAD = "Model", "ForCausalLM"
_MODULES = "modules.json"
_POOLED: dict[str, Mode] = {"lasttoken": "last", "mean_tokens": "mean", "last": "last", "mean": "mean"}
"""Pooling modes of sentence-transformers, with and without the prefix `pooling_mode_`, that are supported."""
_MODE_FLAG = "pooling_mode_"


def read_embedding_spec(path: Path) -> ModelSpec:
    """Read the spec of the checkpoint at `path` as that of an embedding model; its head is the embedding.

    Raises:
        ModelError: see `read_model_spec`; also for a model whose attention sees later tokens.
    """
    config = read_json(path / "config.json")
    where = str(path)
    _refuse_bidirectional(config, where)
    names = read_texts(config, "architectures", where)
    if names and names[0] not in FAMILIES and names[0].removesuffix(_BASE) + _HEAD in FAMILIES:
        config = {**config, "architectures": [names[0].removesuffix(_BASE) + _HEAD]}
        spec = spec_from_config(config, {}, where=where)
    else:
        spec = read_model_spec(path)
    return as_embedding_model(spec)


def as_embedding_model(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model whose head is not read, and whose tensors may lack the prefix of the base model."""
    own = spec.names
    roots = (own.embedding, own.norm, own.layers.partition("{layer}")[0])
    prefix = own.embedding.rpartition(".")[0] + "."
    shorter = tuple((name.removeprefix(prefix), name) for name in roots if name.startswith(prefix))
    names = dataclasses.replace(own, renamed=(*own.renamed, *shorter), ignored=(*own.ignored, f"{own.head}."))
    return dataclasses.replace(spec, tied_embeddings=True, names=names)


def read_pooling(path: Path, asked: PoolingMode) -> Pooling:
    """Return how the model at `path` makes one vector of a text. `asked` "auto": as its `modules.json` says.

    Without `modules.json` the last token's hidden state is taken, normalised.

    Raises:
        ModelError: `modules.json` is damaged, or has modules or a pooling that pdserve does not compute.
    """
    modules = path / _MODULES
    if path.suffix == ".gguf" or not modules.is_file():
        return Pooling(mode="last" if asked == "auto" else asked)
    kinds = _module_kinds(modules)
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise UnsupportedModelError(f"{modules}: the module {unknown[0]} is not supported")
    mode: Mode = asked if asked != "auto" else "last"
    if asked == "auto" and "Pooling" in kinds:
        mode = _pooling_mode(path / kinds["Pooling"] / "config.json")
    return Pooling(mode=mode, normalize="Normalize" in kinds)


def _module_kinds(modules: Path) -> dict[str, str]:
    """Return the folder of each module in `modules.json`, by the last part of its type."""
    try:
        found = msgspec.json.decode(modules.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{modules} cannot be read: {error}") from error
    return {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in found}


def _pooling_mode(path: Path) -> Mode:
    """Read the one pooling mode of a `Pooling` module: its field `pooling_mode`, or one flag for each mode."""
    config = read_json(path)
    named = config.get("pooling_mode")
    modes = [str(named)] if named is not None else []
    flags = (name for name, value in config.items() if name.startswith(_MODE_FLAG) and value is True)
    modes += [name.removeprefix(_MODE_FLAG) for name in flags]
    mode = _POOLED.get(modes[0]) if len(modes) == 1 else None
    if mode is not None:
        return mode
    raise UnsupportedModelError(f"{path}: pooling {', '.join(modes) or 'none'}; supported: the last token, or the mean")


def _refuse_bidirectional(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModelError for a model whose tokens attend to later ones."""
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.get(field) is value:
            raise UnsupportedModelError(f"{where}: {field} is {value}; only causal attention is supported")
