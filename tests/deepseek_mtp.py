"""Tiny checkpoints with an MTP module behind the last layer, and an independent computation of what it drafts.

The reference runs the module's layer as a transformers model of one layer, over embeddings that are computed here, and
recomputes the whole sequence for every draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_families import FAMILIES
from tests.mtp import WEIGHTS, DraftReference

_NUM_LAYERS = 2
_LAST, _MODULE = f"model.layers.{_NUM_LAYERS - 1}.", f"model.layers.{_NUM_LAYERS}."
_OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of the weights that compute what a layer adds to the hidden states."""


def write_with_next_layer(name: str, directory: Path, *, seed: int = 0, agrees: float | None = None) -> Path:
    """Write a random float32 checkpoint of the family `name` with an MTP module, and return `directory`.

    With `agrees` all layers' outputs are multiplied by it, and the module passes on the embedding: the smaller it is,
    the more drafts are right. Embedding and head are in the module again, as in published checkpoints.
    """
    FAMILIES[name].write(directory, seed)
    tensors = load_file(directory / WEIGHTS)
    generator = torch.Generator().manual_seed(seed + 1)

    def random(like: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(like, generator=generator) * scale

    hidden_size = tensors["model.embed_tokens.weight"].shape[1]
    module = {f"{_MODULE}eh_proj.weight": random((hidden_size, 2 * hidden_size), 0.2)}
    for key in ("enorm", "hnorm", "shared_head.norm"):
        module[f"{_MODULE}{key}.weight"] = 1.0 + random((hidden_size,), 0.2)
    for key, tensor in tensors.items():
        if key.startswith(_LAST):
            value = random(tuple(tensor.shape), 0.25)
            module[_MODULE + key.removeprefix(_LAST)] = 1.0 + value if key.endswith("norm.weight") else value
    module[f"{_MODULE}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    module[f"{_MODULE}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if agrees is not None:
        for key, tensor in (tensors | module).items():
            if key.endswith(_OUTPUTS):
                tensor.mul_(agrees)
        module[f"{_MODULE}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        module[f"{_MODULE}enorm.weight"] = torch.ones(hidden_size)
        module[f"{_MODULE}eh_proj.weight"] = torch.cat(
            (torch.eye(hidden_size), torch.zeros(hidden_size, hidden_size)), 1
        )
    save_file(tensors | module, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


class NextLayerReference(DraftReference):
    """See `DraftReference`; of a module behind the last layer."""

    EMBEDDING_NORM, HIDDEN_NORM, COMBINE = f"{_MODULE}enorm", f"{_MODULE}hnorm", f"{_MODULE}eh_proj"

    @classmethod
    def load(cls, path: Path, work: Path) -> Self:
        """Load the checkpoint at `path`; `work` is an empty directory for the checkpoint of the module's layer."""
        config, weights = json.loads((path / "config.json").read_text()), load_file(path / WEIGHTS)
        whole = {name: tensor for name, tensor in weights.items() if not name.startswith(_MODULE)}
        alone = {name: tensor for name, tensor in whole.items() if name.startswith(("lm_head", "model.embed_tokens"))}
        alone["model.norm.weight"] = weights[f"{_MODULE}shared_head.norm.weight"]
        for name, tensor in weights.items():
            inside = name.removeprefix(_MODULE)
            if inside != name and (inside.startswith(("self_attn", "mlp")) or inside.endswith("layernorm.weight")):
                alone[f"model.layers.0.{inside}"] = tensor
        one = {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0}
        if "mlp_layer_types" in config:
            one["mlp_layer_types"] = ["sparse"]
        return cls.of_parts(work, (whole, config), (alone, one), weights)
