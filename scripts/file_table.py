"""Writes the last section of docs/architecture.md, "Every file in a line", from the files' own docstrings.

Run as `python scripts/file_table.py`; a test checks that nobody forgot to.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## Every file in a line\n"
MAX_SUMMARY = 120
PACKAGES = (
    "base", "protocol", "config", "grammar", "memory", "model", "transfer", "observe", "executor", "ranks", "scheduler",
    "server", "router", "sim", "llm",
)  # fmt: skip
"""Lowest layers first."""


def summary(path: Path) -> str:
    """The first paragraph of the file's docstring where that is short, else its first sentence."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    if len(paragraph) > MAX_SUMMARY:
        paragraph = re.split(r"(?<=\.) (?=[A-Z`(])", paragraph)[0]
    return paragraph.rstrip(":").replace("|", "\\|")


def table(files: list[Path], below: Path) -> list[str]:
    """One row a file."""
    rows = [f"| `{path.relative_to(below)}` | {summary(path)} |" for path in sorted(files)]
    return ["| file | what it owns |", "|---|---|", *rows]


def render() -> str:
    """The whole section."""
    package = ROOT / "pdserve"
    lines = [
        HEADING,
        "The beginnings of the files' own docstrings, which say more. Lowest layers first; `__init__.py` left out.",
        "Written by `python scripts/file_table.py`.\n",
        "### `pdserve/`\n",
        *table([path for path in package.glob("*.py") if path.stem not in ("__init__", "version")], package),
    ]
    for name in PACKAGES:
        folder = package / name
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        files = [path for path in folder.rglob("*.py") if path.stem != "__init__"]
        lines += ["", f"### `{name}/`\n", " ".join(docstring.split("\n\n")[0].split()) + "\n", *table(files, folder)]
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """The page with the section as it should be."""
    return text[: text.index(HEADING)] + render()


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
