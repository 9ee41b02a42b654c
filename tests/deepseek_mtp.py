"""Tiny checkpoints with an MTP module behind the last layer, and an independent computation of what it drafts.

The reference runs the module's layer as a transformers model of one layer, over embeddings that are computed here, and
recomputes the whole sequence for every draft.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model_families import FAMILIES

_WEIGHTS = "model.safetensors"
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
    tensors = load_file(directory / _WEIGHTS)
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
    save_file(tensors | module, directory / _WEIGHTS, metadata={"format": "pt"})
    return directory


@dataclasses.dataclass(frozen=True)
class NextLayerReference:
    """The target and the module of a checkpoint, in float32.

    `layer` is the module's layer with its norm and the target's head; `weights` are all tensors of the checkpoint.
    """

    target: PreTrainedModel
    layer: PreTrainedModel
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, path: Path, work: Path) -> NextLayerReference:
        """Load the checkpoint at `path`; `work` is an empty directory for the checkpoint of the module's layer."""
        config, weights = json.loads((path / "config.json").read_text()), load_file(path / _WEIGHTS)
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
        models = []
        for part, tensors, of_part in (("target", whole, config), ("layer", alone, one)):
            (work / part).mkdir(parents=True)
            (work / part / "config.json").write_text(json.dumps(of_part))
            save_file({name: t.clone() for name, t in tensors.items()}, work / part / _WEIGHTS, {"format": "pt"})
            models.append(AutoModelForCausalLM.from_pretrained(work / part, dtype=torch.float32))
        return cls(models[0], models[1], weights)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], num_drafts: int, begins: int = 0) -> list[int]:
        """Return the drafts behind `tokens`, whose last one was sampled.

        The slots of the first token and of the token at `begins` have zeros for the hidden state before them.
        """
        hidden = self.target.model(torch.tensor([list(tokens[:-1])])).last_hidden_state[0]
        before = torch.cat((torch.zeros(1, hidden.shape[1]), hidden))
        before[begins] = 0.0
        ids, found = list(tokens), []
        for _ in range(num_drafts):
            embedded = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
            x = torch.cat((self._norm(embedded, "enorm"), self._norm(before, "hnorm")), 1)
            x = x @ self.weights[f"{_MODULE}eh_proj.weight"].T
            output = self.layer.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            ids.append(int(self.layer.lm_head(output).argmax()))
            found.append(ids[-1])
            before = torch.cat((before, output))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weights[f"{_MODULE}{name}.weight"]
