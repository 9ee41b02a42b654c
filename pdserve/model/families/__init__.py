"""Model families, as data: each file gives the layers of its models, read from an HF config, and their weight names."""

from __future__ import annotations

from pdserve.model.families.family import Family
from pdserve.model.families.llama import LLAMA
from pdserve.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
"""By HF architecture."""
