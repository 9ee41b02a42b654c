"""Model families, as data. A family is a folder: its layers, read from an HF config, and its weight names.

A folder declares `FAMILIES`, one `Family` for each HF architecture. No other file lists them. Packages of third parties
register theirs as entry points of the group `pdserve.model_families`, see `base/plugins.py`.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil

from pdserve.base.plugins import FAMILY_PLUGINS, load_plugin, plugin_names
from pdserve.errors import ConfigError
from pdserve.model.families.family import Family

__all__ = ["FAMILIES", "Family"]

log = logging.getLogger(__name__)


def _found() -> dict[str, Family]:
    """Import the folders and collect what they declare."""
    folders = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    families: dict[str, Family] = {}
    for folder in sorted(folders):
        declared: tuple[Family, ...] = importlib.import_module(f"{__name__}.{folder}").FAMILIES
        for family in declared:
            assert family.architecture not in families, f"{family.architecture} is declared twice"
            families[family.architecture] = family
    for name in plugin_names(FAMILY_PLUGINS):
        for family in _of_package(name):
            if family.architecture in families:
                log.warning(
                    "the family %s of the entry point %s exists already; it is not used", family.architecture, name
                )
            families.setdefault(family.architecture, family)
    return families


def _of_package(name: str) -> tuple[Family, ...]:
    """Return the families of another package; a package that cannot be loaded is logged, and has none."""
    try:
        declared = load_plugin("model_path", name, (), FAMILY_PLUGINS)
    except ConfigError as error:
        log.warning("the model families of the entry point %s are not used: %s", name, error)
        return ()
    if not isinstance(declared, tuple) or not all(isinstance(family, Family) for family in declared):
        log.warning("the entry point %s of %s is no tuple of Family; it is not used", name, FAMILY_PLUGINS)
        return ()
    return declared


FAMILIES = _found()
"""By HF architecture."""
