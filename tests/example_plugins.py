"""Makes the plug-ins of `examples/plugins` importable with their entry points, as an installation would."""

from __future__ import annotations

import tomllib
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[1] / "examples" / "plugins"


def installed_in(folder: Path) -> list[str]:
    """Write the package's metadata into `folder`; return the entries that belong into `sys.path`."""
    project = tomllib.loads((PLUGINS / "pyproject.toml").read_text())["project"]
    info = folder / "pdserve_examples-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return [str(folder), str(PLUGINS)]
