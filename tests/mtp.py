"""Tiny checkpoints of hybrids with an MTP module, and an independent computation of what MTP modules draft.

The reference runs the module's layer as a transformers model of one layer with full attention, over embeddings that are
computed here, and recomputes the whole sequence for every draft.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model_families import TinyFamily, deep_hybrid

_TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""By model type with a vision tower: the type of its language model."""
_ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]
Config = dict[str, Any]
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
"""Ends of the names of the weights that compute what a layer adds to the hidden states."""


def write_with_mtp(
    name: str, directory: Path, *, seed: int = 0, agrees: float | None = None, **changes: object
) -> Path:
    """Write a random float32 checkpoint of the hybrid family `name` with an MTP module, and return `directory`.

    With `agrees` all layers' outputs are multiplied by it, and the module passes on the embedding: the smaller it is,
    the more drafts are right. `changes` are of the config.
    """
    family: TinyFamily = deep_hybrid(name)
    family = dataclasses.replace(family, changes={**family.changes, **changes})
    family.write(directory, seed)
    tensors = load_file(directory / WEIGHTS)
    generator = torch.Generator().manual_seed(seed + 1)

    def random(like: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(like, generator=generator) * scale

    layer = re.compile(r"model\.(language_model\.)?layers\.3\.(.*)")
    hidden_size = next(tensor.shape[1] for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))
    module = {"mtp.fc.weight": random((hidden_size, 2 * hidden_size), 0.2)}
    for key in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        module[f"{key}.weight"] = random((hidden_size,), 0.2)
    for key, tensor in tensors.items():
        found = layer.fullmatch(key)
        if found is not None:
            module[f"mtp.layers.0.{found[2]}"] = random(tuple(tensor.shape), 0.25 if tensor.ndim > 1 else 0.2)
    if agrees is not None:
        for key, tensor in (tensors | module).items():
            if key.endswith(_OUTPUTS):
                tensor.mul_(agrees)
        norm = next(
            tensor for key, tensor in tensors.items() if re.fullmatch(r"model\.(language_model\.)?norm\.weight", key)
        )
        module["mtp.norm.weight"] = norm.clone()
        module["mtp.pre_fc_norm_embedding.weight"].zero_()
        module["mtp.fc.weight"] = torch.cat((torch.eye(hidden_size), torch.zeros(hidden_size, hidden_size)), 1)
    save_file(tensors | module, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


@dataclasses.dataclass(frozen=True)
class DraftReference:
    """The target and the module of a checkpoint, in float32.

    `layer` is the module's layer with its norm and the target's head; `weights` are all tensors of the checkpoint.
    Subclasses name the weights that combine an embedding and the hidden state before it.
    """

    EMBEDDING_NORM: ClassVar[str]
    HIDDEN_NORM: ClassVar[str]
    COMBINE: ClassVar[str]
    NORM_OFFSET: ClassVar[float] = 0.0
    """Added to the weights of norms."""
    target: PreTrainedModel
    layer: PreTrainedModel
    weights: dict[str, Tensor]

    @classmethod
    def of_parts(
        cls, work: Path, target: tuple[Tensors, Config], layer: tuple[Tensors, Config], weights: Tensors
    ) -> Self:
        """Load the two models from their tensors and configs; `work` is an empty directory for their checkpoints."""
        models = []
        for part, (tensors, config) in (("target", target), ("layer", layer)):
            (work / part).mkdir(parents=True)
            (work / part / "config.json").write_text(json.dumps(config))
            save_file({name: t.clone() for name, t in tensors.items()}, work / part / WEIGHTS, {"format": "pt"})
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
            both = (self._norm(embedded, self.EMBEDDING_NORM), self._norm(before, self.HIDDEN_NORM))
            x = torch.cat(both, 1) @ self.weights[f"{self.COMBINE}.weight"].T
            output = self.layer.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            ids.append(int(self.layer.lm_head(output).argmax()))
            found.append(ids[-1])
            before = torch.cat((before, output))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps, weight = self.target.config.rms_norm_eps, self.NORM_OFFSET + self.weights[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class MTPReference(DraftReference):
    """See `DraftReference`; of hybrids."""

    EMBEDDING_NORM = "mtp.pre_fc_norm_embedding"
    HIDDEN_NORM = "mtp.pre_fc_norm_hidden"
    COMBINE = "mtp.fc"
    NORM_OFFSET = 1.0

    @classmethod
    def load(cls, path: Path, work: Path) -> Self:
        """Load the checkpoint at `path`; `work` is an empty directory for the checkpoint of the module's layer."""
        config = json.loads((path / "config.json").read_text())
        config = config.get("text_config", config)
        model_type = _TEXT_TYPES.get(config["model_type"], config["model_type"])
        weights = {name.replace("language_model.", ""): t for name, t in load_file(path / WEIGHTS).items()}
        shared = {name: t for name, t in weights.items() if name.startswith(("lm_head", "model.embed_tokens"))}
        whole = {name: t for name, t in weights.items() if not name.startswith(("mtp.", "model.visual."))}
        alone = {"model.norm.weight": weights["mtp.norm.weight"]} | shared
        for name, tensor in weights.items():
            if name.startswith("mtp.layers.0."):
                alone[name.replace("mtp.", "model.")] = tensor
        own = {**config, "model_type": model_type, "architectures": [_ARCHITECTURES[model_type]]}
        one = {**own, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        return cls.of_parts(work, (whole, own), (alone, one), weights)
