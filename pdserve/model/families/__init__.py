"""Model families, as data. A family is a folder: its layers, read from an HF config, and its weight names.

A folder declares `FAMILIES`, one `Family` for each HF architecture. No other file lists them.
"""

from __future__ import annotations

import importlib
import pkgutil

from pdserve.model.families.family import Family

__all__ = ["FAMILIES", "Family"]


def _found() -> dict[str, Family]:
    """Import the folders and collect what they declare."""
    folders = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    families: dict[str, Family] = {}
    for folder in sorted(folders):
        declared: tuple[Family, ...] = importlib.import_module(f"{__name__}.{folder}").FAMILIES
        for family in declared:
            assert family.architecture not in families, f"{family.architecture} is declared twice"
            families[family.architecture] = family
    return families


FAMILIES = _found()
"""By HF architecture."""
