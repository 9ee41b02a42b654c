"""Random LoRA adapters in the format of PEFT, and checkpoints that have one merged into their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, base: Path, *, rank: int = 4, seed: int = 0, modules: tuple[str, ...] = ATTENTION + MLP,
    **config: Any,
) -> Path:  # fmt: skip
    """Write a random adapter of the checkpoint at `base`, for its linear layers `modules`; returns `directory`.

    `config` are further fields of its config.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in modules:
            shapes = {"lora_A": (rank, weight.shape[1]), "lora_B": (weight.shape[0], rank)}
            for part, shape in shapes.items():
                key = f"base_model.model.{layer}.{part}.weight"
                tensors[key] = 0.3 * torch.randn(shape, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(facts | config))
    return directory


def merged(directory: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint `base` with `adapter` merged into its weights; returns `directory`."""
    shutil.copytree(base, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    weights, changes = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, a in changes.items():
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[name] = weights[name] + scaling * changes[key.replace("lora_A", "lora_B")] @ a
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
